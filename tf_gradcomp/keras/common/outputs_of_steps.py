"""What a step of `fit` returns, which either Keras reduces over the replicas by one function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def on_outputs_of_steps(trainer: Any, auto: str, reduce: Callable[..., Any]) -> None:
    """Has `reduce(strategy, outputs, original)` called for the outputs of a step.

    Args:
        trainer: The module of Keras with its private `reduce_per_replica`.
        auto: The reduction that it takes "auto" for.
        reduce: Stands in for it.
    """
    original = trainer.reduce_per_replica

    @functools.wraps(original)
    def hooked(values: Any, strategy: tf.distribute.Strategy, reduction: str) -> Any:
        as_keras = functools.partial(original, values, strategy, reduction)
        return reduce(strategy, values, as_keras) if reduction in ("auto", auto) else as_keras()

    trainer.reduce_per_replica = hooked
