"""Adam's second moment in front of compressors, and the momentum behind them.

Division by Adam's second moment before the compressor, so that Adam's steps keep their length.

A sparse exchange sends an entry of a gradient rarely, and then sends the whole accumulated value.
Adam would square these large values. The second moment would grow by about the number of steps
between two exchanges, and the optimizer's steps would become short. Each replica therefore keeps
the second moments of its own gradients, and divides the gradients by their roots before it
compresses them. The inner optimizer then multiplies the sum of the sent values by its learning
rate; `momentum` says which values go through its momentum.

The second moment of the sum of all gradients is estimated by one replica's own second moment,
times the number of replicas, as if their gradients were independent. This estimate needs no setting
and sends no second moments.

The steps of Adam's family, for gradients that are already divided by the second moment's root.

Each step is its paper's step with 1 in place of the root: momentum, its bias correction, and
further operations on them. The optimizer itself applies learning rate and weight decay.

Entries that are delayed in a residual are sent as sums over their delay. This sum is already a
moving average; with additional momentum, the weights would follow even older gradients. A delayed
gradient therefore goes directly into the step and bypasses the momentum. The momentum then only
uses up the value that earlier steps left in it.

Sources: Kingma and Ba, "Adam", ICLR 2015, algorithm 1; Dozat, "Incorporating Nesterov Momentum into
Adam", 2016; You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.base import StateSpec
from tf_gradcomp.policy import GradientSpec


class UpdateInputs(NamedTuple):
    """Inputs of an optimizer step, in the dtype of the variable."""

    variable: tf.Tensor  # the weights, any shape
    # The divided gradient that goes through the momentum, summed over the replicas; in the shape of
    # the weights.
    gradient: tf.Tensor
    # The divided gradient that bypasses the momentum, in the same form. Either `gradient` or
    # `direct` is zero.
    direct: tf.Tensor
    momentum: tf.Tensor  # the first moment, with `gradient` in it
    beta_1: float  # Adam's decay rate of the momentum
    step: tf.Tensor  # scalar, 1 in the first step
    correction: tf.Tensor  # of `momentum`, see `bias_correction`
    # Scalar, Nadam's product of all momentum coefficients, this step's included; None for other
    # optimizers.
    product: Any = None
    schedule: float = 1.0  # how fast Nadam's momentum coefficients grow; 1 in its paper


Step = Callable[[UpdateInputs], tf.Tensor]  # returns the update to subtract, without the rate


def split(gradient: tf.Tensor, delayed: tf.Tensor | bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Splits a gradient into a part that goes through the momentum and a part that bypasses it."""
    nothing = tf.zeros_like(gradient)
    return tf.where(delayed, nothing, gradient), tf.where(delayed, gradient, nothing)


def bias_correction(beta_1: Any, step: tf.Tensor) -> tf.Tensor:
    """Returns the number by which Adam divides the momentum in a step; in the dtype of `step`."""
    return 1 - tf.pow(tf.cast(beta_1, step.dtype), step)


def adam(inputs: UpdateInputs) -> tf.Tensor:
    """The step of Adam and of AdamW."""
    return inputs.momentum / inputs.correction + inputs.direct


def lamb(inputs: UpdateInputs) -> tf.Tensor:
    """The step of LAMB: Adam's, scaled to the length of the weights."""
    return to_length_of(inputs.variable, adam(inputs))


def to_length_of(variable: tf.Tensor, update: tf.Tensor) -> tf.Tensor:
    """An update scaled to the length of the weights; unscaled if either is zero."""
    weights, length = tf.norm(variable), tf.norm(update)
    is_nonzero = tf.logical_and(weights > 0, length > 0)
    return tf.where(is_nonzero, weights / tf.where(is_nonzero, length, 1), 1) * update


def nadam(inputs: UpdateInputs) -> tf.Tensor:
    """The step of Nadam: Adam's with Nesterov momentum."""
    this = _nadam_factor(inputs.beta_1, inputs.step, inputs.schedule)
    following = _nadam_factor(inputs.beta_1, inputs.step + 1, inputs.schedule)
    ahead = following * inputs.momentum / (1 - inputs.product * following)
    return ahead + (1 - this) * inputs.gradient / (1 - inputs.product) + inputs.direct


def nadam_product(beta_1: float, step: tf.Tensor) -> tf.Tensor:
    """Returns the product of Nadam's momentum coefficients from step 1 to `step`."""
    growing = tf.range(1.0, tf.minimum(step, 1000) + 1)  # after that, a coefficient is beta_1
    return tf.pow(beta_1, step) * tf.reduce_prod(_nadam_factor(1.0, growing, 1.0))


def _nadam_factor(beta_1: float, step: tf.Tensor, schedule: float) -> tf.Tensor:
    """Nadam's coefficient of the momentum in a step."""
    return beta_1 * (1 - 0.5 * tf.pow(tf.cast(0.96, step.dtype), schedule * step))


SECOND_MOMENT = "second_moment"
LARGEST = "largest_second_moment"  # AMSGrad's
# A corrected epsilon is up to 30 times as large in the first steps. A larger number would shrink
# entries with small roots; such entries would be sent late, and training would lag.
LARGEST_NOT_CORRECTED = 1e-6


@dataclasses.dataclass(frozen=True)
class Preconditioner:
    """Divides a replica's gradients by the roots of their second moments."""

    beta_2: float  # Adam's decay rate of the second moments
    epsilon: float  # Adam's epsilon, which is added to the roots
    amsgrad: bool = False  # whether the divisor is the root of the largest second moment so far
    # Whether Keras adds epsilon before it corrects the bias of second moments, as in Adam and
    # AdamW, but not in Nadam and Lamb. This class does the same above 1e-6. A smaller epsilon,
    # which only keeps roots from zero, is added afterwards, as in the paper of Adam.
    corrects_epsilon: bool = False
    # Whether the squares of a table's `tf.IndexedSlices` are added one by one, as Keras 3 does,
    # even if slices belong to the same row; otherwise the sum of the slices is squared.
    squares_each_slice: bool = False

    @property
    def adds_epsilon_first(self) -> bool:
        """Whether epsilon is added before the bias of second moments is corrected."""
        return self.corrects_epsilon and self.epsilon > LARGEST_NOT_CORRECTED

    @property
    def root_of(self) -> str:
        """The name of the state whose root divides."""
        return LARGEST if self.amsgrad else SECOND_MOMENT

    def state(self, spec: GradientSpec) -> dict[str, StateSpec]:
        """The second moment of one gradient, and AMSGrad's largest.

        Each replica has the gradients of its share of the batch. The sum of the second moments over
        all replicas is about the batch's second moment, so any number of replicas can restore it.
        """
        return dict.fromkeys([SECOND_MOMENT, self.root_of], StateSpec(spec.shape))

    def second_moments(
        self,
        state: Mapping[str, Sequence[tf.Tensor]],
        updates: tf.Tensor,
        replicas: int,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
    ) -> ops.SecondMoments:
        """Returns the second moments by whose roots a replica's gradients are to be divided.

        `state` has resource handles by name. `updates` counts the updates of each second moment so
        far, or of all second moments as a scalar.
        """
        return ops.SecondMoments(
            state[SECOND_MOMENT],
            updates + 1,
            self.beta_2,
            self.epsilon,
            replicas,
            state[LARGEST] if self.amsgrad else (),
            [self._squares(gradient) for gradient in gradients],
            self.adds_epsilon_first,
        )

    def _squares(self, gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | None:
        """Returns the sums of squared slices; None if the sum of the slices is squared instead."""
        if not (self.squares_each_slice and isinstance(gradient, tf.IndexedSlices)):
            return None
        values = tf.cast(gradient.values, tf.float32)
        rows = gradient.dense_shape[0]
        return tf.math.unsorted_segment_sum(values * values, gradient.indices, rows)

    def with_residuals(self, second_moment: tf.Tensor, waiting: tf.Tensor) -> tf.Tensor:
        """Returns an inner optimizer's second moment as if the residuals had been sent just now.

        The square of one sum is a rough estimate. If there is little else, the estimate is at least
        the variable's mean.
        """
        sent = tf.cast(second_moment, tf.float32)
        late = (1 - self.beta_2) * tf.square(waiting)
        total = sent + late
        entries = tf.math.count_nonzero(total, dtype=tf.float32)
        mean = tf.math.divide_no_nan(tf.reduce_sum(total), entries)
        return tf.where(late > sent, tf.maximum(total, mean), total)

    def correction(self, updates: tf.Tensor) -> Correction:
        """Returns the bias correction of second moments."""
        decayed = tf.pow(self.beta_2, tf.cast(updates, tf.float32))
        factor = tf.sqrt(tf.maximum(1 - decayed, 1 - self.beta_2))
        epsilon = self.epsilon / factor if self.adds_epsilon_first else self.epsilon
        return Correction(factor, epsilon, (1 - self.beta_2) / tf.square(factor))

    def corrections(self, updates: tf.Tensor) -> list[Correction]:
        """Returns the bias correction of each second moment."""
        stacked = self.correction(updates)
        factors = tf.unstack(stacked.factor)
        epsilons = tf.unstack(tf.broadcast_to(stacked.epsilon, stacked.factor.shape))
        return [Correction(*pair) for pair in zip(factors, epsilons, strict=True)]


class Correction(NamedTuple):
    """Corrects the bias of second moments, which are too small in the first steps."""

    # float32, in the shape of `updates`, by which the bias makes their roots smaller.
    factor: tf.Tensor
    epsilon: tf.Tensor | float  # the number to add to the corrected roots
    # The factor that turns a second moment into a first step's second moment.
    first_step_factor: tf.Tensor | float = 1.0

    def root(self, second_moment: tf.Tensor) -> tf.Tensor:
        """Returns Adam's divisor of a gradient: the corrected root, plus epsilon."""
        return tf.sqrt(second_moment) / self.factor + self.epsilon

    def came_late(self, second_moment: tf.Tensor, waiting: tf.Tensor) -> tf.Tensor:
        """Whether the mean square of the residual exceeds that of a step's gradient."""
        step_square = tf.reduce_sum(second_moment) / tf.square(self.factor)
        return tf.reduce_sum(tf.square(waiting)) > step_square

    def divided(self, values: Sequence[tf.Tensor], second_moment: tf.Tensor) -> list[tf.Tensor]:
        """Divides values in units of a gradient, such as its momentum, like the gradient itself."""
        root, seen = self.root(second_moment), second_moment > 0
        # If Adam has seen no gradient yet, it would take a step of about 1.
        return [
            tf.where(seen, value / root, tf.clip_by_value(value, -1.0, 1.0)) for value in values
        ]
