"""Writes the files of a model once for all workers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from tf_gradcomp.exchange.saving import Saving
from tf_gradcomp.groups.notices import tell_user
from tf_gradcomp.keras.common import equality
from tf_gradcomp.keras.common.version import keras
from tf_gradcomp.keras.common.wrappers import wrappers_of
from tf_gradcomp.strategy.coordinated import coordinated, writes_file
from tf_gradcomp.strategy.strategy import CheckedStrategy, strategy_of_workers

_WITHOUT_OPTIMIZER = (
    "%s holds the model without its optimizer: Keras' old HDF5 format cannot hold the state of a "
    "CompressedOptimizer. To continue training from a file, save to a path that ends in .keras."
)


def savings_of(model: keras.Model) -> list[Saving]:
    """Returns the objects that save the state of a model's wrapped optimizers.

    Before they read the state, they give this model equal variables on all workers.
    """
    wrappers = list(wrappers_of(model))
    for wrapper in wrappers:
        if wrapper.rounds is not None:
            wrapper.rounds.add_model(model)
    return [one.exchange.saving for one in wrappers if one.exchange.built]


def save(
    model: keras.Model, path: str, write: Callable[[], Any], original: Callable[[], Any]
) -> None:
    """Replaces Keras' function that writes a model's file.

    Args:
        model: The model.
        path: The path of the file.
        write: Writes the file like Keras, completely or not at all.
        original: Keras' function.
    """
    if strategy_of_workers() is None and not any(wrappers_of(model)):
        original()
        return
    with coordinated(savings_of(model), path) as writes:
        if writes:
            write()


def leaves_out_optimizer(model: keras.Model, path: str) -> bool:
    """Returns whether a file in Keras' old HDF5 format cannot hold the optimizer; logs it."""
    wrapped = any(wrappers_of(model))
    if wrapped:
        tell_user(_WITHOUT_OPTIMIZER % path)
    return wrapped


def collect_at_epoch_end(model: keras.Model) -> None:
    """Ends rounds of local steps, compares the workers' models, and collects state."""
    synchronize(model)
    equality.compare_model(model, equality.EPOCH_END)
    collect(model)


def collect(model: keras.Model) -> None:
    """Collects the workers' own state, so that the chief's callbacks can save alone."""
    if isinstance(model.distribute_strategy, CheckedStrategy):
        for saving in savings_of(model):
            saving.collect()


def synchronize(model: keras.Model) -> None:
    """Ends the rounds of local steps of a model's optimizers, before the model is read."""
    if isinstance(model.distribute_strategy, CheckedStrategy):
        for wrapper in wrappers_of(model):
            wrapper.synchronize(model)


def release(model: keras.Model) -> None:
    """Frees the memory of collected state, because steps are about to change the state."""
    if isinstance(model.distribute_strategy, CheckedStrategy):
        for saving in savings_of(model):
            saving.forget()


def log_path(callback: keras.callbacks.Callback, path: str, nowhere: str | None = None) -> str:
    """Returns where a callback of this worker writes logs: elsewhere, if the chief writes there.

    Args:
        callback: The callback.
        path: The program's path for the logs.
        nowhere: The result if the chief writes to the path; by default a temporary folder.
    """
    if writes_file(type(callback).__name__, path):
        return path
    return tempfile.mkdtemp(prefix="gradcomp-") if nowhere is None else nowhere
