"""Keras' `SwapEMAWeights`, with the averages that wrapped optimizers keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tf_gradcomp.keras.common.compressed import compressed_in


def _averaging(optimizer: Any) -> Iterator[Any]:
    """The optimizers, however deep inside, that keep averages of weights."""
    inside = getattr(optimizer, "inner_optimizer", None)
    within = [inside] if inside is not None else getattr(optimizer, "optimizers", None)
    if within is not None:
        for one in within:
            yield from _averaging(one)
    elif optimizer.use_ema:
        yield optimizer


def swap_averages(
    optimizer: Any, swap: Callable[[Any], None], original: Callable[[], None]
) -> None:
    """Stands in for Keras' look for averages, which finds none in a wrapper in something else."""
    averaging = list(_averaging(optimizer))
    if not averaging or not any(compressed_in(optimizer)):
        original()
        return
    for one in averaging:
        swap(one)
