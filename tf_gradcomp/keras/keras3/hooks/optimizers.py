"""Hooks into the optimizers and losses of Keras 3."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as _loss
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tf_gradcomp.keras.common.hooks import replace, replace_method


def on_loss_scaled_apply(apply: Callable[..., None]) -> None:
    """Has `apply(scaler, grads, variables, original)` called when a loss scaler applies."""

    def hooked(
        original: Any, self: Any, grads: Sequence[Any], trainable_variables: Any = None
    ) -> None:
        apply(self, grads, trainable_variables, functools.partial(original, self))

    replace(keras.optimizers.LossScaleOptimizer, "apply", hooked)


def on_scaler_load(load: Callable[[Any, Any, Callable[..., None]], None]) -> None:
    """Has `load(scaler, store, original)` called when a file is loaded into a loss scaler."""
    replace(
        keras.optimizers.LossScaleOptimizer,
        "load_own_variables",
        lambda original, self, store: load(self, store, functools.partial(original, self)),
    )


def on_check_finite(agree: Callable[[Any, tf.Tensor], tf.Tensor]) -> None:
    """Has `agree(scaler, finite)` called with a loss scaler's check of its own gradients."""

    def hooked(original: Any, self: Any, grads: Sequence[Any]) -> tf.Tensor:
        return agree(self, original(self, grads))

    replace(keras.optimizers.LossScaleOptimizer, "check_finite", hooked)


def on_multi_optimizer(check: Callable[[keras.optimizers.Optimizer], None]) -> None:
    """Has `check(optimizer)` called on each optimizer that a `MultiOptimizer` is built for."""

    def hooked(original: Any, self: Any, var_list: Sequence[keras.Variable]) -> None:
        for optimizer in self.optimizers:
            check(optimizer)
        original(self, var_list)

    class_ = getattr(keras.optimizers, "MultiOptimizer", None)  # absent in some releases
    if class_ is not None:
        replace(class_, "build", hooked)


def on_reduce_gradients(reduce: Callable[..., Any]) -> None:
    """Has `reduce(optimizer, grads_and_vars, original=...)` called when Keras reduces gradients."""
    replace_method(TFOptimizer, "_all_reduce_sum_gradients", reduce)


def on_iterations(batches_of_update: Callable[[Any], int | None]) -> None:
    """Has `iterations` count updates if `batches_of_update(optimizer)` is a number."""
    original: Any = BaseOptimizer.iterations

    @functools.wraps(original.fget)
    def iterations(self: Any) -> Any:
        batches = batches_of_update(self)
        return self._iterations // batches if batches else original.fget(self)

    BaseOptimizer.iterations = property(iterations)


def on_averages_swapped(swap: Callable[..., None]) -> None:
    """Has `swap(optimizer, swap_one, original)` called by `SwapEMAWeights`."""

    def hooked(original: Any, self: Any, tf_fn: Callable[[Any], None], backend_fn: Any) -> None:
        swap(self.model.optimizer, tf_fn, functools.partial(original, self, tf_fn, backend_fn))

    replace(keras.callbacks.SwapEMAWeights, "_apply_to_ema_optimizers", hooked)


def on_loss_of_one_number(
    tell: Callable[[tf.Tensor], None], otherwise: Callable[[tf.Tensor], None]
) -> None:
    """Has `tell(loss)` called where a loss function returns one number, not one for each row.

    Keras divides a mean over rows by the number of replicas, but does not divide such a number. The
    sum of the replicas' gradients is then too large by this factor. Nothing public sees it. Where
    Keras divides, `otherwise(loss)` is called.
    """

    def hooked(
        original: Any,
        values: Any,
        sample_weight: Any = None,
        reduction: str | None = "sum_over_batch_size",
    ) -> Any:
        loss = original(values, sample_weight, reduction)
        if reduction not in (None, "none", "sum"):
            (tell if tuple(values.shape) == () else otherwise)(loss)
        return loss

    replace(_loss, "reduce_values", hooked)
