"""Gives all ranks of a Horovod job the model that rank 0 begins with, in `fit`."""

from __future__ import annotations

from typing import Any

from tf_gradcomp.keras_any.initial_state import broadcast_initial_state
from tf_gradcomp.keras_here import keras


class BroadcastInitialState(keras.callbacks.Callback):
    """Gives all ranks of a Horovod job the weights and the optimizer of rank 0, before step 1.

    All ranks must have it. Residuals, and what else each rank has for itself, stay as they are: a
    checkpoint that holds any has to be loaded on all ranks. Under a strategy it does nothing.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sends and takes the values."""
        broadcast_initial_state(self.model)
