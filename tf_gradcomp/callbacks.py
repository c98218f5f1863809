"""Callbacks for `model.fit`."""

from tf_gradcomp.keras3.callbacks import BackupAndRestore, CompressionMonitor, LayerwisePlan

__all__ = ["BackupAndRestore", "CompressionMonitor", "LayerwisePlan"]
