"""Callbacks for `model.fit`."""

from tf_gradcomp.keras3.callbacks.autoencoder_training import AutoencoderTraining
from tf_gradcomp.keras3.callbacks.backup_and_restore import BackupAndRestore
from tf_gradcomp.keras3.callbacks.broadcast_initial_state import BroadcastInitialState
from tf_gradcomp.keras3.callbacks.collect_state import CollectState
from tf_gradcomp.keras3.callbacks.compression_monitor import CompressionMonitor
from tf_gradcomp.keras3.callbacks.layerwise_plan import LayerwisePlan

__all__ = [
    "AutoencoderTraining",
    "BackupAndRestore",
    "BroadcastInitialState",
    "CollectState",
    "CompressionMonitor",
    "LayerwisePlan",
]
