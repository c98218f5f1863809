"""Adafactor, which makes NaN of the zeros that sparse methods leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_gradcomp.compressors.base import Compressor
from tf_gradcomp.compressors.contrib.count_sketch import CountSketch
from tf_gradcomp.compressors.contrib.max_norm import MaxNormQuantization
from tf_gradcomp.compressors.contrib.sidco import SIDCo
from tf_gradcomp.compressors.stages import leaf_stages
from tf_gradcomp.keras.common.version import keras
from tf_gradcomp.policy import GradientSpec

_LEAST_EPSILON_1 = 1e-15


def loses_zeros(optimizer: Any) -> bool:
    """Returns whether an optimizer turns zeros into NaN.

    A sparse method leaves whole rows of zeros. If a row and a column are zero, Keras' Adafactor
    estimates the squared gradient as about the square of its `epsilon_1`. With the default of
    1e-30, that square underflows to zero in float32.
    """
    adafactor = getattr(keras.optimizers, "Adafactor", ())
    return isinstance(optimizer, adafactor) and optimizer.epsilon_1 < _LEAST_EPSILON_1


def check_keeps_zeros(
    optimizer: Any, compressor: Compressor, specs: Sequence[GradientSpec], replicas: int
) -> None:
    """Refuses a sparse method with an optimizer whose `loses_zeros` is true.

    Adafactor keeps no rows and columns for vectors.
    """
    matrices = [spec for spec in specs if len(spec.shape) > 1]
    if replicas == 1 or not matrices or not loses_zeros(optimizer):
        return
    for stage in leaf_stages(compressor):
        method = getattr(stage, "method", stage)
        if not _leaves_zeros(method, matrices):
            continue
        raise ValueError(
            f"{type(optimizer).__name__} makes NaN of gradients that are zero in a whole row and "
            f"column, and {method.name!r} leaves such zeros until it sends the entries. Use "
            f"epsilon_1={_LEAST_EPSILON_1} or more, 'cast' or 'qsgd', or another optimizer."
        )


def _leaves_zeros(method: Compressor, specs: Sequence[GradientSpec]) -> bool:
    if isinstance(method, MaxNormQuantization) and any(method.settings(specs)):
        return True  # it rounds many entries to zero
    if isinstance(method, (CountSketch, SIDCo)):
        return True
    if method.whole_setting is None:
        return False
    return any(setting != method.whole_setting for setting in method.settings(specs) or ())
