"""Coordinates the saves of a job's processes, for checkpoints and SavedModels."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.saving import Saving, owners_of
from tf_gradcomp.groups.notices import tell_user
from tf_gradcomp.groups.own_values import reading_own, reads_own
from tf_gradcomp.strategy.checkpoint_files import Write, replace_checkpoint
from tf_gradcomp.strategy.strategy import strategy_of_workers
from tf_gradcomp.whole_files import replacing_path

_OWN_OF_RANK = (
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
    if strategy is not None and reads_own(strategy):  # within another save
        yield True
    elif strategy is not None:
        with strategy.saves.coordinate(savings, _comparable(path)) as writes:
            yield writes
    else:
        own = [
            saving
            for saving in savings
            if not saving.group.by_strategy
            and saving.group.processes.is_first
            and not saving.is_collected
        ]
        if own:
            tell_user(_OWN_OF_RANK)
        with reading_own(*own):
            yield True


def writes_file(kind: str, path: str) -> bool:
    """Returns whether this process writes to a path: False if the chief writes to the same path.

    All workers must write files of a `kind`, such as logs, in the same order.
    """
    strategy = strategy_of_workers()
    return strategy is None or strategy.saves.writes_file(kind, _comparable(path))


def _comparable(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


def write_checkpoint(
    checkpoint: tf.train.Checkpoint,
    path: str,
    options: tf.train.CheckpointOptions,
    write: Write,
    note: Callable[[bool], None],
) -> None:
    """Writes a `tf.train.Checkpoint` on the workers that write to their own path."""
    savings = _savings_in(checkpoint)
    with coordinated(savings, path) as writes:
        later = options.experimental_enable_async_checkpoint
        if writes and _is_ours(savings, path) and not later:
            replace_checkpoint(path, options, write)
        elif writes:
            write(path, options)
        if writes:
            note(True)
    if not writes:
        note(False)


def save_model(root: Any, path: str, write: Callable[[str], Any]) -> Any:
    """Writes a SavedModel on workers that write to their own path; returns TensorFlow's result."""
    savings = _savings_in(root)
    with coordinated(savings, path) as writes:
        if writes and _is_ours(savings, path):
            with replacing_path(path) as folder:
                return write(folder)
        return write(path) if writes else None


def _savings_in(root: Any) -> list[Saving]:
    parts = list(tf.train.TrackableView(root).descendants())
    held = getattr(root, "root", None)
    if isinstance(held, weakref.ref):  # Keras 2 has one; a view does not follow it
        parts += tf.train.TrackableView(held()).descendants()
    savings = [part.saving for part in parts if isinstance(part, GradientExchange) and part.built]
    return savings + [saving for saving in owners_of(parts) if saving not in savings]


def _is_ours(savings: Sequence[Saving], path: str) -> bool:
    return "://" not in path and (bool(savings) or strategy_of_workers() is not None)
