"""`gc.MultiWorkerMirroredStrategy`, the same for either Keras."""

from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.exchange.gradients import check_variables_in_scope, path_of
from tf_gradcomp.exchange.setup import report_no_effect
from tf_gradcomp.groups.means import means_over_replicas
from tf_gradcomp.groups.slices import sum_of_concatenated
from tf_gradcomp.keras.common.compressed_all_reduce import (
    CompressedAllReduce,
    compressed_all_reduce,
)
from tf_gradcomp.keras.common.inner import warn_of_lost_zeros
from tf_gradcomp.keras.common.version import install_patches, keras, keras_private
from tf_gradcomp.keras.common.wrappers import wrappers_of
from tf_gradcomp.private import tensorflow as tf_private
from tf_gradcomp.strategy.strategy import CheckedStrategy, check_trains_with_others

BATCHES = (
    "number of batches (for data of unequal sizes: dataset.repeat(), and the same steps_per_epoch, "
    "validation_steps or steps on all workers)"
)
_CALLS = ("fit", "evaluate", "predict")


class MultiWorkerMirroredStrategy(CheckedStrategy):
    """TensorFlow's strategy, with checks, and with compressed gradients if asked to.

    Keras 3 runs under this strategy, but not under TensorFlow's own (keras-team/keras#20585); Keras
    2 runs under both. Workers that were started with different versions, settings or models end
    with an error that says what differs.

    Pass no compressor if the model uses `CompressedOptimizer`. With a compressor, the gradients of
    all other optimizers and training loops are compressed; see `CompressedAllReduce`.

    In a job of several workers, a process has one strategy: a second one with equal settings is the
    first.

    Args:
        cluster_resolver: As for TensorFlow's strategy; by default TF_CONFIG is read.
        communication_options: As for TensorFlow's strategy.
        compressor: A name, a config or a compressor: see `gc.compressors.get`.
        policy: Which variables get which settings, for `compressor`.
        two_level: Whether the replicas (GPUs) of a worker first sum their gradients, and the
            workers exchange these sums, compressed by `compressor` or by `CompressedOptimizer`. If
            not, each replica exchanges with all other replicas.
        heartbeat_timeout: The number of seconds after which TensorFlow considers a silent worker
            lost, and ends the other workers; at least 1. The default is the value of the
            environment variable GRADCOMP_HEARTBEAT_TIMEOUT, or 60. A worker reports twice in this
            time, so it may pause for half of this time. All workers must have the same number.
        stall_after: The number of seconds in one collective after which a worker logs which workers
            have not arrived; at least 1, or 0 for never. The default is the value of the
            environment variable GRADCOMP_STALL_AFTER, or 30. All workers must have the same number.
        compare_variables: Whether `fit` compares after its first step and after each epoch what
            must be equal on all workers: weights, variables of optimizers, and settings such as
            learning rates. A difference is an error that names it. The comparison takes
            milliseconds.

    Raises:
        TypeError: If `policy` is no `gc.Policy`.
        ValueError: If TF_CONFIG, `compressor`, `heartbeat_timeout` or `stall_after` is not valid,
            `policy` is given without `compressor`, or the process has a strategy with other
            settings already.
        RuntimeError: If TensorFlow is already running, with several workers.
        TimeoutError: If a worker has not started within the number of seconds in the environment
            variable GRADCOMP_START_TIMEOUT, or within an hour.
        WorkersDisagreeError: If workers have different versions or settings.
    """

    @staticmethod
    def _install_patches() -> None:
        install_patches()

    _new_ops = CompressedAllReduce
    _outputs: Sequence[Any] = ()  # of the latest step of a model
    _means: Sequence[tf.Tensor] = ()  # of the outputs, once Keras has asked for one of them

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `fn` on all replicas; see `tf.distribute.Strategy.run`."""
        outputs = super().run(fn, *args, **kwargs)
        is_step = isinstance(getattr(fn, "__self__", None), keras.Model)
        self._outputs = tf.nest.flatten(outputs) if is_step else ()
        self._means = ()
        return outputs

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Reduces like TensorFlow, and also values that TensorFlow refuses.

        Keras 3 asks for the mean of each output of a step over an axis (keras-team/keras#20585).
        Here it gets means over the replicas, which share one collective. With local steps, the
        means belong to the latest step with an exchange, because a collective in each step would
        make workers wait for each other in each step.
        """
        index = next((i for i, output in enumerate(self._outputs) if output is value), None)
        if index is None or axis != 0 or self.num_replicas_in_sync == 1:
            return super().reduce(reduce_op, value, axis)
        if not self._means:
            self._means = means_over_replicas(self, self._outputs, self.periodic_reduce)
        return self._means[index]

    @staticmethod
    def _in_step() -> contextlib.AbstractContextManager[None]:
        return keras_private.lending_generator()


def ops_for_gradients(
    optimizer: Any, pairs: Sequence[tuple[Any, Any]], trained: Sequence[Any]
) -> CompressedAllReduce | None:
    """Returns the ops that compress the gradients of an optimizer that is not wrapped, if any.

    Checks the gradients of `pairs` and the `trained` variables of the optimizer.
    """
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, CheckedStrategy):
        check_variables_in_scope(strategy, trained)
    ops = compressed_all_reduce(strategy)
    if ops is None:
        check_gradients(strategy, *zip(*pairs, strict=True))
        return None
    exchange = ops.gradient_exchange(trained)
    if exchange.group.size > 1:
        warn_of_lost_zeros(optimizer, [exchange.compressor])
    return ops


def with_equal_lookups_summed(pairs: Sequence[tuple[Any, Any]], reduced: Any) -> Any:
    """Returns what TensorFlow has reduced; TensorFlow only concatenates slices."""
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    if not isinstance(strategy, CheckedStrategy) or replicas == 1 or tf_private.in_xla():
        return reduced
    return [
        (sum_of_concatenated(total, replicas, local), variable)
        if isinstance(total, tf.IndexedSlices)
        else (total, variable)
        for (local, _), (total, variable) in zip(pairs, reduced, strict=True)
    ]


def check_trains(model: keras.Model) -> None:
    """Refuses a model that each worker would train alone; called before `fit` trains."""
    strategy = model.distribute_strategy
    check_trains_with_others(strategy)
    if compressed_all_reduce(strategy) is None and not any(wrappers_of(model)):
        report_no_effect()


def check_batches(strategy: tf.distribute.Strategy, batches: int | None) -> None:
    """Checks, before Keras goes through data, that all workers end an epoch at the same step.

    The number is None if Keras continues until no worker has any more data.
    """
    if isinstance(strategy, CheckedStrategy):
        strategy.group.processes.agree({"next action": _current_calls(), BATCHES: batches})


def _current_calls() -> str:
    """Returns the methods of Keras in which this process is, such as `fit` or `evaluate in fit`."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    names = (
        frame.f_code.co_name
        for frame in frames
        if frame.f_code.co_name in _CALLS and isinstance(frame.f_locals.get("self"), keras.Model)
    )
    return " in ".join(dict.fromkeys(names))


def check_gradients(
    strategy: tf.distribute.Strategy, gradients: Sequence[Any], variables: Sequence[Any]
) -> None:
    """Checks, while a step is traced, that all workers have gradients for the same variables."""
    if isinstance(strategy, CheckedStrategy):
        present = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        paths = [path_of(variable) for _, variable in present]
        strategy.gradient_agreement.check(paths, [gradient for gradient, _ in present])


def order_of_first(strategy: tf.distribute.Strategy, batches: int) -> list[int]:
    """Returns the batches of an epoch in the first worker's random order, on all workers.

    Otherwise, workers would draw different orders, unless they have equal seeds and draw nothing
    else before.
    """
    order = list(range(batches))
    random.shuffle(order)
    if isinstance(strategy, CheckedStrategy):
        order = [
            int(i) for i in strategy.group.processes.broadcast_values(np.array(order, np.float64))
        ]
    return order
