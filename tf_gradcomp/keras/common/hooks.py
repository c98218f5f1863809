"""Hooks into Keras that are the same for Keras 3 and Keras 2."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tf_gradcomp.keras.common.version import keras


def after_init(class_: type, then: Callable[[Any, Mapping[str, Any]], None]) -> None:
    """Has `then(object, keyword arguments)` called for each new object of a class."""
    original = class_.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        then(self, kwargs)

    class_.__init__ = hooked  # type: ignore[misc]


def on_outputs_of_steps(trainer: Any, auto: str, reduce: Callable[..., Any]) -> None:
    """Has `reduce(strategy, outputs, original)` called for the outputs of a step.

    Args:
        trainer: The module of Keras with its private `reduce_per_replica`.
        auto: The reduction that Keras uses for "auto".
        reduce: Stands in for the reduction of Keras.
    """
    original = trainer.reduce_per_replica

    @functools.wraps(original)
    def hooked(values: Any, strategy: tf.distribute.Strategy, reduction: str) -> Any:
        as_keras = functools.partial(original, values, strategy, reduction)
        return reduce(strategy, values, as_keras) if reduction in ("auto", auto) else as_keras()

    trainer.reduce_per_replica = hooked


def on_train_function(check: Callable[[Any], None]) -> None:
    """Has `check(model)` called before `fit` makes the function of a step."""
    original = keras.Model.make_train_function

    @functools.wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self)
        return original(self, *args, **kwargs)

    keras.Model.make_train_function = hooked
