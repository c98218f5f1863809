"""Times the exchange of a ResNet-50's gradient: TensorFlow's own all-reduce beside AdaComp.

    gradcomp run -n 2 benchmarks/exchange.py

Both run in turn in the same processes, over the same collectives. Gradients have the real shapes of
keras.applications.ResNet50 and are distributed as in AdaComp's acceptance test: each weight has a
mean drawn once from N(0, 0.02^2), and noise of scale 0.3 drawn anew for each step.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import click
import keras
import rich.console
import rich.table
import tensorflow as tf

import tf_gradcomp as gc
from tf_gradcomp.distribute.exchange import GradientExchange
from tf_gradcomp.distribute.traffic import Traffic

Reduction = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]


@click.command(help=__doc__)
@click.option("--warmup", default=100, show_default=True, help="Steps before timing starts.")
@click.option("--repeats", default=15, show_default=True, help="Timed steps of each contender.")
@click.option("--json", "json_path", type=click.Path(), help="Where to write the figures.")
def main(warmup: int, repeats: int, json_path: str | None) -> None:
    strategy = gc.MultiWorkerMirroredStrategy(compressor="adacomp")
    if strategy.num_replicas_in_sync == 1:
        raise click.UsageError("One worker exchanges nothing; start it by `gradcomp run -n 2`.")
    with strategy.scope():
        model = keras.applications.ResNet50(weights=None)
    variables = model.trainable_variables
    exchange = strategy.gradient_exchange(variables)
    contenders = {
        "all-reduce": lambda gradients: tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, gradients
        ),
        "AdaComp": lambda gradients: strategy.reduce_gradients(gradients, variables),
    }
    gradients = Gradients(variables, seed=strategy.cluster_resolver.task_id or 0)
    steps = {
        name: Timed(strategy, reduction, gradients.values) for name, reduction in contenders.items()
    }
    for _ in range(warmup):
        gradients.draw()
        steps["AdaComp"].run()
    before = exchange.traffic()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        gradients.draw()
        for name, step in steps.items():
            elapsed = step.run()
            if repeat > 0:  # the first traces the all-reduce
                seconds[name].append(elapsed)
    if not strategy.cluster_resolver.task_id:
        report(seconds, exchange, exchange.traffic().since(before), strategy, json_path)


class Gradients:
    """The gradients of a step, a different stream on each worker."""

    def __init__(self, variables: Sequence[keras.Variable], seed: int) -> None:
        self._means = [tf.random.normal(variable.shape, stddev=0.02) for variable in variables]
        self._random = tf.random.Generator.from_seed(seed)
        self.values = [tf.Variable(mean) for mean in self._means]

    @tf.function
    def draw(self) -> None:
        """Makes them those of the next step."""
        for mean, value in zip(self._means, self.values, strict=True):
            value.assign(mean + self._random.normal(mean.shape, stddev=0.3))


class Timed:
    """One way to reduce the gradients of all workers.

    They are captured, and not passed: Python takes milliseconds for so many arguments.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        reduction: Reduction,
        gradients: Sequence[tf.Variable],
    ) -> None:
        self._reduce = tf.function(
            lambda: strategy.run(lambda: reduction([value.read_value() for value in gradients]))
        )
        self._wait = tf.function(
            lambda: strategy.run(
                lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(0.0))
            )
        )

    def run(self) -> float:
        """Seconds from when all workers are ready until this one has the reduced gradients."""
        self._wait()
        start = time.perf_counter()
        reduced = self._reduce()
        elapsed = time.perf_counter() - start
        del reduced  # giving the memory back is not timed
        return elapsed


def report(
    seconds: dict[str, list[float]],
    exchange: GradientExchange,
    traffic: Traffic,
    strategy: tf.distribute.Strategy,
    json_path: str | None,
) -> None:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    table = rich.table.Table(
        title=f"ResNet-50 gradient, {traffic.dense_bytes / traffic.exchanges / 4e6:.1f} million "
        f"elements, {strategy.num_replicas_in_sync} workers, {os.cpu_count()} cores, "
        f"{platform.machine()}, loopback"
    )
    for column in ("", "median ms", "min", "max", "times faster", "payload bytes"):
        table.add_column(column, justify="right")
    payload = {
        "all-reduce": traffic.dense_bytes / traffic.exchanges,
        "AdaComp": traffic.payload_bytes / traffic.exchanges,
    }
    for name, values in seconds.items():
        milliseconds = [1000 * value for value in (medians[name], min(values), max(values))]
        faster = medians["all-reduce"] / medians[name]
        table.add_row(
            name, *(f"{ms:.1f}" for ms in milliseconds), f"{faster:.1f}", f"{payload[name]:,.0f}"
        )
    rich.console.Console().print(table)
    if json_path:
        with open(json_path, "w") as file:
            json.dump({"seconds": seconds, "payload_bytes": payload}, file)


if __name__ == "__main__":
    main()
