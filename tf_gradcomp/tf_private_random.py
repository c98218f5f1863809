"""Private API of TensorFlow: the seeds of random numbers."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import random_seed as _data_random_seed
from tensorflow.python.framework import random_seed as _random_seed
from tensorflow.python.ops import stateful_random_ops as _stateful_random_ops

from tf_gradcomp.replacements import in_place_of


def on_op_seeds(change: Callable[[tuple[int | None, int | None]], Any]) -> None:
    """Has `change(seeds)` return the two seeds of each random op, such as `tf.random.normal`.

    Publicly, a program sets one seed for all ops, and replicas of different workers draw alike.
    Datasets that shuffle keep their seeds, because workers divide rows that they shuffle alike.
    """
    original, original_of_data = _random_seed.get_seed, _data_random_seed.get_seed
    in_data: contextvars.ContextVar[bool] = contextvars.ContextVar("in_data", default=False)

    @in_place_of(original)
    def hooked(op_seed: int | None) -> Any:
        seeds = original(op_seed)
        return seeds if in_data.get() else change(seeds)

    @in_place_of(original_of_data)
    def hooked_of_data(seed: Any) -> Any:
        token = in_data.set(True)
        try:
            return original_of_data(seed)
        finally:
            in_data.reset(token)

    _random_seed.get_seed, _data_random_seed.get_seed = hooked, hooked_of_data


def on_generator_keys(change: Callable[[tf.Tensor, Any], tf.Tensor]) -> None:
    """Has `change(key, algorithm)` return the key with which a `tf.random.Generator` draws.

    A generator that was created outside the scope of a strategy has one key for all replicas. One
    from inside has another key even in a job of one replica.
    """
    class_ = _stateful_random_ops.Generator

    @in_place_of(class_._preprocess_key)
    def hooked(self: Any, key: tf.Tensor) -> tf.Tensor:
        return change(key, self.algorithm)

    class_._preprocess_key = hooked
