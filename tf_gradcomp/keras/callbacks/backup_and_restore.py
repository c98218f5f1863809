"""Keras' `BackupAndRestore` for jobs of several workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_gradcomp.chief import path_of, worker_of_rank, worker_path
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras.common.version import IS_KERAS_2, keras, keras_private
from tf_gradcomp.keras.common.wrappers import wrappers_of


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Backs up and restores the state of all workers, even for another number of workers.

    All workers must have this callback. The chief writes, after it has collected the workers' own
    state; the last backup stays until the new backup is complete. All workers restore the chief's
    backup. A job can therefore resume with more or fewer workers, as long as each worker sees the
    folder, on a shared disk or as a copy.

    Args:
        backup_dir: The folder, the same for all workers.
        strategy: As for `gc.is_chief`; by default the model's.
        **kwargs: As for Keras' `BackupAndRestore`.

    Raises:
        WorkersDisagreeError: At the start of training, if workers found different backups, because
            they would then wait for each other.
    """

    on_all_workers = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        strategy: tf.distribute.Strategy | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(os.fspath(backup_dir), **kwargs)
        self._strategy = strategy
        self._arguments = kwargs
        self._folder = os.fspath(backup_dir)

    def set_model(self, model: keras.Model) -> None:
        """Prepares the backup; the job and the worker number are known only now."""
        own = self._of_first(model)
        strategy = self._strategy or model.distribute_strategy
        shares = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        if IS_KERAS_2 and not shares:  # whose workers have their own folders within this folder
            own = worker_path(self._folder, strategy)
        # Keras' constructor derives all paths from the folder.
        super().__init__(own, **self._arguments)
        super().set_model(model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the epoch: Keras 3 does so at its end, and counts a job's first as epoch 0."""
        super().on_epoch_begin(epoch, logs)
        self._current_epoch = epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves, if it saves after each epoch."""
        with self._saving_on_all():
            super().on_epoch_end(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves, if a save is due after this batch."""
        with self._saving_on_all():
            super().on_train_batch_end(batch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Deletes the backup, on the first worker."""
        if IS_KERAS_2 or self._group(self.model).processes.is_first:
            super().on_train_end(logs)

    @contextlib.contextmanager
    def _saving_on_all(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for exchange in self._exchanges():
                stack.enter_context(exchange.saving.saving_on_all())
            yield

    def _group(self, model: keras.Model) -> Group:
        with model.distribute_strategy.scope():  # whose replicas a wrapper takes for its group
            groups = [one.group for one in wrappers_of(model)]
        return groups[0] if groups else StrategyGroup(model.distribute_strategy)

    def _of_first(self, model: keras.Model) -> str:
        """Returns the folder of the first rank, which need not be rank 0 of Horovod's ranks."""
        first = worker_of_rank(self._group(model).processes.first_rank)
        return path_of(first, self._folder)

    def _exchanges(self) -> list[GradientExchange]:
        return [one.exchange for one in wrappers_of(self.model) if one.exchange.built]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the chief's backup."""
        if IS_KERAS_2:  # Keras creates its checkpoint now, and the optimizer later
            with self.model.distribute_strategy.scope():
                keras_private.build(self.model.optimizer, self.model.trainable_variables)
            super().on_train_begin(logs)  # creates Keras' checkpoint
            restorer = keras.callbacks.BackupAndRestore(
                self._of_first(self.model), **self._arguments
            )
            restorer.set_model(self.model)
            restorer.on_train_begin(logs)
        else:
            super().on_train_begin(logs)
        place = keras_private.initial_place(self.model, self.params.get("steps"))
        # Without a backup, a later callback may give ranks the updates of rank 0.
        updates = [int(self.model.optimizer.iterations.numpy())] if any(place) else []
        found = f"epochs and steps already trained, and updates, by {self._folder!r}"
        self._group(self.model).processes.agree({found: [*place, *updates]})
