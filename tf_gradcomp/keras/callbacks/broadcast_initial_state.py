"""Gives all ranks of a Horovod job the initial model of rank 0, in `fit`."""

from __future__ import annotations

import warnings
from typing import Any

from tf_gradcomp.keras.common.initial_state import broadcast_initial_state, ranks_of
from tf_gradcomp.keras.common.strategy import BATCHES
from tf_gradcomp.keras.common.version import keras, keras_private


class BroadcastInitialState(keras.callbacks.Callback):
    """Gives all ranks of a Horovod job the weights and the optimizer of rank 0, before step 1.

    All ranks must have this callback. Residuals and each rank's other own state stay unchanged, so
    all ranks must load a checkpoint that holds such state. Under a strategy, the callback does
    nothing.

    The callback warns of layers that need statistics of all ranks, such as
    `BatchNormalization(synchronized=True)`, because Keras itself does not know Horovod's ranks.

    Raises:
        ValueError: At the start of training, if the model has no variables yet.
        WorkersDisagreeError: At the start of training, if ranks have data for different numbers of
            batches, or other variables.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sends or receives the values."""
        group = ranks_of(self.model)
        if group is not None and group.processes.size > 1:
            group.processes.agree({"next action": "training", BATCHES: self.params.get("steps")})
            self._warn_of_synchronized_layers()
        broadcast_initial_state(self.model)

    def _warn_of_synchronized_layers(self) -> None:
        for layer in keras_private.layers_of(self.model):
            if getattr(layer, "synchronized", False):
                warnings.warn(
                    f"{layer.name!r} should have the statistics of all workers, but under Horovod "
                    "each rank has only its own statistics; rank 0's statistics are saved.",
                    stacklevel=2,
                )
