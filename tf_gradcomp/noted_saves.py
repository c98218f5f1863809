"""Saves of a job, which `gradcomp run --max-restarts` takes for progress."""

from __future__ import annotations

import os

from tf_gradcomp.environment import SAVED, SAVES


def note_save() -> None:
    """Notes, for the program that has started this worker, that a save is complete."""
    path = os.environ.get(SAVES)
    if path:
        with open(path, "ab") as file:
            file.write(b".")


def may_be_restarted() -> bool:
    """Returns whether the program that has started this worker starts it again if it dies."""
    return bool(os.environ.get(SAVES))


def saved_before() -> bool:
    """Returns whether this is the restart of a job that had saved."""
    return bool(os.environ.get(SAVED))
