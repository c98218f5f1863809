"""The table of all patches of Keras 2, which `install_patches` of `common/version.py` applies.

A `CompressedOptimizer` and a `MultiWorkerMirroredStrategy` call it when they are created.
"""

from __future__ import annotations

from tf_gradcomp.keras.common import equality, files
from tf_gradcomp.keras.common.hooks import (
    on_epochs,
    on_logs,
    on_train_begin,
    on_train_function,
    record_callbacks_of_fit,
)
from tf_gradcomp.keras.common.restarts import tell_if_nothing_is_saved
from tf_gradcomp.keras.common.strategy import check_batches, check_trains
from tf_gradcomp.keras.keras2 import hooks, strategy
from tf_gradcomp.keras.keras2.backups import tell_if_backups_are_gone
from tf_gradcomp.keras.keras2.keras_private import PACKAGE
from tf_gradcomp.strategy.patches import TENSORFLOW, Patch

_ENGINE = f"{PACKAGE}.src.engine"

PATCHES = (
    *TENSORFLOW,
    Patch(
        (
            "tf.keras.optimizers.Optimizer.aggregate_gradients",
            "tf.keras.optimizers.legacy.Optimizer._aggregate_gradients",
        ),
        "Only this function knows which tensor is the gradient of which variable.",
        "test_on_reduce_gradients",
        lambda: hooks.on_reduce_gradients(strategy.reduce_in_optimizer),
        essential=True,
    ),
    Patch(
        ("tf.keras.Model.make_train_function",),
        "Each worker would train alone a model that was created outside the scope.",
        "test_on_train_function",
        lambda: on_train_function(check_trains, equality.compare_first_step),
    ),
    Patch(
        ("tf.keras.callbacks.CallbackList.set_model",),
        "Keras gives a callback no access to the list that contains it.",
        "test_know_callbacks_of_fit",
        record_callbacks_of_fit,
    ),
    Patch(
        ("tf.keras.callbacks.CallbackList.on_train_begin",),
        "Keras does not ask callbacks whether any of them saves, or has found a backup.",
        "test_on_train_begin",
        lambda: on_train_begin(tell_if_nothing_is_saved, tell_if_backups_are_gone),
    ),
    Patch(
        (f"{_ENGINE}.training.reduce_per_replica",),
        "Keras multiplies the metrics of all workers by the number of workers.",
        "test_on_sums_of_steps",
        lambda: hooks.on_sums_of_steps(strategy.sums_of_step),
        essential=True,
    ),
    Patch(
        (f"{PACKAGE}.src.utils.metrics_utils.result_wrapper",),
        "No public API distinguishes counts over all replicas from counts of one replica.",
        "test_on_result_of_metric",
        lambda: hooks.on_result_of_metric(strategy.mark_as_global),
        essential=True,
    ),
    Patch(
        ("tf.keras.Model.get_metrics_result",),
        "Each metric sums each of its variables with a separate collective.",
        "test_on_results_of_metrics",
        lambda: hooks.on_results_of_metrics(strategy.results_of_metrics),
        essential=True,
    ),
    Patch(
        (f"{_ENGINE}.data_adapter.DataHandler.__init__",),
        "Workers with different numbers of batches hang; no public API tells the number.",
        "test_on_data",
        lambda: hooks.on_data(check_batches),
    ),
    Patch(
        tuple(
            f"{PACKAGE}.src.saving.{name}"
            for name in (
                "saving_lib.save_model",
                "saving_lib.save_weights_only",
                "legacy.hdf5_format.save_model_to_hdf5",
                "legacy.saved_model.save.save",
                "legacy.save.save_weights",
            )
        ),
        "Workers that save to one path overwrite each other's files.",
        "test_on_save",
        lambda: hooks.on_save(files.save),
        essential=True,
    ),
    Patch(
        tuple(f"tf.keras.callbacks.CallbackList.on_epoch_{end}" for end in ("begin", "end")),
        "The chief's callbacks save alone; the workers' state must be collected before.",
        "test_on_epochs",
        lambda: on_epochs(files.release, files.collect_at_epoch_end, equality.compare_settings),
        essential=True,
    ),
    Patch(
        ("tf.keras.callbacks.TensorBoard.set_model", "tf.keras.callbacks.CSVLogger.on_train_begin"),
        "Workers that log to one path overwrite each other's files.",
        "test_on_logs",
        lambda: on_logs(files.log_path),
    ),
)
