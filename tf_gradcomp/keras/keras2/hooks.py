"""Functions that replace parts of Keras 2; `patches.py` lists them with reasons."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tf_gradcomp.keras.common.hooks import after_init, on_outputs_of_steps, replace, replace_method
from tf_gradcomp.keras.common.version import keras
from tf_gradcomp.keras.keras2.keras_private import PACKAGE, Legacy, NewStyle
from tf_gradcomp.whole_files import replacing_path

_data_adapter: Any = importlib.import_module(f"{PACKAGE}.src.engine.data_adapter")
_metrics_utils: Any = importlib.import_module(f"{PACKAGE}.src.utils.metrics_utils")
_training: Any = importlib.import_module(f"{PACKAGE}.src.engine.training")


def on_reduce_gradients(reduce: Callable[..., Any]) -> None:
    """Has `reduce(optimizer, pairs, original=...)` called where Keras sums gradients."""
    replace_method(NewStyle, "aggregate_gradients", reduce)
    replace_method(Legacy, "_aggregate_gradients", reduce)


def on_results_of_metrics(results: Callable[..., Any]) -> None:
    """Has `results(model, original)` called where a step asks its metrics."""

    @tf.autograph.experimental.do_not_convert
    def hooked(original: Any, self: keras.Model) -> Any:
        return results(self, functools.partial(original, self))

    replace(keras.Model, "get_metrics_result", hooked)


def on_result_of_metric(note: Callable[[Any], None]) -> None:
    """Has `note(result)` called for each result of the metrics that are created from now on.

    In a replica's context, the result counts all replicas.
    """

    def hooked(original: Any, result_fn: Callable[..., Any]) -> Callable[..., Any]:
        of_keras = original(result_fn)

        def noted(*args: Any) -> Any:
            of_all = of_keras(*args)
            note(of_all)
            return of_all

        return tf.__internal__.decorator.make_decorator(of_keras, noted)

    replace(_metrics_utils, "result_wrapper", hooked)


def on_sums_of_steps(sums: Callable[..., Any]) -> None:
    """Has `sums(strategy, outputs, original)` called for the outputs of a step."""
    on_outputs_of_steps(_training, "sum", sums)


def on_data(check: Callable[[tf.distribute.Strategy, int | None], None]) -> None:
    """Has `check(strategy, batches)` called where `fit`, `evaluate` or `predict` takes its data.

    `batches` is the number of batches in an epoch; None if Keras continues until no worker has any
    more.
    """

    def checked(handler: Any, given: Mapping[str, Any]) -> None:
        if given.get("distribute", True):
            check(tf.distribute.get_strategy(), handler.inferred_steps)

    after_init(_data_adapter.DataHandler, checked)


def on_save(save: Callable[[keras.Model, str, Callable[[], Any], Callable[[], Any]], None]) -> None:
    """Has `save(model, path, write, original)` called where Keras writes a file of a model.

    `write` writes a temporary file first. Weights in TensorFlow's format are a checkpoint, which
    has its own hook.
    """

    def hooked(original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        as_usual = functools.partial(original, model, filepath, *args, **kwargs)
        path = os.fspath(filepath) if isinstance(filepath, str | os.PathLike) else "://"
        # If `overwrite` is False, Keras asks the user; the other functions lack this argument.
        overwrite = kwargs.get("overwrite", args[0] if args else True)
        if "://" in path or not (overwrite or not os.path.exists(path)):
            as_usual()
            return

        def write() -> None:
            with replacing_path(path) as new:
                original(model, new, *args, **kwargs)

        save(model, path, write, as_usual)

    def weights(original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        save_format = kwargs.get("save_format", args[1] if len(args) > 1 else None)
        by_name = "h5" if str(filepath).endswith((".h5", ".keras", ".hdf5")) else "tf"
        if (save_format or by_name).lower().strip() in ("h5", "hdf5", "keras"):
            hooked(original, model, filepath, *args, **kwargs)
        else:
            original(model, filepath, *args, **kwargs)

    for module, name, hook in (
        ("saving_lib", "save_model", hooked),
        ("saving_lib", "save_weights_only", hooked),
        ("legacy.hdf5_format", "save_model_to_hdf5", hooked),
        ("legacy.saved_model.save", "save", hooked),
        ("legacy.save", "save_weights", weights),
    ):
        replace(importlib.import_module(f"{PACKAGE}.src.saving.{module}"), name, hook)
