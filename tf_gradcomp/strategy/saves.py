"""Coordinates workers that save at the same time, or lets the chief save alone."""

from __future__ import annotations

import collections
import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from tf_gradcomp.exchange.saving import Saving, reading_locally
from tf_gradcomp.groups.messages import log_info
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.private import tensorflow as tf_private

_FIRST_WAIT = 20.0  # seconds to wait for the other workers to save, too
_LATER_WAIT = 5.0  # after a wait has failed
_BY_PATH_WAIT = 1.0
_POLL = 10.0

_SAVED_ALL = "This save holds the residuals of all %d workers."
_SAVED_CHIEF = (
    "This save holds only the residuals of the chief, because the other workers did not save with "
    "it: a job that resumes from it lacks the gradients that the other workers have not sent yet. "
    "To save the residuals of all workers, save on all workers, or call optimizer.collect_state() "
    "on all workers just before the save; in fit, gc.callbacks.CollectState(every=...) does so."
)


class Saves:
    """Coordinates the workers of a strategy when they save.

    A worker cannot know whether the other workers save, too. Some programs save on all workers;
    other programs save on the chief alone, while the other workers begin the next step. A
    collective therefore begins only after all workers have reached the same barrier of the
    coordination service. If the wait for other workers fails, a worker saves its own state.

    All workers may give the same path. The chief then writes the file, and the other workers wait
    until it is complete.

    Args:
        group: All replicas of the strategy.
    """

    def __init__(self, group: StrategyGroup) -> None:
        self._group = group
        self._wait = _FIRST_WAIT
        self._orders: collections.Counter[str] = collections.Counter()
        self._written = 0

    @contextlib.contextmanager
    def coordinate(self, savings: Sequence[Saving], path: str) -> Iterator[bool]:
        """Coordinates a save within this context; yields whether this worker writes the file.

        Equal paths are equal strings. Workers that leave the file to the chief raise OSError if the
        chief cannot write it.
        """
        if self._group.processes.size == 1:
            yield True
            return
        keys = self._keys(savings, path)
        chief = self._group.processes.is_first
        save_id = self._announce(keys, path) if chief else None
        collected = all(saving.is_collected for saving in savings)
        joined = self._collect(savings, keys[0])
        if joined and not collected:
            keys = keys[:1]  # all workers are at this save
        if save_id is None:
            save_id = self._written_by_chief(keys, path, self._wait if joined else _BY_PATH_WAIT)
        with contextlib.ExitStack() as stack:
            stack.enter_context(reading_locally(self._group.strategy, *savings))
            for saving in savings:
                stack.enter_context(saving.hooks.rolled_back())
            if not chief:
                yield save_id is None
            else:
                with _announcing_end(f"gradcomp/saved/{save_id}"):
                    yield True
        if save_id is not None and not chief:
            _wait_for(f"gradcomp/saved/{save_id}", path)

    def writes_file(self, kind: str, path: str) -> bool:
        """Whether this worker writes a file, to its own path or for all workers."""
        if self._group.processes.size == 1:
            return True
        self._orders[kind] += 1
        keys = [f"gradcomp/{kind}/{self._orders[kind]}"]
        if self._group.processes.is_first:
            self._announce(keys, path)
            return True
        return self._written_by_chief(keys, path, self._wait) is None

    def _keys(self, savings: Sequence[Saving], path: str) -> list[str]:
        """Returns two keys of a save: its number among the saves at these steps, and its path."""
        start = f"gradcomp/save/{json.dumps([saving.state_id() for saving in savings])}"
        keys = [start, f"{start}/{path}"]
        self._orders.update(keys)
        return [f"{key}/{self._orders[key]}" for key in keys]

    def _announce(self, keys: Sequence[str], path: str) -> int:
        self._written += 1
        for key in keys:
            tf_private.announce(key, json.dumps([path, self._written]))
        return self._written

    def _collect(self, savings: Sequence[Saving], key: str) -> bool:
        """Collects the sums if all workers save; returns whether they do."""
        if all(saving.is_collected for saving in savings):
            if any(saving.keeps_sums for saving in savings):
                log_info(_SAVED_ALL % self._group.processes.size)
            return True
        if not tf_private.reach_barrier(key, self._wait):
            log_info(_SAVED_CHIEF)
            self._wait = _LATER_WAIT
            return False
        for saving in savings:
            saving.collect()
        return True

    def _written_by_chief(self, keys: Sequence[str], path: str, seconds: float) -> int | None:
        """Returns the number of the chief's save to the same path; None if there is none."""
        for key in keys:
            try:
                announced: Any = json.loads(tf_private.announced(key, seconds) or "null")
            except ConnectionError:  # the chief has saved and ended, or never will
                return None
            if announced and announced[0] == path:
                return announced[1]
            seconds = _BY_PATH_WAIT
        return None


@contextlib.contextmanager
def _announcing_end(key: str) -> Iterator[None]:
    problem = "it was interrupted"
    try:
        yield
        problem = ""
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        tf_private.announce(key, problem)


def _wait_for(key: str, path: str) -> None:
    problem = None
    while problem is None:
        problem = tf_private.announced(key, _POLL)
    if problem:
        raise OSError(f"The chief could not save {path!r} for all workers: {problem}")
