"""The strategy's own reduction of gradients, compressed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp import tf_private
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.gradients import as_tensors, native
from tf_gradcomp.exchange.method import Method
from tf_gradcomp.groups.communicator import CollectiveCommunicator
from tf_gradcomp.groups.group import Member
from tf_gradcomp.policy import Policy


class CompressedAllReduce(tf_private.CollectiveAllReduce):
    """A `CrossDeviceOps` that exchanges gradients compressed, and all else as TensorFlow does.

    Metrics, the statistics of synchronized `BatchNormalization` and users' own values come through
    the same `all_reduce` as gradients. So what is a gradient is said, not guessed: Keras'
    optimizers say it, and a training loop of your own calls `strategy.reduce_gradients`.

    `gc.MultiWorkerMirroredStrategy(compressor=...)` makes one. It has a `GradientExchange`, with
    its residuals, for each set of variables that is trained together; see
    `strategy.gradient_exchange`.

    On a step that is skipped because a replica's gradient was not finite, the reduced gradients are
    zeros. `CompressedOptimizer` leaves the optimizer's state as it was, too.

    Args:
        method: The compressor, or a choice between several.
        policy: Which variables get which settings.
        **kwargs: As for TensorFlow's `CollectiveAllReduce`.
    """

    def __init__(self, method: Method, policy: Policy | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._method = method
        self._policy = policy
        # An exchange lives as long as the first of its variables.
        self._exchanges: list[tuple[weakref.ref[tf.Variable], GradientExchange]] = []
        self._exchanging: tuple[GradientExchange, Sequence[Any], float] | None = None

    def find_exchange(self, variables: Sequence[Any]) -> GradientExchange | None:
        """The exchange that was built for `variables`, or for more than these; None if none was."""
        exact = self._exchange_of(variables)
        return exact or next((e for e in self._living() if e.knows(variables)), None)

    def _exchange_of(self, variables: Sequence[Any]) -> GradientExchange | None:
        return next((e for e in self._living() if e.is_for(variables)), None)

    def _living(self) -> list[GradientExchange]:
        self._exchanges = [(first, e) for first, e in self._exchanges if first() is not None]
        return [exchange for _, exchange in self._exchanges]

    def gradient_exchange(self, variables: Sequence[Any]) -> GradientExchange:
        """The exchange for `variables` and no others, built now if there is none.

        Who trains some of them has another: what waits in a residual is for one learning rate.
        """
        exchange = self._exchange_of(variables)
        if exchange is None:
            exchange = GradientExchange(self._method, self._policy)
            exchange.build(variables)
            owner = native(variables[0]) if variables else exchange
            self._exchanges.append((weakref.ref(owner), exchange))
        return exchange

    @contextlib.contextmanager
    def gradients_of(
        self, exchange: GradientExchange, variables: Sequence[Any], if_skipped: float = 0.0
    ) -> Iterator[None]:
        """Within this context, all-reduced values are the gradients of `variables`, one for each.

        Replicas of one process run in turn, and each enters the context for the same variables. On
        a step that is skipped, the sums are `if_skipped`.
        """
        self._exchanging = (exchange, variables, if_skipped)
        try:
            yield
        finally:
            self._exchanging = None

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        if self._exchanging is None:
            return super()._all_reduce(reduce_op, value, replica_id, options)

        rank = tf_private.rank(tf.distribute.get_strategy(), replica_id)
        communicator = CollectiveCommunicator(self._launchers[replica_id], self._group_size, rank)
        exchange, variables, if_skipped = self._exchanging
        reduced, finite = exchange.reduce(value, variables, Member(communicator, replica_id))
        return [values_unless(finite, gradient, if_skipped) for gradient in reduced]


def reduce_gradients(
    ops: CompressedAllReduce,
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
    variables: Sequence[Any],
    if_skipped: float = 0.0,
    trained: Sequence[Any] | None = None,
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Sums gradients over the replicas, compressed; called in a replica context, on all replicas.

    Args:
        ops: The strategy's cross-device ops.
        gradients: One for each of `variables`; None where there is none, on all replicas alike.
        variables: Those of the gradients.
        if_skipped: What the sums are on a step that must be skipped.
        trained: All variables that this optimizer or training loop trains; by default `variables`.

    Returns:
        The reduced gradients; None where there was none.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError("reduce_gradients must be called in a replica context, in strategy.run.")
    exchange = ops.gradient_exchange(variables if trained is None else trained)
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    if not present:
        return list(gradients)
    values = [as_tensors(gradients[i], variables[i]) for i in present]
    reduced: list[Any] = list(gradients)
    of_values = [variables[i] for i in present]
    if context.num_replicas_in_sync == 1:
        totals = exchange.flush(values, of_values)
    elif exchange.group.all_replicas.local_size == 1 and not tf.executing_eagerly():
        with ops.gradients_of(exchange, of_values, if_skipped):
            totals = context.all_reduce(tf.distribute.ReduceOp.SUM, values)
    else:
        totals = _reduce_together(context, exchange, values, of_values, if_skipped)
    for i, total in zip(present, totals, strict=True):
        reduced[i] = total
    return reduced


def _reduce_together(
    context: tf.distribute.ReplicaContext,
    exchange: GradientExchange,
    values: Sequence[tf.Tensor | tf.IndexedSlices],
    variables: Sequence[Any],
    if_skipped: float,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduces the gradients of several replicas in a process, or eagerly.

    TensorFlow's all-reduce has them all in one place, and none of them in its own context; eagerly,
    in a thread where there is no strategy.
    """
    group = exchange.group

    def reduce(gradients: list[Any]) -> list[Any]:
        reduced, finite = exchange.reduce(gradients, variables, group.member())
        return [values_unless(finite, gradient, if_skipped) for gradient in reduced]

    try:
        return context.merge_call(lambda _, each: group.on_each(reduce, each), args=(values,))
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise RuntimeError(
            "Gradients are reduced in a branch, a loop or a tf.function within strategy.run, where "
            "TensorFlow does not let the replicas of a worker meet; reduce them outside of it."
        ) from error


def values_unless(
    finite: tf.Tensor, gradient: tf.Tensor | tf.IndexedSlices, value: float
) -> tf.Tensor | tf.IndexedSlices:
    """The gradient, or, if not `finite`, one of its form that is `value` everywhere."""
    if isinstance(gradient, tf.IndexedSlices):
        values = values_unless(finite, gradient.values, value)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.cond(
        finite,
        lambda: gradient,
        lambda: tf.fill(tf.shape(gradient), tf.constant(value, gradient.dtype)),
    )
