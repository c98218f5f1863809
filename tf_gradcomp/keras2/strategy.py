"""The hook by which `gc.MultiWorkerMirroredStrategy` compresses what Keras 2's optimizers sum."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tf_gradcomp.distribute import tf_private
from tf_gradcomp.distribute.cross_device_ops import CompressedAllReduce, reduce_gradients
from tf_gradcomp.distribute.strategy import CheckedStrategy
from tf_gradcomp.keras2 import keras_private
from tf_gradcomp.wrapper.strategy import MultiWorkerMirroredStrategy

__all__ = ["MultiWorkerMirroredStrategy"]


def _reduce_in_optimizer(optimizer: Any, grads_and_vars: Any, original: Any) -> Any:
    """Stands in for the reduction of Keras' optimizers: our strategy checks, and may compress."""
    strategy = tf.distribute.get_strategy()
    ops = tf_private.cross_device_ops(strategy)
    pairs = list(grads_and_vars)
    if not pairs or keras_private.reduces_by_itself(optimizer):
        return original(pairs)
    gradients, variables = zip(*pairs, strict=True)
    if not isinstance(ops, CompressedAllReduce):
        if isinstance(strategy, CheckedStrategy):
            strategy.check_gradients(gradients, variables)
        return original(pairs)
    # A loss scaler looks at the sums to know that a step must be skipped.
    if_skipped = math.nan if keras_private.looks_for_nans(optimizer) else 0.0
    reduced = reduce_gradients(ops, gradients, variables, if_skipped)
    return list(zip(reduced, variables, strict=True))


keras_private.on_reduce_gradients(_reduce_in_optimizer)
