"""Coordinates the saves of a job's processes, for checkpoints and SavedModels."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.saving import Saving, owners_of, reading_locally, reads_locally
from tf_gradcomp.groups.messages import log_info
from tf_gradcomp.private import tensorflow as tf_private
from tf_gradcomp.private.patching import patch
from tf_gradcomp.strategy.strategy import strategy_of_workers
from tf_gradcomp.whole_files import move, replacing_path, temporary_folder

_SAVED_RANK = (
    "This save holds only the residuals of rank 0: a job that resumes from it lacks the gradients "
    "that the other ranks have not sent yet. To save the residuals of all ranks, call "
    "optimizer.collect_state() on all ranks just before the save, or pass "
    "gc.callbacks.CollectState() to fit on all ranks."
)


@contextlib.contextmanager
def coordinated(savings: Sequence[Saving], path: str) -> Iterator[bool]:
    """Coordinates a save within this context; yields whether this process writes the file.

    Workers that leave the file to the chief raise OSError if the chief cannot write it.
    """
    strategy = strategy_of_workers()
    if strategy is not None and reads_locally(strategy):  # within another save
        yield True
    elif strategy is not None:
        with strategy.saves.coordinate(savings, _comparable(path)) as writes:
            yield writes
    else:
        uncollected = [
            saving
            for saving in savings
            if not saving.group.by_strategy
            and saving.group.processes.is_first
            and not saving.is_collected
        ]
        if uncollected:
            log_info(_SAVED_RANK)
        with reading_locally(*uncollected):
            yield True


def writes_file(kind: str, path: str) -> bool:
    """Whether this process writes to a path: False if the chief writes to the same path.

    All workers must write files of a `kind`, such as logs, in the same order.
    """
    strategy = strategy_of_workers()
    return strategy is None or strategy.saves.writes_file(kind, _comparable(path))


def _comparable(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


@patch(
    tf_private.WRITE_CHECKPOINT,
    why="Workers that save to one path overwrite each other's files.",
    test="test_write_checkpoint",
    essential=True,
)
def write_checkpoint(original: Any, self: Any, file_prefix: Any, options: Any = None) -> Any:
    """Writes a checkpoint of TensorFlow on the workers that write to their own path."""
    if not isinstance(file_prefix, str) or not tf.executing_eagerly():
        return original(self, file_prefix, options)
    savings = _savings_in(self)
    options = copy.copy(options) or tf.train.CheckpointOptions()
    later = options.experimental_enable_async_checkpoint
    with coordinated(savings, file_prefix) as writes:
        if later or (writes and not _is_ours(savings, file_prefix)):
            return original(self, file_prefix, options) if writes else file_prefix
        if writes:
            _replace_checkpoint(self, file_prefix, options, original)
    tf_private.call_after_write(options, file_prefix)
    return file_prefix


def _replace_checkpoint(
    checkpoint: Any, prefix: str, options: tf.train.CheckpointOptions, write: Callable[..., Any]
) -> None:
    """Writes a checkpoint into a temporary folder, and moves its files; the index comes last."""
    options = copy.copy(options)
    options.experimental_write_callbacks = None
    folder, name = os.path.split(prefix)
    os.makedirs(folder or ".", exist_ok=True)
    with temporary_folder(prefix) as temporary:
        write(checkpoint, os.path.join(temporary, name), options)
        for new in sorted(os.listdir(temporary), key=lambda file: file.endswith(".index")):
            move(os.path.join(temporary, new), os.path.join(folder, new))


@patch(
    tf_private.SAVE_MODEL,
    why="Workers that export to one path overwrite each other's files.",
    test="test_save_model",
)
def save_model(original: Any, obj: Any, export_dir: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes a SavedModel on workers that write to their own path; returns TensorFlow's result.

    `tf.saved_model.save` and Keras' `model.export` call it. An import may reload the public module,
    so this patch is below it.
    """
    path = os.fspath(export_dir)
    savings = _savings_in(obj)
    with coordinated(savings, path) as writes:
        if writes and _is_ours(savings, path):
            os.makedirs(path, exist_ok=True)
            with replacing_path(path) as folder:
                return original(obj, folder, *args, **kwargs)
        return original(obj, path, *args, **kwargs) if writes else None


def _savings_in(root: Any) -> list[Saving]:
    parts = list(tf.train.TrackableView(root).descendants())
    held = getattr(root, "root", None)
    if isinstance(held, weakref.ref):  # Keras 2 has one; a view does not follow it
        parts += tf.train.TrackableView(held()).descendants()
    savings = [part.saving for part in parts if isinstance(part, GradientExchange) and part.built]
    return savings + [saving for saving in owners_of(parts) if saving not in savings]


def _is_ours(savings: Sequence[Saving], path: str) -> bool:
    return "://" not in path and (bool(savings) or strategy_of_workers() is not None)
