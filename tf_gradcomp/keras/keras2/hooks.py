"""Functions that replace parts of Keras 2; `patches.py` says which are in use, and why."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tf_gradcomp.keras.common.hooks import after_init, on_outputs_of_steps, replace
from tf_gradcomp.keras.common.version import keras
from tf_gradcomp.keras.keras2.keras_private import PACKAGE, Legacy, NewStyle

_data_adapter: Any = importlib.import_module(f"{PACKAGE}.src.engine.data_adapter")
_metrics_utils: Any = importlib.import_module(f"{PACKAGE}.src.utils.metrics_utils")
_training: Any = importlib.import_module(f"{PACKAGE}.src.engine.training")


def on_reduce_gradients(reduce: Callable[..., Any]) -> None:
    """Has `reduce(optimizer, pairs, original)` called where Keras sums the gradients of replicas.

    It is the only place that knows a tensor to be the gradient of a variable.
    """

    @tf.autograph.experimental.do_not_convert
    def hooked(original: Any, self: Any, grads_and_vars: Any) -> Any:
        return reduce(self, grads_and_vars, functools.partial(original, self))

    replace(NewStyle, "aggregate_gradients", hooked)
    replace(Legacy, "_aggregate_gradients", hooked)


def on_results_of_metrics(results: Callable[..., Any]) -> None:
    """Has `results(model, original)` called where a step of `fit` or `evaluate` asks its metrics.

    Each metric asks for the sum of each of its variables over the replicas, one after another.
    """

    @tf.autograph.experimental.do_not_convert
    def hooked(original: Any, self: keras.Model) -> Any:
        return results(self, functools.partial(original, self))

    replace(keras.Model, "get_metrics_result", hooked)


def on_result_of_metric(note: Callable[[Any], None]) -> None:
    """Has `note(result)` called for what each metric made from now on is asked for.

    In a replica's context it is of all replicas, and nothing public tells it from what is of one.
    """

    def hooked(original: Any, result: Callable[..., Any]) -> Callable[..., Any]:
        of_keras = original(result)

        def noted(*args: Any) -> Any:
            of_all = of_keras(*args)
            note(of_all)
            return of_all

        return tf.__internal__.decorator.make_decorator(of_keras, noted)

    replace(_metrics_utils, "result_wrapper", hooked)


def on_sums_of_steps(sums: Callable[..., Any]) -> None:
    """Has `sums(strategy, outputs, original)` called for the outputs of a step.

    Keras asks the strategy for the sum of each over the workers, one after another; and by that it
    multiplies what metrics have counted on all of them by the number of workers.
    """
    on_outputs_of_steps(_training, "sum", sums)


def on_data(check: Callable[[tf.distribute.Strategy, int | None], None]) -> None:
    """Has `check(strategy, batches)` called where `fit`, `evaluate` or `predict` takes its data.

    `batches` is their number in an epoch: Keras ends it after so many, whatever other workers have.
    It is None where it goes on until no worker has any more. Nothing public tells it beforehand.
    """

    def checked(handler: Any, given: Mapping[str, Any]) -> None:
        if given.get("distribute", True):
            check(tf.distribute.get_strategy(), handler.inferred_steps)

    after_init(_data_adapter.DataHandler, checked)
