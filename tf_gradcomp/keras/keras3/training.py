"""Replaces functions of Keras 3 that a step calls: gradients, loss scales, losses and seeds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gradcomp.exchange.gradients import check_no_overwriting
from tf_gradcomp.keras.common import (
    fit,  # noqa: F401  # replaces `fit`
    summing,
)
from tf_gradcomp.keras.common.data import warn_of_empty_batch
from tf_gradcomp.keras.common.inner import check_not_inside
from tf_gradcomp.keras.common.second_moments import check_moments_not_taken
from tf_gradcomp.keras.keras3 import steps
from tf_gradcomp.keras.keras3.data import reading  # noqa: F401  # of `fit`
from tf_gradcomp.keras.keras3.optimizer import CompressedOptimizer
from tf_gradcomp.private import keras3 as keras_private
from tf_gradcomp.private.patching import patch
from tf_gradcomp.strategy import random_numbers
from tf_gradcomp.strategy.compressed_all_reduce import compressed_all_reduce, with_missing
from tf_gradcomp.strategy.strategy import MultiWorkerMirroredStrategy


@patch(
    keras_private.REDUCE_GRADIENTS,
    why="Only this function knows which tensor is the gradient of which variable.",
    test="test_reduce_gradients",
    essential=True,
)
@tf.autograph.experimental.do_not_convert
def reduce_gradients(original: Any, self: Any, grads_and_vars: Any) -> Any:
    """Replaces the reduction of gradients in Keras' optimizers; wrapped ones do not reduce."""
    check_not_inside(self, keras_private.applying())
    check_moments_not_taken(self)
    strategy = tf.distribute.get_strategy()
    trained = keras_private.optimizer_variables(self)
    if isinstance(strategy, MultiWorkerMirroredStrategy):
        check_no_overwriting(trained, strategy.num_replicas_in_sync)
    pairs = list(grads_and_vars)
    summing.warn_if_loss_scaling_wrong(means=False)
    if not pairs:
        return original(self, pairs)
    if compressed_all_reduce(strategy) is not None and self.gradient_accumulation_steps:
        raise ValueError(
            "Keras cannot accumulate gradients under a strategy; use gc.CompressedOptimizer, "
            "which can, and set no compressor on the strategy."
        )
    ops = summing.ops_for_gradients(self, pairs, trained)
    if ops is None:
        return summing.with_equal_lookups_summed(pairs, original(self, pairs))
    gradients, variables = zip(*pairs, strict=True)
    totals = ops.reduction(gradients, variables, trained)()
    return list(zip(with_missing(gradients, totals), variables, strict=True))


@patch(
    "keras.optimizers.LossScaleOptimizer.apply",
    why="A worker decides from its own gradients whether to skip a step, and other workers hang.",
    test="test_apply_scaled",
    essential=True,
)
def apply_scaled(
    original: Any, self: Any, grads: Sequence[Any], trainable_variables: Any = None
) -> None:
    """Has all replicas decide alike whether to skip a step.

    A `CompressedOptimizer` inside does it. Around other optimizers, Keras asks the method
    `check_finite` of the scaler, and this scaler gets one of its own.
    """
    original = functools.partial(original, self)
    if isinstance(self.inner_optimizer, CompressedOptimizer):
        self.inner_optimizer.apply_scaled(self, grads, trainable_variables, original)
        return
    if "check_finite" not in vars(self):
        self.check_finite = functools.partial(_check_finite_on_all, self)
    original(grads, trainable_variables)


def _check_finite_on_all(scaler: Any, grads: Sequence[Any]) -> tf.Tensor:
    return steps.finite_on_all(scaler, type(scaler).check_finite(scaler, grads))


@patch(
    "keras.optimizers.LossScaleOptimizer.load_own_variables",
    why="In a file of a job without a loss scaler, our state is in the scaler's place.",
    test="test_load_into_scaler",
)
def load_into_scaler(original: Any, self: Any, store: Any) -> None:
    """Loads a file into a loss scaler, also a file of a job that had none."""
    compressed = self.inner_optimizer
    if isinstance(compressed, CompressedOptimizer) and "has_residual" in store.keys():  # noqa: SIM118
        compressed.load_without_scaler(store)
    else:
        original(self, store)


@patch(
    keras_private.REDUCE_LOSS,
    why="Keras does not divide a loss of one number by the number of replicas.",
    test="test_note_loss",
)
def note_loss(
    original: Any,
    values: Any,
    sample_weight: Any = None,
    reduction: str | None = "sum_over_batch_size",
) -> Any:
    """Notes whether Keras divides a loss by the number of replicas.

    Keras divides a mean over rows. If a loss function returns one number, it does not divide, and
    the sum of the replicas' gradients is too large by this factor. Nothing public sees it.
    """
    loss = original(values, sample_weight, reduction)
    if reduction not in (None, "none", "sum"):
        summing.note_loss_division(divided=tuple(values.shape) != ())
    return loss


@patch(
    "keras.random.SeedGenerator.next",
    why="All replicas draw the same dropout masks, noise and augmentations.",
    test="test_next_seed",
)
def next_seed(original: Any, self: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Returns the seed with which this replica draws."""
    return random_numbers.local_state_seed(original(self, *args, **kwargs), self)


@patch(
    keras_private.MOMENTS,
    why="The mean over an empty batch is NaN, which makes the moving statistics NaN for good.",
    test="test_keep_statistics_of_empty_batches",
)
def keep_statistics_of_empty_batches(
    original: Any, self: Any, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    """Keeps `BatchNormalization`'s moving statistics for an empty batch."""
    mean, variance = original(self, inputs, mask)
    strategy = tf.distribute.get_strategy()
    may_be_empty = (
        isinstance(strategy, MultiWorkerMirroredStrategy) and strategy.num_replicas_in_sync > 1
    )
    if not may_be_empty or inputs.shape[0] or self.synchronized:
        return mean, variance
    is_empty = tf.equal(tf.shape(inputs)[0], 0)
    warn_of_empty_batch(is_empty)
    kept_mean = tf.cast(self.moving_mean, mean.dtype)
    kept_variance = tf.cast(self.moving_variance, mean.dtype)
    return tf.where(is_empty, kept_mean, mean), tf.where(is_empty, kept_variance, variance)


@patch(
    "keras.Variable.__float__",
    why="Callbacks call float() for the learning rate, and variables of strategies refuse it.",
    test="test_float_of_a_variable",
)
def float_of_variable(_original: Any, self: keras.Variable) -> float:
    """Returns a variable's value, also under a strategy."""
    return float(self.numpy())
