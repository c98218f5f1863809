"""Trains by a program of `programs/` with backups, and logs when each part of its start has ended.

    gradcomp run -n 2 --max-restarts 3 benchmarks/marked.py FOLDER FREQUENCY digits_cnn --epochs 100

FOLDER is for the backup and for `log.jsonl`, to which the workers append lines. FREQUENCY is
`epoch` or a number of steps: the `save_freq` of `gc.callbacks.BackupAndRestore`. The program and
its arguments follow. Times are of the system's monotonic clock, which all processes share.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conserved import note

PROGRAMS = Path(__file__).with_name("programs")
# What the lines call the ends of the parts of a start.
STARTED, IMPORTED, BUILT, RESTORED = "started", "imported", "built", "restored"


class Worker:
    """Writes a worker's lines of the log.

    Args:
        folder: The folder of the log and of the backup.
        index: The worker's index.

    Attributes:
        backup: The folder of the backup.
    """

    def __init__(self, folder: Path, index: int) -> None:
        self.backup = folder / "backup"
        self._folder = folder
        self._index = index

    def note(self, **facts: Any) -> None:
        """Appends a line, with the present time."""
        note(self._folder, worker=self._index, at=time.monotonic(), **facts)

    @contextlib.contextmanager
    def noting_saves(self, model: Any) -> Iterator[None]:
        """Logs a save that is made within this context, with its seconds."""
        began, before = time.monotonic(), self._written()
        yield
        if self._written() != before:
            steps = int(model.optimizer.iterations.numpy())
            self.note(saved=steps, seconds=time.monotonic() - began)

    def _written(self) -> int:
        """Returns when the backup was written, in nanoseconds; 0 without one."""
        try:
            return (self.backup / "latest.weights.h5").stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def main() -> None:
    folder, frequency, program, *arguments = sys.argv[1:]
    worker = Worker(Path(folder), json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    worker.note(mark=STARTED, pid=os.getpid())
    sys.path.insert(0, str(PROGRAMS))
    common = importlib.import_module("common")  # imports TensorFlow, Keras and tf_gradcomp
    worker.note(mark=IMPORTED)
    common.fit = _fit_with_backups(common, worker, frequency)
    importlib.import_module(program).main(arguments)


def _fit_with_backups(common: Any, worker: Worker, frequency: str) -> Any:
    """Returns the programs' `fit` with backups, and with callbacks that log times."""
    import keras

    import tf_gradcomp as gc

    class Mark(keras.callbacks.Callback):
        """Logs that the callbacks before this one have done their part of the start."""

        def __init__(self, mark: str) -> None:
            super().__init__()
            self._mark = mark

        def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
            worker.note(mark=self._mark)

    class Steps(keras.callbacks.Callback):
        """Logs the number of steps in the model after each step."""

        def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
            worker.note(step=int(self.model.optimizer.iterations.numpy()))

    class Backup(gc.callbacks.BackupAndRestore):
        """Logs each save."""

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            with worker.noting_saves(self.model):
                super().on_epoch_end(epoch, logs)

        def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
            with worker.noting_saves(self.model):
                super().on_train_batch_end(batch, logs)

    def fit(
        job: Any, model: Any, batches: Any, callbacks: Any = None, **settings: Any
    ) -> keras.callbacks.History:
        save_freq = int(frequency) if frequency.isdecimal() else frequency
        backup = Backup(worker.backup, save_freq=save_freq)
        callbacks = common.make_callbacks(job) if callbacks is None else callbacks
        marked = [*callbacks, Mark(BUILT), Steps(), backup, Mark(RESTORED)]
        return plain_fit(job, model, batches, marked, **settings)

    plain_fit = common.fit
    return fit


if __name__ == "__main__":
    main()
