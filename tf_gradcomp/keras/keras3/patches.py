"""The table of all patches of Keras 3, which `install_patches` of `common/version.py` applies.

A `CompressedOptimizer` and a `MultiWorkerMirroredStrategy` call it when they are created.
If two rows replace the same function, the later replacement calls the earlier one.
"""

from __future__ import annotations

import functools

from tf_gradcomp.groups.notices import out_of_scope
from tf_gradcomp.keras.common import equality, files, losses, same_data
from tf_gradcomp.keras.common.hooks import (
    on_epochs,
    on_logs,
    on_train_begin,
    on_train_function,
    record_callbacks_of_fit,
)
from tf_gradcomp.keras.common.reading import GeneratorReader
from tf_gradcomp.keras.common.restarts import tell_if_nothing_is_saved
from tf_gradcomp.keras.common.strategy import check_batches, check_trains
from tf_gradcomp.keras.keras3 import averages, backups, keras_private, loss_scale, strategy
from tf_gradcomp.keras.keras3.hooks import files as on_files
from tf_gradcomp.keras.keras3.hooks import optimizers as on_optimizers
from tf_gradcomp.keras.keras3.hooks import training as on_training
from tf_gradcomp.strategy import random_numbers
from tf_gradcomp.strategy.patches import TENSORFLOW, Patch

_TRAINER = "keras.src.backend.tensorflow.trainer"
_EPOCHS = f"{_TRAINER}.TFEpochIterator"
_BUILD = "keras.Model._maybe_symbolic_build"
_CALLBACKS = "keras.src.callbacks.callback_list.CallbackList"
_GENERATORS = "keras.src.trainers.data_adapters.generator_data_adapter.GeneratorDataAdapter"
_SAVING = "keras.src.saving.saving_lib"

OPTIMIZERS = (
    Patch(
        ("keras.src.backend.tensorflow.optimizer.TFOptimizer._all_reduce_sum_gradients",),
        "Only this function knows which tensor is the gradient of which variable.",
        "test_on_reduce_gradients",
        lambda: on_optimizers.on_reduce_gradients(strategy.reduce_in_optimizer),
        essential=True,
    ),
    Patch(
        ("keras.src.optimizers.base_optimizer.BaseOptimizer.iterations",),
        "An optimizer that applies the sums of several batches at once still counts batches.",
        "test_applying_at_once_counts_updates",
        lambda: on_optimizers.on_iterations(keras_private.batches_of_update),
        essential=True,
    ),
    Patch(
        ("keras.optimizers.LossScaleOptimizer.apply",),
        "A worker decides from its own gradients whether to skip a step, and other workers hang.",
        "test_on_loss_scaled_apply",
        lambda: on_optimizers.on_loss_scaled_apply(loss_scale.apply_scaled),
        essential=True,
    ),
    Patch(
        ("keras.optimizers.LossScaleOptimizer.check_finite",),
        "The same around a plain optimizer or a MultiOptimizer under our strategy.",
        "test_on_check_finite",
        lambda: on_optimizers.on_check_finite(loss_scale.finite_on_all),
        essential=True,
    ),
    Patch(
        ("keras.optimizers.LossScaleOptimizer.load_own_variables",),
        "In a file of a job without a loss scaler, our state is in the scaler's place.",
        "test_on_scaler_load",
        lambda: on_optimizers.on_scaler_load(loss_scale.load_into_scaler),
    ),
    Patch(
        ("keras.optimizers.MultiOptimizer.build",),
        "Keras looks for loss scalers only in the outermost optimizers.",
        "test_on_multi_optimizer",
        lambda: on_optimizers.on_multi_optimizer(loss_scale.check_no_scaler_inside),
    ),
    Patch(
        ("keras.callbacks.SwapEMAWeights._apply_to_ema_optimizers",),
        "Keras does not look for averaged weights in a wrapper.",
        "test_on_averages_swapped",
        lambda: on_optimizers.on_averages_swapped(averages.swap_averages),
    ),
    Patch(
        ("keras.src.losses.loss.reduce_values",),
        "Keras does not divide a loss of one number by the number of replicas.",
        "test_on_loss_of_one_number",
        lambda: on_optimizers.on_loss_of_one_number(
            functools.partial(losses.note, divided=False),
            functools.partial(losses.note, divided=True),
        ),
    ),
)

TRAINING = (
    Patch(
        ("keras.Model.make_train_function",),
        "Each worker would train alone a model that was created outside the scope.",
        "test_on_train_function",
        lambda: on_train_function(check_trains, equality.compare_first_step),
    ),
    Patch(
        (f"{_CALLBACKS}.set_model",),
        "Keras gives a callback no access to the list that contains it.",
        "test_know_callbacks_of_fit",
        record_callbacks_of_fit,
    ),
    Patch(
        (f"{_CALLBACKS}.on_train_begin",),
        "Keras does not ask callbacks whether any of them saves.",
        "test_on_train_begin",
        lambda: on_train_begin(tell_if_nothing_is_saved),
    ),
    Patch(
        (f"{_GENERATORS}.__init__", f"{_EPOCHS}._get_iterator", f"{_EPOCHS}._enumerate_iterator"),
        "Batches that were read ahead from a generator are lost.",
        "test_read_generators",
        lambda: on_training.read_generators(GeneratorReader),
    ),
    Patch(
        (f"{_EPOCHS}._get_iterator", f"{_EPOCHS}._enumerate_iterator"),
        "Iterators that Keras drops unread draw random numbers of the functions of data.",
        "test_create_iterators_on_demand",
        on_training.create_iterators_on_demand,
    ),
    Patch(
        (f"{_EPOCHS}.__init__",),
        "Each worker shuffles a PyDataset in its own order.",
        "test_read_py_datasets",
        lambda: on_training.read_py_datasets(strategy.reader_of),
    ),
    Patch(
        (_BUILD,),
        "Keras takes a batch from a separate iterator before it trains.",
        "test_on_batch_to_build_with",
        lambda: on_training.on_batch_to_build_with(same_data.compared_batch),
    ),
    Patch(
        (f"{_EPOCHS}.__init__",),
        "No public API tells how many rows the last batch has.",
        "test_on_arrays",
        lambda: on_training.on_arrays(same_data.check_last_batch),
    ),
    Patch(
        ("keras.random.SeedGenerator.next",),
        "All replicas draw the same dropout masks, noise and augmentations.",
        "test_on_seeds",
        lambda: on_training.on_seeds(random_numbers.local_state_seed),
    ),
    Patch(
        ("keras.src.random.seed_generator.global_seed_generator",),
        "Keras keeps it for each thread, and a thread of a replica's step cannot create one.",
        "test_on_global_generator",
        lambda: on_training.on_global_generator(keras_private.global_generator),
    ),
    Patch(
        ("keras.layers.BatchNormalization._moments",),
        "The mean over an empty batch is NaN, which makes the moving statistics NaN for good.",
        "test_keep_statistics_of_empty_batches",
        lambda: on_training.keep_statistics_of_empty_batches(strategy.may_be_empty),
    ),
    Patch(
        (_BUILD,),
        "The first batch of a generator is lost, and metrics are not checked for their scope.",
        "test_on_built_and_generators",
        lambda: on_training.on_built(strategy.building),
        essential=True,
    ),
    Patch(
        ("keras.Model._symbolic_build",),
        "Models whose train_step takes another structure, or that have no call, do not train.",
        "test_on_build_that_fails",
        lambda: on_training.on_build_that_fails(strategy.build_by_step),
    ),
    Patch(
        (f"{_EPOCHS}.__init__",),
        "Workers with different numbers of batches hang; no public API tells the number.",
        "test_on_data",
        lambda: on_training.on_data(check_batches),
    ),
    Patch(
        (f"{_TRAINER}.reduce_per_replica",),
        "Keras asks the strategy for the mean of scalars over an axis, which TensorFlow refuses.",
        "test_stock_keras_still_fails_under_the_stock_strategy",
        lambda: on_training.on_means_of_steps(strategy.means_of_step),
        "keras-team/keras#20585",
        essential=True,
    ),
    Patch(
        tuple(
            f"{_CALLBACKS}.on_{name}"
            for name in ("epoch_begin", "epoch_end", "test_begin", "predict_begin")
        ),
        "The chief's callbacks save alone; the workers' state must be collected before.",
        "test_on_epochs",
        lambda: on_epochs(
            files.release,
            files.collect_at_epoch_end,
            equality.compare_settings,
            files.synchronize,
        ),
        essential=True,
    ),
    Patch(
        ("keras.callbacks.TensorBoard.set_model", "keras.callbacks.CSVLogger.on_train_begin"),
        "Workers that log to one path overwrite each other's files.",
        "test_on_logs",
        lambda: on_logs(files.log_path),
    ),
)

FILES = (
    Patch(
        (
            f"{_SAVING}.save_model",
            f"{_SAVING}.save_weights_only",
            "keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5",
        ),
        "Workers overwrite each other's file, and a kill leaves half a file.",
        "test_on_save",
        lambda: on_files.on_save(files.save, files.leaves_out_optimizer),
        essential=True,
    ),
    Patch(
        (f"{_SAVING}.get_attr_skipset",),
        "Each save leaks 70 kB, and creates variables in the scope of a strategy.",
        "test_remember_attributes_to_skip",
        lambda: on_files.remember_attributes_to_skip(out_of_scope),
    ),
    Patch(
        tuple(
            f"keras.callbacks.BackupAndRestore.{name}"
            for name in ("_save_model", "on_train_begin", "on_train_end")
        ),
        "Keras overwrites its only backup in place, on all workers.",
        "test_on_backups",
        lambda: on_files.on_backups(backups.save, backups.restore, backups.delete),
    ),
)

PATCHES = (*TENSORFLOW, *OPTIMIZERS, *TRAINING, *FILES)
