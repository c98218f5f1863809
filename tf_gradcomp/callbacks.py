"""Callbacks for `model.fit`."""

from tf_gradcomp.keras3.callbacks import (
    BackupAndRestore,
    BroadcastInitialState,
    CollectState,
    CompressionMonitor,
    LayerwisePlan,
)

__all__ = [
    "BackupAndRestore",
    "BroadcastInitialState",
    "CollectState",
    "CompressionMonitor",
    "LayerwisePlan",
]
