"""Adam's second moment in front of the compressor, so that sparse gradients keep its steps long.

A sparse exchange delivers a gradient in rare, large pieces. Adam would square these, and its second
moment would grow by about the interval between them. So each replica keeps the second moment of its
own gradients, all of which it sees, and compresses what it has divided by their roots; what all
replicas sent then goes through the inner optimizer's momentum and learning rate only.

The second moment of one replica's gradient stands for that of the sum of all: times the number of
replicas, as if their gradients were independent. So no setting is needed, and nothing is sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.base import Compressor, StateSpec
from tf_gradcomp.keras3.momentum_steps import MOMENTUM_STEPS
from tf_gradcomp.policy import GradientSpec

SECOND_MOMENT = "second_moment"
LARGEST = "largest_second_moment"  # AMSGrad's
SLOTS = {SECOND_MOMENT: "velocities", LARGEST: "velocity_hats"}  # what Keras calls its own
AUTO, LOCAL = "auto", "local"


class AdamState(NamedTuple):
    """What an inner optimizer is at.

    Attributes:
        updates: int64 scalar, how many it has made.
        moments: Its own second moments by name, as `Preconditioner.state` has them, in the order of
            the gradients. Replicas that have none yet begin with their share of these; one that
            goes on alone gets them back.
    """

    updates: tf.Tensor
    moments: Mapping[str, Sequence[keras.Variable]]

    def of(self, places: Sequence[int]) -> AdamState:
        """That of some of the gradients."""
        some = {name: [slots[place] for place in places] for name, slots in self.moments.items()}
        return AdamState(self.updates, some)


@dataclasses.dataclass(frozen=True)
class Preconditioner:
    """Divides a replica's gradients by the roots of their second moments.

    Attributes:
        beta_2: Adam's.
        epsilon: Adam's.
        amsgrad: Whether by those of the largest second moments so far.
    """

    beta_2: float
    epsilon: float
    amsgrad: bool = False

    @property
    def divides_by(self) -> str:
        """The name of the state whose root divides."""
        return LARGEST if self.amsgrad else SECOND_MOMENT

    def state(self, spec: GradientSpec) -> dict[str, StateSpec]:
        """The second moment of one gradient, and AMSGrad's largest.

        The sum over N replicas, each of which has the gradient of its share of the batch, is about
        the second moment of all of the batch: it serves any other number of them.
        """
        return dict.fromkeys([SECOND_MOMENT, self.divides_by], StateSpec(spec.shape))

    def second_moments(
        self, state: Mapping[str, Sequence[tf.Tensor]], updates: tf.Tensor, replicas: int
    ) -> ops.SecondMoments:
        """By whose roots a replica's gradients are to be divided.

        Args:
            state: Resource handles by name, in the order of the gradients.
            updates: int64 scalar, of the inner optimizer so far.
            replicas: Their number.
        """
        return ops.SecondMoments(
            state[SECOND_MOMENT],
            updates + 1,
            self.beta_2,
            self.epsilon,
            replicas,
            state[LARGEST] if self.amsgrad else (),
        )

    def divisor(self, second_moment: tf.Tensor, updates: tf.Tensor) -> tf.Tensor:
        """By what the sum of all gradients was divided in the last of `updates`."""
        correction = 1 - tf.pow(self.beta_2, tf.cast(updates, tf.float32))
        return tf.sqrt(second_moment / tf.maximum(correction, 1 - self.beta_2)) + self.epsilon


def preconditioner_for(
    optimizer: keras.optimizers.Optimizer, compressor: Compressor, setting: str | None
) -> Preconditioner | None:
    """What `precondition=setting` means for an inner optimizer.

    Args:
        optimizer: Without a loss scaler around it.
        compressor: `"auto"` preconditions only for those that it helps.
        setting: `"auto"`, `"local"` or None.

    Raises:
        ValueError: If `setting` is another, or the optimizer cannot be preconditioned.
    """
    if setting not in (AUTO, LOCAL, None):
        raise ValueError(f'precondition: expected "auto", "local" or None; received {setting!r}.')
    able = type(optimizer) in MOMENTUM_STEPS
    if setting == LOCAL and not able:
        names = ", ".join(class_.__name__ for class_ in MOMENTUM_STEPS)
        raise ValueError(
            f'precondition="local" is for {names}; received {type(optimizer).__name__}. Use '
            'precondition="auto", which leaves others as they are.'
        )
    if setting is None or not able or (setting == AUTO and not compressor.behind_second_moment):
        return None
    amsgrad = bool(getattr(optimizer, "amsgrad", False))
    return Preconditioner(float(optimizer.beta_2), float(optimizer.epsilon), amsgrad)
