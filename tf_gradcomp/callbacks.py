"""Callbacks for `model.fit`."""

from tf_gradcomp.keras3.callbacks import (
    AutoencoderTraining,
    BackupAndRestore,
    CompressionMonitor,
    LayerwisePlan,
)

__all__ = ["AutoencoderTraining", "BackupAndRestore", "CompressionMonitor", "LayerwisePlan"]
