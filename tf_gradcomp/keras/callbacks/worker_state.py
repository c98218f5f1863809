"""Callbacks that save, restore and share the state of all workers."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_gradcomp.chief import path_of, worker_of_rank, worker_path
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras.callbacks.shared import EPOCH, SAVERS, checked_every, warn_if_behind
from tf_gradcomp.keras.common.data import BATCHES
from tf_gradcomp.keras.common.initial_state import broadcast_initial_state, ranks_of
from tf_gradcomp.keras.common.wrappers import wrappers_of
from tf_gradcomp.keras_version import IS_KERAS_2, keras, keras_private


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
        """Prepares the backup; the job and the worker's index are known only now."""
        folder = self._folder_of_first(model)
        strategy = self._strategy or model.distribute_strategy
        shares = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        if IS_KERAS_2 and not shares:  # whose workers have their own folders within this folder
            folder = worker_path(self._folder, strategy)
        # Keras' constructor derives all paths from the folder.
        super().__init__(folder, **self._arguments)
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
            groups = [wrapper.group for wrapper in wrappers_of(model)]
        return groups[0] if groups else StrategyGroup(model.distribute_strategy)

    def _folder_of_first(self, model: keras.Model) -> str:
        """Returns the folder of the first rank, which need not be rank 0 of Horovod's ranks."""
        first = worker_of_rank(self._group(model).processes.first_rank)
        return path_of(first, self._folder)

    def _exchanges(self) -> list[GradientExchange]:
        return [wrapper.exchange for wrapper in wrappers_of(self.model) if wrapper.exchange.built]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the chief's backup."""
        if IS_KERAS_2:  # Keras creates its checkpoint now, and the optimizer later
            with self.model.distribute_strategy.scope():
                keras_private.build(self.model.optimizer, self.model.trainable_variables)
            super().on_train_begin(logs)  # creates Keras' checkpoint
            restorer = keras.callbacks.BackupAndRestore(
                self._folder_of_first(self.model), **self._arguments
            )
            restorer.set_model(self.model)
            restorer.on_train_begin(logs)
        else:
            super().on_train_begin(logs)
        epoch_and_step = keras_private.initial_position(self.model, self.params.get("steps"))
        # Without a backup, a later callback may give ranks the updates of rank 0.
        updates = [int(self.model.optimizer.iterations.numpy())] if any(epoch_and_step) else []
        found = f"epochs and steps already trained, and updates, by {self._folder!r}"
        self._group(self.model).processes.agree({found: [*epoch_and_step, *updates]})


class BroadcastInitialState(keras.callbacks.Callback):
    """Gives all ranks of a Horovod job the weights and the optimizer of rank 0, before step 1.

    All ranks must have this callback. Residuals and each rank's other own state stay unchanged, so
    all ranks must load a checkpoint that holds such state. Under a strategy, the callback does
    nothing.

    The callback warns of layers that need statistics of all ranks, such as
    `BatchNormalization(synchronized=True)`, because Keras itself does not know Horovod's ranks.

    Raises:
        ValueError: At the start of training, if the model has no variables yet.
        WorkersDisagreeError: At the start of training, if ranks have data for different numbers of
            batches, or other variables.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sends or receives the values."""
        group = ranks_of(self.model)
        if group is not None and group.processes.size > 1:
            group.processes.agree({"next action": "training", BATCHES: self.params.get("steps")})
            self._warn_of_synchronized_layers()
        broadcast_initial_state(self.model)

    def _warn_of_synchronized_layers(self) -> None:
        for layer in keras_private.layers_of(self.model):
            if getattr(layer, "synchronized", False):
                warnings.warn(
                    f"{layer.name!r} should have the statistics of all workers, but under Horovod "
                    "each rank has only its own statistics; rank 0's statistics are saved.",
                    stacklevel=2,
                )


class CollectState(keras.callbacks.Callback):
    """Collects the residuals of all workers, so that the chief, or rank 0, can save alone.

    All workers must have this callback. On the saving worker, it comes before the callback that
    saves:

    ```python
    callbacks = [gc.callbacks.CollectState()]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint("checkpoints/{epoch}.keras"))
    ```

    The collected state is valid until the next step; see `gc.CompressedOptimizer.collect_state`.
    Under a strategy, `fit` itself collects at the end of each epoch.

    Args:
        every: `"epoch"`, or a number of batches: the `save_freq` of `ModelCheckpoint`.

    Raises:
        ValueError: If `every` is neither `"epoch"` nor a whole number of at least 1.
    """

    def __init__(self, every: str | int = EPOCH) -> None:
        super().__init__()
        self._every = checked_every("CollectState", every)
        self._batches = 0
        self._last: int | None = None

    def set_model(self, model: keras.Model) -> None:
        """Called by Keras; warns if a callback before this one will miss the collected state."""
        super().set_model(model)
        warn_if_behind(self, SAVERS, "have the collected state")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Collects after `every` batches, counted like Keras' `ModelCheckpoint`."""
        if not isinstance(self._every, int):
            return
        last = self._last
        self._batches += batch + 1 if last is None or batch <= last else batch - last
        self._last = batch
        if self._batches >= self._every:
            self._batches = 0
            self._collect()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Collects after an epoch."""
        if self._every == EPOCH:
            self._collect()

    def _collect(self) -> None:
        for wrapper in wrappers_of(self.model):
            if wrapper.exchange.built:
                wrapper.collect_state()
