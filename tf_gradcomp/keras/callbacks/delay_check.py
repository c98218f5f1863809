"""Warns during training if compression delays gradients for too long."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_gradcomp.compressors.settings import is_whole_number
from tf_gradcomp.groups.notices import tell_user
from tf_gradcomp.keras.callbacks.compression_monitor import find_exchange
from tf_gradcomp.keras.callbacks.order import READERS, warn_if_behind
from tf_gradcomp.keras.common.version import keras

_LIMIT = 0.45  # between the figures of AdaComp and of ScaleCom by benchmarks/delays.py
_WARNING = (
    "DelayCheck: much of the residual has been delayed for %d steps (cosine %.2f, limit %.2f). "
    "Compression by %s probably holds training back. Send more (a higher density, a lower rate), "
    "begin with a warm-up, or use 'adacomp'. `gradcomp simulate` compares methods with dense "
    "training."
)


class DelayCheck(keras.callbacks.Callback):
    """Warns if residuals stay alike over many steps, because then the same gradients are delayed.

    Every `every` exchanges, each worker logs `residual_cosine`, the cosine between its residuals
    and those of the check before. If it is above 0.45 in two checks in a row, the chief warns once.

    docs/which_compressor.md says which delays the check sees, and which it misses. The callback
    keeps one copy of the residuals in host memory.

    Args:
        every: Exchanges between two checks.

    Raises:
        ValueError: If `every` is not a whole number of at least 1.
    """

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        if not is_whole_number(every, 1, sys.maxsize):
            raise ValueError(
                f"DelayCheck: every must be a whole number of at least 1; received {every!r}."
            )
        self._every = every

    def set_model(self, model: keras.Model) -> None:
        """Called by Keras; warns if a callback before this one will not see its logs."""
        super().set_model(model)
        warn_if_behind(self, READERS, "see its logs")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resets the callback."""
        self._residuals: list[np.ndarray] = []
        self._checked_at, self._above = -self._every, 0
        self._cosine = math.nan

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks if it is time, and adds the latest cosine to the batch's logs."""
        exchange = find_exchange(self.model)
        if exchange is None or not exchange.built or not exchange.residuals:
            return
        if exchange.exchanges - self._checked_at >= self._every:
            self._check(exchange)
        self.on_epoch_end(0, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the latest cosine to the epoch's logs."""
        if logs is not None and not math.isnan(self._cosine):
            logs["residual_cosine"] = self._cosine

    def _check(self, exchange: Any) -> None:
        self._checked_at = exchange.exchanges
        before, local = self._residuals, exchange.group.local
        self._residuals = [np.array(local(one, 0).read_value()) for one in exchange.residuals]
        self._cosine = cosine(before, self._residuals)
        self._above = self._above + 1 if self._cosine > _LIMIT else 0
        if self._above == 2:
            tell_user(_WARNING % (self._every, self._cosine, _LIMIT, exchange.compressor))


def cosine(before: Sequence[np.ndarray], now: Sequence[np.ndarray]) -> float:
    """Returns the cosine between two lists of arrays; NaN if one is empty or zero."""
    lengths = math.sqrt(_product(before, before) * _product(now, now))
    return _product(before, now) / lengths if lengths else math.nan


def _product(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    pairs = zip(one, other, strict=True) if one else ()
    return sum(float(np.float64(a).ravel() @ np.float64(b).ravel()) for a, b in pairs)
