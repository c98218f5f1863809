"""Under which strategies gradients can be exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp.compressors.base import Compressor
from tf_gradcomp.distribute.group import StrategyGroup


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Refuses strategies whose replicas do not reduce gradients among themselves.

    Raises:
        ValueError: With the reason and the way out.
    """
    refused = (tf.distribute.ParameterServerStrategy, tf.distribute.TPUStrategy)
    if isinstance(strategy, (*refused, tf.distribute.experimental.ParameterServerStrategy)):
        raise ValueError(
            f"Gradient compression does not work under {type(strategy).__name__}, whose replicas "
            "do not exchange gradients with each other over a network; use "
            "gc.MultiWorkerMirroredStrategy, or the optimizer without compression."
        )


def check_warmup(compressors: Sequence[Compressor], group: StrategyGroup) -> None:
    """Refuses a warm-up under strategies that cannot end one.

    Raises:
        ValueError: With the reason and the way out.
    """
    in_turn = any(compressor.warmup or compressor.phases for compressor in compressors)
    if in_turn and group.size > 1 and not group.is_collective:
        raise ValueError(
            "A warm-up, or another method in turn, needs collectives in a branch, which "
            f"{type(group.strategy).__name__} does not allow; use gc.MultiWorkerMirroredStrategy, "
            "or warmup_steps=0."
        )
