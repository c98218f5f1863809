"""The exchanges of a strategy that compresses gradients itself."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.gradients import as_tensors, native, values_or_fill
from tf_gradcomp.exchange.setup import Method
from tf_gradcomp.policy import LayerPolicy


class CompressedAllReduce:
    """The exchanges of a strategy, one for each set of variables that are trained together.

    `gc.MultiWorkerMirroredStrategy(compressor=...)` creates one. Keras' optimizers and
    `strategy.reduce_gradients` pass their gradients to it. All other values, such as metrics and
    the statistics of synchronized `BatchNormalization`, are reduced by TensorFlow unchanged.

    On a step that is skipped because a replica's gradient was not finite, the reduced gradients are
    zeros. `CompressedOptimizer` leaves the optimizer's state as it was, too.

    Args:
        method: The compressor, or a choice between several.
        policy: Which variables get which settings.
    """

    def __init__(self, method: Method, policy: LayerPolicy | None = None) -> None:
        self._method = method
        self._policy = policy
        # An exchange lives as long as the first of its variables.
        self._exchanges: list[tuple[weakref.ref[tf.Variable], GradientExchange]] = []

    def find_exchange(self, variables: Sequence[Any]) -> GradientExchange | None:
        """Returns the exchange built for `variables` and perhaps others; None if there is none."""
        return self._exchange_of(variables) or next(iter(self._knowing(variables)), None)

    def _exchange_of(self, variables: Sequence[Any]) -> GradientExchange | None:
        return next((e for e in self._knowing(variables) if len(e.specs) == len(variables)), None)

    def _knowing(self, variables: Sequence[Any]) -> list[GradientExchange]:
        self._exchanges = [(first, e) for first, e in self._exchanges if first() is not None]
        return [exchange for _, exchange in self._exchanges if exchange.numbers.include(variables)]

    def gradient_exchange(self, variables: Sequence[Any]) -> GradientExchange:
        """Returns the exchange for `variables` and no others; builds the exchange if necessary.

        A loop that trains some of the variables has another exchange, because a residual belongs to
        one learning rate.
        """
        exchange = self._exchange_of(variables)
        if exchange is None:
            exchange = GradientExchange(self._method, self._policy)
            exchange.build(variables)
            owner = native(variables[0]) if variables else exchange
            self._exchanges.append((weakref.ref(owner), exchange))
        return exchange

    def reduce_gradients(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
        variables: Sequence[Any],
        if_skipped: float = 0.0,
        trained: Sequence[Any] | None = None,
    ) -> list[tf.Tensor | tf.IndexedSlices | None]:
        """Sums gradients over the replicas; each replica calls it in its own context.

        Args:
            gradients: One for each of `variables`; None for no gradient, equally on all replicas.
            variables: The variables of the gradients.
            if_skipped: The value of the sums on a step that must be skipped.
            trained: All variables that this optimizer or training loop trains; by default
                `variables`.

        Returns:
            The reduced gradients; None for missing gradients.
        """
        context = tf.distribute.get_replica_context()
        if context is None:
            raise ValueError(
                "reduce_gradients must be called in a replica context, in strategy.run."
            )
        exchange = self.gradient_exchange(variables if trained is None else trained)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not present:
            return list(gradients)
        values = [as_tensors(gradients[i], variables[i]) for i in present]
        of_values = [variables[i] for i in present]
        if context.num_replicas_in_sync == 1:
            totals = exchange.flush(values, of_values)
        else:
            totals = _reduced(context, exchange, values, of_values, if_skipped)
        reduced: list[Any] = list(gradients)
        for i, total in zip(present, totals, strict=True):
            reduced[i] = total
        return reduced


def compressed_all_reduce(strategy: tf.distribute.Strategy) -> CompressedAllReduce | None:
    """Returns the exchanges of a strategy; None if the strategy does not compress gradients."""
    return getattr(strategy, "compressed_all_reduce", None)


def _reduced(
    context: tf.distribute.ReplicaContext,
    exchange: GradientExchange,
    gradients: Sequence[tf.Tensor | tf.IndexedSlices],
    variables: Sequence[Any],
    if_skipped: float,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Returns the sums over all replicas, on the calling replica."""
    group = exchange.group

    def reduce(own: Sequence[Any]) -> list[Any]:
        reduced, finite, *_ = exchange.reduce(own, variables)
        return values_or_fill(finite, reduced, if_skipped)

    def across(_: tf.distribute.Strategy, gradients: list[Any]) -> list[Any]:
        return group.each_replica(reduce, args=(gradients,))

    try:
        if group.all_replicas is group:
            return reduce(gradients)
        return context.merge_call(across, args=(gradients,))
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise RuntimeError(
            "Gradients are reduced in a branch, a loop or a tf.function within strategy.run, "
            "where TensorFlow cannot merge the replicas of a worker; reduce gradients outside it."
        ) from error
