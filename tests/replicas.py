"""Several replicas in this process: strategies over logical CPU devices, and steps on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.compressors.stages import has_stages
from tf_gradcomp.exchange.gradients import native


def method_names() -> list[str]:
    """Returns the names of all compressors, except choices between compressors."""
    return [name for name in compressors.names() if name != compressors.Auto.name]


def names_without_stages() -> list[str]:
    """The names of those methods without a warm-up or stages, which need no collectives."""
    methods = {name: compressors.get(name) for name in method_names()}
    return [name for name, method in methods.items() if not has_stages(method)]


def mirrored(replicas: int = 2) -> tf.distribute.MirroredStrategy:
    """A `MirroredStrategy` of CPU replicas, which exchange by copying, without collectives."""
    devices = [f"CPU:{i}" for i in range(replicas)]
    return tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


@functools.cache
def collective() -> tf.distribute.MirroredStrategy:
    """The `MirroredStrategy` of two CPU replicas that talk by TensorFlow's collectives.

    There is one for all tests: each strategy counts its collectives from the same number, so those
    of several in one process would meet each other.
    """
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def per_replica(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> Any:
    """Returns a value for each replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


def stepper(
    strategy: tf.distribute.Strategy,
    apply: Callable[[list[tf.Tensor]], Any],
    *,
    graph: bool = False,
) -> Callable[[Sequence[Sequence[Any]]], None]:
    """Returns `step(gradients[replica][variable])`, which calls `apply` on each replica.

    Without `graph` the steps are eager. A trace takes as long as fifteen of them.
    """

    def run(gradients: list[Any]) -> None:
        strategy.run(lambda *local: apply(list(local)) and None, args=tuple(gradients))

    function = tf.function(run, autograph=False) if graph else run

    def step(gradients: Sequence[Sequence[Any]]) -> None:
        by_variable = zip(*gradients, strict=True)
        function([per_replica(strategy, [tf.constant(g) for g in gs]) for gs in by_variable])

    return step


def copies(strategy: tf.distribute.Strategy, variable: Any) -> list[np.ndarray]:
    """The value that each replica has of a variable."""
    return [local.numpy() for local in strategy.experimental_local_results(native(variable))]
