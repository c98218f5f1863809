"""What callbacks share: the model's exchange, their order in a list, and how often they work."""

from __future__ import annotations

import sys
import warnings

from tf_gradcomp.compressors.settings import is_whole_number
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.keras.common.fit import callbacks_of_fit
from tf_gradcomp.keras.common.wrappers import compressed_optimizer
from tf_gradcomp.keras_version import keras
from tf_gradcomp.strategy.compressed_all_reduce import compressed_all_reduce

EPOCH = "epoch"
READERS = (
    keras.callbacks.TensorBoard,
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.CSVLogger,
)
SAVERS = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)


def find_exchange(model: keras.Model) -> GradientExchange | None:
    """The exchange of a model's gradients, or None if they are not compressed."""
    optimizer = compressed_optimizer(model)
    if optimizer:
        return optimizer.exchange
    compressed = compressed_all_reduce(model.distribute_strategy)
    return compressed.find_exchange(model.trainable_variables) if compressed else None


def warn_if_behind(
    callback: keras.callbacks.Callback, classes: tuple[type, ...], reason: str
) -> None:
    """Warns, from a callback's `set_model`, of callbacks of some classes before it in the list.

    Args:
        callback: The callback that should come first.
        classes: The classes.
        reason: What these callbacks will not do, if they come first.
    """
    callbacks = callbacks_of_fit() or [callback]
    name = type(callback).__name__
    for earlier in callbacks[: callbacks.index(callback)]:
        if isinstance(earlier, classes):
            warnings.warn(
                f"{name} comes after {type(earlier).__name__} in the list of callbacks, which will "
                f"not {reason}; put {name} first.",
                stacklevel=3,
            )


def checked_every(callback: str, every: str | int) -> str | int:
    """Returns `every`, of a callback of this name.

    Raises:
        ValueError: If it is neither `"epoch"` nor a whole number of at least 1.
    """
    if every != EPOCH and not is_whole_number(every, 1, sys.maxsize):
        raise ValueError(
            f'{callback}: every must be "{EPOCH}" or a whole number of at least 1; received '
            f"{every!r}."
        )
    return every
