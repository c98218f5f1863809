"""Callbacks for `model.fit`."""

from tf_gradcomp.keras.callbacks.autoencoder_training import AutoencoderTraining
from tf_gradcomp.keras.callbacks.compression_monitor import CompressionMonitor, DelayCheck
from tf_gradcomp.keras.callbacks.layerwise_plan import LayerwisePlan
from tf_gradcomp.keras.callbacks.worker_state import (
    BackupAndRestore,
    BroadcastInitialState,
    CollectState,
)

__all__ = [
    "AutoencoderTraining",
    "BackupAndRestore",
    "BroadcastInitialState",
    "CollectState",
    "CompressionMonitor",
    "DelayCheck",
    "LayerwisePlan",
]
