"""`gc.CompressedAllReduce`, the cross-device ops of a strategy that compresses gradients."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.advice import measuring
from tf_gradcomp.advice.probe import choose
from tf_gradcomp.exchange.exchange import GradientExchange, check_not_in_xla
from tf_gradcomp.exchange.gradients import as_tensors, native, values_or_fill
from tf_gradcomp.exchange.setup import Candidate, Method, replacement_of
from tf_gradcomp.keras_version import install_patches
from tf_gradcomp.policy import LayerPolicy, checked_policy
from tf_gradcomp.private import tensorflow as tf_private


class _Step(NamedTuple):
    """Gradients that the next `batch_reduce` gets."""

    exchange: GradientExchange
    variables: Sequence[tf.Variable]
    if_skipped: float


class CompressedAllReduce(tf_private.ForwardingOps):
    """Cross-device ops that compress gradients; TensorFlow reduces all other values as before.

    `gc.MultiWorkerMirroredStrategy(compressor=...)` creates and uses one. On several devices of one
    process, pass it to TensorFlow's own strategy:

    ```python
    strategy = tf.distribute.MirroredStrategy(cross_device_ops=gc.CompressedAllReduce("adacomp"))
    ```

    Keras' optimizers say which values are gradients, in `fit` and in training loops. A loop that
    updates variables by itself says so by `reduce_gradients`. All other values are reduced
    unchanged, such as metrics, statistics of synchronized `BatchNormalization`, and what a program
    passes to `all_reduce`.

    `MirroredStrategy` allows no collectives in a branch, so methods with a warm-up are refused
    there.

    There is one exchange, with residuals of its own, for each set of variables that an optimizer or
    a loop trains. If a replica's gradient is not finite, the step is skipped: the sums are zeros.
    `CompressedOptimizer` leaves the optimizer's state as it was, too.

    Args:
        compressor: A name, a config or a compressor: see `gc.compressors.get`.
        policy: Which variables get which settings.

    Raises:
        TypeError: If `policy` is no `gc.Policy`.
        ValueError: If `compressor` is unknown, or `gradcomp advise` runs the program.
    """

    def __init__(
        self,
        compressor: str | Mapping[str, Any] | compressors.Compressor | compressors.Auto,
        policy: LayerPolicy | None = None,
    ) -> None:
        super().__init__()
        install_patches()
        self.compressor = replacement_of(compressors.get(compressor))
        self._policy = checked_policy(policy)
        self._method = _method_of(self.compressor)
        # An exchange lives as long as the first of its variables.
        self._exchanges: list[tuple[weakref.ref[tf.Variable], GradientExchange]] = []
        # The step whose gradients the next `batch_reduce` of this thread gets.
        self._step: contextvars.ContextVar[_Step | None]
        self._step = contextvars.ContextVar("step", default=None)

    def find_exchange(self, variables: Sequence[Any]) -> GradientExchange | None:
        """Returns the exchange built for `variables` and perhaps others; None if there is none."""
        return self._exact_exchange(variables) or next(iter(self._exchanges_with(variables)), None)

    def _exact_exchange(self, variables: Sequence[Any]) -> GradientExchange | None:
        found = self._exchanges_with(variables)
        return next((e for e in found if len(e.specs) == len(variables)), None)

    def _exchanges_with(self, variables: Sequence[Any]) -> list[GradientExchange]:
        self._exchanges = [(first, e) for first, e in self._exchanges if first() is not None]
        return [exchange for _, exchange in self._exchanges if exchange.indices.include(variables)]

    def gradient_exchange(self, variables: Sequence[Any]) -> GradientExchange:
        """Returns the exchange of the gradients of `variables`, with its residuals.

        The exchange is built at the first step, or by this call in the strategy's scope. A
        checkpoint saves and restores it. A loop that trains some of the variables has another
        exchange, because a residual belongs to one learning rate.

        Args:
            variables: All variables that one optimizer or training loop trains.
        """
        exchange = self._exact_exchange(variables)
        if exchange is None:
            exchange = GradientExchange(self._method, self._policy)
            exchange.build(variables)
            owner = native(variables[0]) if variables else exchange
            self._exchanges.append((weakref.ref(owner), exchange))
        return exchange

    @tf.autograph.experimental.do_not_convert
    def reduce_gradients(
        self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None], variables: Sequence[Any]
    ) -> list[tf.Tensor | tf.IndexedSlices | None]:
        """Sums gradients over the replicas; each replica calls it, inside `strategy.run`.

        Keras' optimizers do not need the call.

        Args:
            gradients: One for each of `variables`, in their shapes; None for no gradient, equally
                on all replicas.
            variables: All variables that are trained, the same at each call.

        Returns:
            The sums, equal on all replicas; None for missing gradients; zeros if the step must be
            skipped.

        Raises:
            ValueError: Outside a replica context.
            RuntimeError: In a branch, a loop or a `tf.function` within `strategy.run`.
        """
        return with_missing(gradients, self.reduction(gradients, variables, variables)())

    def reduction(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
        variables: Sequence[Any],
        trained: Sequence[Any],
        if_skipped: float = 0.0,
    ) -> Callable[[], Sequence[Any]]:
        """Returns the function that sums the present gradients, for the calling replica.

        Args:
            gradients: One for each of `variables`, or None.
            variables: The variables of the gradients.
            trained: All variables that this optimizer or training loop trains.
            if_skipped: The value of the sums on a step that must be skipped.

        Raises:
            ValueError: Outside a replica context.
        """
        context = tf.distribute.get_replica_context()
        if context is None:
            raise ValueError(
                "reduce_gradients must be called in a replica context, in strategy.run."
            )
        exchange = self.gradient_exchange(trained)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        values = [as_tensors(gradient, variable) for gradient, variable in pairs]
        present = [native(variable) for _, variable in pairs]
        if context.num_replicas_in_sync == 1 or not values:
            return functools.partial(exchange.flush, values, present)
        if exchange.group.all_replicas.local_size > 1:  # one tensor of all replicas is a host's
            values = list(map(tf.identity, values))
        across = functools.partial(self._reduce_across, _Step(exchange, present, if_skipped))
        return _explained_merge()(functools.partial(context.merge_call, across, args=(values,)))

    def _reduce_across(
        self, step: _Step, strategy: tf.distribute.Strategy, gradients: Sequence[Any]
    ) -> Sequence[Any]:
        check_not_in_xla()  # TensorFlow would use other ops
        token = self._step.set(step)
        try:
            pairs = list(zip(gradients, step.variables, strict=True))
            return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
        finally:
            self._step.reset(token)

    def batch_reduce(
        self, reduce_op: Any, value_destination_pairs: Sequence[Any], options: Any = None
    ) -> Any:
        """Reduces several values; see `tf.distribute.CrossDeviceOps`. Gradients are compressed."""
        step = self._step.get()
        if step is None:
            return super().batch_reduce(reduce_op, value_destination_pairs, options)
        self._step.set(None)  # an exchange may reduce other values
        gradients = [gradient for gradient, _ in value_destination_pairs]
        group = step.exchange.group
        reduce = functools.partial(step.exchange.reduce, variables=step.variables)
        totals, finite, *_ = group.each_replica(reduce, args=(gradients,))
        fill = (finite, totals, step.if_skipped)
        each_replica = tf.distribute.get_strategy().extended.call_for_each_replica
        return each_replica(values_or_fill, args=fill)


def with_missing(gradients: Sequence[Any], totals: Sequence[Any]) -> list[Any]:
    """Returns the sums of the present gradients, and None for the missing ones."""
    sums = iter(totals)
    return [None if gradient is None else next(sums) for gradient in gradients]


@contextlib.contextmanager
def _explained_merge() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise RuntimeError(
            "Gradients are reduced in a branch, a loop or a tf.function within strategy.run, "
            "where TensorFlow cannot merge the replicas of a worker; reduce gradients outside it."
        ) from error


def compressed_all_reduce(strategy: tf.distribute.Strategy) -> CompressedAllReduce | None:
    """Returns the compressing ops of a strategy; None if it does not compress gradients."""
    ops = tf_private.installed_ops(strategy)
    return ops if isinstance(ops, CompressedAllReduce) else None


def _method_of(compressor: compressors.Compressor | compressors.Auto) -> Method:
    if measuring.is_on():
        raise ValueError(
            "gradcomp advise measures the exchanges of a gc.CompressedOptimizer. Here the "
            "compressor is on the strategy: for this run, create the strategy without a "
            "compressor, and wrap the optimizer. The advice applies to both."
        )
    methods = compressors.methods_of(compressor, lags=True)  # the optimizer may be Adam
    return Method(repr(compressor), [Candidate(method) for method in methods], choose)
