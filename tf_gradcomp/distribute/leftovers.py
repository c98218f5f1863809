"""What an earlier job left unsent, for a replica whose method keeps nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tf_gradcomp.adam.preconditioner import AdamState, Preconditioner
from tf_gradcomp.distribute.communicator import Communicator
from tf_gradcomp.distribute.gradients import all_finite, plus_residual


@dataclasses.dataclass(frozen=True)
class Leftovers:
    """The state of one replica, in the order of its gradients.

    Attributes:
        residuals: One for each gradient, or none.
        moments: Second moments by name, for each gradient; none without a preconditioner.
        unsent: bool scalar, whether there is anything in the residuals.
        residual_scale: What a residual is, over the gradients that it stands for.
        preconditioner: By what the residuals are divided, if by anything.
    """

    residuals: Sequence[tf.Variable]
    moments: Mapping[str, Sequence[tf.Variable]]
    unsent: tf.Variable
    residual_scale: float
    preconditioner: Preconditioner | None

    def added_to(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        divisor: tf.Tensor | float,
        adam: AdamState | None,
        communicator: Communicator | None,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """The gradients, plus what is left, once; then nothing is.

        Args:
            gradients: Where one is not finite, on any replica, nothing is added yet.
            divisor: What the gradients will be divided by.
            adam: Of this replica; it is given back its second moments.
            communicator: Reaches the other replicas; None if there are none.
        """

        def plus_residuals() -> list[tf.Tensor | tf.IndexedSlices]:
            moments = {
                name: _totals(of_replica, communicator) for name, of_replica in self.moments.items()
            }
            factors = [divisor / self.residual_scale for _ in gradients]
            if self.preconditioner and adam:
                factors = [
                    factor * self.preconditioner.divisor(moment, adam.updates)
                    for factor, moment in zip(
                        factors, moments[self.preconditioner.divides_by], strict=True
                    )
                ]
            sums = list(gradients)
            for i, residual in enumerate(self.residuals):
                sums[i] = plus_residual(gradients[i], residual * factors[i])
            with tf.control_dependencies(tf.nest.flatten(sums, expand_composites=True)):
                for residual in self.residuals:
                    residual.assign(tf.zeros(residual.shape))
                for name, slots in adam.moments.items() if adam else ():
                    for slot, total in zip(slots, moments[name], strict=True):
                        slot.assign(tf.cast(total, slot.dtype))
                self.unsent.assign(False)
            return sums

        ready = tf.cond(
            self.unsent.read_value(),
            lambda: _finite_on_all(all_finite(gradients), communicator),
            lambda: tf.constant(False),
        )
        return tf.cond(ready, plus_residuals, lambda: list(gradients))


def _finite_on_all(finite: tf.Tensor, communicator: Communicator | None) -> tf.Tensor:
    if communicator is None:
        return finite
    bad = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(communicator.all_reduce(bad[tf.newaxis])[0], 0)


def _totals(
    of_replica: Sequence[tf.Variable], communicator: Communicator | None
) -> list[tf.Tensor]:
    """The sums over the replicas."""
    if communicator is None or not of_replica:
        return [tf.convert_to_tensor(variable) for variable in of_replica]
    flat = tf.concat([tf.reshape(variable, [-1]) for variable in of_replica], 0)
    sizes = [variable.shape.num_elements() for variable in of_replica]
    parts = tf.split(communicator.all_reduce(flat), sizes)
    return [
        tf.reshape(part, variable.shape) for part, variable in zip(parts, of_replica, strict=True)
    ]
