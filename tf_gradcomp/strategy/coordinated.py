"""Has the processes of a job save as their strategy, or Horovod, allows; and so checkpoints."""

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
from tf_gradcomp.groups.own_values import reading_own
from tf_gradcomp.strategy.strategy import strategy_of_workers

_OWN_OF_RANK = (
    "What is saved holds the residuals of rank 0 alone: gradients that the other ranks have not "
    "sent yet will be missing in a job that is resumed from it. To save the residuals of all, call "
    "optimizer.collect_state() on all ranks just before, or give fit on all ranks "
    "gc.callbacks.CollectState()."
)


@contextlib.contextmanager
def coordinated(savings: Sequence[Saving], path: str) -> Iterator[bool]:
    """Within this context a process saves; it is told whether it writes the file.

    Workers that leave the file to the chief raise OSError if the chief cannot write it.
    """
    strategy = strategy_of_workers()
    if strategy is not None:
        with strategy.saves.coordinate(savings, _comparable(path)) as writes:
            yield writes
        return
    own = [
        saving
        for saving in savings
        if not saving.group.by_strategy and saving.group.is_first and not saving.is_collected
    ]
    if own:
        tell_user(_OWN_OF_RANK)
    with reading_own(*own):
        yield True


def writes_alone(kind: str, path: str) -> bool:
    """Returns whether this process writes to a path: False if the chief writes to the same.

    The workers write one `kind`, such as logs, after another.
    """
    strategy = strategy_of_workers()
    return strategy is None or strategy.saves.writes_alone(kind, _comparable(path))


def _comparable(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


def write_checkpoint(
    checkpoint: tf.train.Checkpoint,
    path: str,
    original: Callable[[], str],
    only_note: Callable[[], str],
) -> Any:
    """Writes a `tf.train.Checkpoint` on the workers that have a path of their own."""
    parts = list(tf.train.TrackableView(checkpoint).descendants())
    root = getattr(checkpoint, "root", None)
    if isinstance(root, weakref.ref):  # as Keras 2 has it; a view does not look into it
        parts += tf.train.TrackableView(root()).descendants()
    savings = [part.saving for part in parts if isinstance(part, GradientExchange) and part.built]
    savings += [saving for saving in owners_of(parts) if saving not in savings]
    with coordinated(savings, path) as writes:
        if writes:
            return original()
    return only_note()
