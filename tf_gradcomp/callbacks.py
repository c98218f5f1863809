"""Callbacks for `model.fit`."""

from tf_gradcomp.keras3.callbacks import (
    AutoencoderTraining,
    BackupAndRestore,
    BroadcastInitialState,
    CollectState,
    CompressionMonitor,
    LayerwisePlan,
)

__all__ = [
    "AutoencoderTraining",
    "BackupAndRestore",
    "BroadcastInitialState",
    "CollectState",
    "CompressionMonitor",
    "LayerwisePlan",
]
