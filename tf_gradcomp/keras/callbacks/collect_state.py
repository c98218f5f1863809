"""Collects the workers' own state, so that one worker can save it alone."""

from __future__ import annotations

from typing import Any

from tf_gradcomp.keras.callbacks.every import EPOCH, checked_every
from tf_gradcomp.keras.callbacks.order import SAVERS, warn_if_behind
from tf_gradcomp.keras.common.version import keras
from tf_gradcomp.keras.common.wrappers import wrappers_of


class CollectState(keras.callbacks.Callback):
    """Collects the residuals of all workers, so that the chief, or rank 0, can save alone.

    All workers must have this callback. On the saving worker, it comes before the callback that
    saves:

    ```python
    callbacks = [gc.callbacks.CollectState()]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint("checkpoints/{epoch}.keras"))
    ```

    The collected state is valid until the next step; see `gc.CompressedOptimizer.collect_state`.
    Under a strategy, `fit` itself collects at the end of each epoch.

    Args:
        every: `"epoch"`, or a number of batches: the `save_freq` of `ModelCheckpoint`.

    Raises:
        ValueError: If `every` is neither `"epoch"` nor a whole number of at least 1.
    """

    def __init__(self, every: str | int = EPOCH) -> None:
        super().__init__()
        self._every = checked_every("CollectState", every)
        self._batches = 0
        self._last: int | None = None

    def set_model(self, model: keras.Model) -> None:
        """Called by Keras; warns if a callback before this one will miss the collected state."""
        super().set_model(model)
        warn_if_behind(self, SAVERS, "have the collected state")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Collects after `every` batches, counted like Keras' `ModelCheckpoint`."""
        if not isinstance(self._every, int):
            return
        last = self._last
        self._batches += batch + 1 if last is None or batch <= last else batch - last
        self._last = batch
        if self._batches >= self._every:
            self._batches = 0
            self._collect()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Collects after an epoch."""
        if self._every == EPOCH:
            self._collect()

    def _collect(self) -> None:
        for one in wrappers_of(self.model):
            if one.exchange.built:
                one.collect_state()
