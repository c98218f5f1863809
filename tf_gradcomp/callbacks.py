"""Callbacks for `model.fit`."""

from tf_gradcomp.keras.callbacks.autoencoder_training import AutoencoderTraining
from tf_gradcomp.keras.callbacks.backup_and_restore import BackupAndRestore
from tf_gradcomp.keras.callbacks.broadcast_initial_state import BroadcastInitialState
from tf_gradcomp.keras.callbacks.collect_state import CollectState
from tf_gradcomp.keras.callbacks.compression_monitor import CompressionMonitor
from tf_gradcomp.keras.callbacks.delay_check import DelayCheck
from tf_gradcomp.keras.callbacks.layerwise_plan import LayerwisePlan

__all__ = [
    "AutoencoderTraining",
    "BackupAndRestore",
    "BroadcastInitialState",
    "CollectState",
    "CompressionMonitor",
    "DelayCheck",
    "LayerwisePlan",
]
