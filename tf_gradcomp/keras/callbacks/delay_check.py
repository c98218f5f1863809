"""Warns during training if compression delays gradients for too long."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.chief import is_chief
from tf_gradcomp.compressors.per_variable import is_whole_number
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.keras.callbacks.compression_monitor import find_exchange
from tf_gradcomp.keras.callbacks.order import READERS, warn_if_behind
from tf_gradcomp.keras.common.version import keras

_LOG = tf.get_logger()
_LIMIT = 0.45  # between the figures of AdaComp and of ScaleCom by benchmarks/delays.py
_WARNING = (
    "DelayCheck: much of the residual has been delayed for %d steps (cosine %.2f, limit %.2f). "
    "Compression by %s probably holds training back. Send more (a higher density, a lower rate), "
    "begin with a warm-up, or use 'adacomp'. `gradcomp simulate` compares methods with dense "
    "training."
)


class Waiting:
    """Compares residuals with the residuals of the previous call."""

    def __init__(self) -> None:
        self._before: list[np.ndarray] = []

    def cosine(self, residuals: Sequence[Any]) -> float:
        """Returns the cosine between both; NaN in the first call, or if either is zero.

        Args:
            residuals: One array for each gradient; they are copied.
        """
        now = [np.array(residual, np.float32).ravel() for residual in residuals]
        before, self._before = self._before, now
        lengths = math.sqrt(_product(before, before) * _product(now, now))
        return _product(before, now) / lengths if lengths else math.nan


def _product(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    pairs = zip(one, other, strict=True) if one else ()
    return sum(float(a.astype(np.float64) @ b.astype(np.float64)) for a, b in pairs)


class DelayCheck(keras.callbacks.Callback):
    """Warns if most of the gradients in the residuals have been delayed for many steps.

    Sparse methods leave small entries in residuals. The delay does no harm if the entries are sent
    soon. Every `every` exchanges, this callback compares this worker's residuals with its residuals
    at the previous check. The logs get the cosine between both as `residual_cosine`: near 0 if
    other gradients are delayed now, and 1 if the same gradients are still delayed. If the cosine is
    above `limit` in two checks in a row, the chief logs one warning.

    The check needs no communication: each worker logs the cosine of its own residuals. Do not let
    callbacks such as `EarlyStopping` act on this value. The callback keeps one copy of the
    residuals in host memory. docs/which_compressor.md describes which delays the check detects, by
    our measurements, and which it misses.

    Args:
        every: Exchanges between two checks.
        limit: The cosine above which the callback warns.

    Raises:
        ValueError: If `every` is not a whole number of at least 1, or `limit` is not positive.
    """

    def __init__(self, every: int = 100, limit: float = _LIMIT) -> None:
        super().__init__()
        if not is_whole_number(every, 1, sys.maxsize):
            raise ValueError(
                f"DelayCheck: every must be a whole number of at least 1; received {every!r}."
            )
        if not limit > 0:
            raise ValueError(f"DelayCheck: limit must be positive; received {limit!r}.")
        self._every, self._limit = every, limit
        self._warned = False

    def set_model(self, model: keras.Model) -> None:
        """Called by Keras; warns if a callback before this one will not see its logs."""
        super().set_model(model)
        warn_if_behind(self, READERS, "see its logs")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resets the callback."""
        self._waiting = Waiting()
        self._exchange: GradientExchange | None = None
        self._batches, self._above = 0, 0
        self._checked_at: int | None = None
        self._cosine = math.nan

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts batches from 0."""
        self._latest = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks if it is time, and adds the latest cosine to the batch's logs."""
        self._batches += batch - self._latest  # more than one with steps_per_execution
        self._latest = batch
        if self._batches >= self._every or self._checked_at is None:
            self._check_if_due()
        self._add_to(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the latest cosine to the epoch's logs."""
        self._add_to(logs)

    def _add_to(self, logs: dict[str, Any] | None) -> None:
        if logs is not None and not math.isnan(self._cosine):
            logs["residual_cosine"] = self._cosine

    def _check_if_due(self) -> None:
        exchange = self._exchange = self._exchange or find_exchange(self.model)
        if exchange is None or not exchange.built or not exchange.residuals:
            return
        exchanges = exchange.exchanges
        if self._checked_at is not None and exchanges - self._checked_at < self._every:
            return
        self._checked_at, self._batches = exchanges, 0
        local = [exchange.group.local(residual, 0) for residual in exchange.residuals]
        self._cosine = self._waiting.cosine(local)
        self._above = self._above + 1 if self._cosine > self._limit else 0
        if self._above > 1 and not self._warned and is_chief(self.model.distribute_strategy):
            self._warned = True
            _LOG.warning(_WARNING, self._every, self._cosine, self._limit, exchange.compressor)
