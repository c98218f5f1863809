"""Order of callbacks: which must come before others in the list for `fit`."""

from __future__ import annotations

import warnings

from tf_gradcomp.keras.common.fit import callbacks_of_fit
from tf_gradcomp.keras.common.version import keras

READERS = (
    keras.callbacks.TensorBoard,
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.CSVLogger,
)
SAVERS = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)


def warn_if_behind(
    callback: keras.callbacks.Callback, others: tuple[type, ...], reason: str
) -> None:
    """Warns, from a callback's `set_model`, of callbacks of some classes before it in the list.

    Args:
        callback: The callback that should come first.
        others: The classes.
        reason: What these callbacks will not do, if they come first.
    """
    callbacks = callbacks_of_fit() or [callback]
    name = type(callback).__name__
    for other in callbacks[: callbacks.index(callback)]:
        if isinstance(other, others):
            warnings.warn(
                f"{name} comes after {type(other).__name__} in the list of callbacks, which will "
                f"not {reason}; put {name} first.",
                stacklevel=3,
            )


def progress_bars() -> list[keras.callbacks.Callback]:
    """Called by a callback in `set_model`: the progress bars of this `fit`, if known."""
    return [one for one in callbacks_of_fit() if isinstance(one, keras.callbacks.ProgbarLogger)]
