"""Times the exchange of a ResNet-50's gradient: TensorFlow's own all-reduce beside AdaComp.

    gradcomp run -n 2 benchmarks/exchange.py

Both run in turn in the same processes, over the same collectives. Gradients have the real shapes of
keras.applications.ResNet50. `network.py` measures all methods so, and on slower links.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from pathlib import Path

import click
import keras
import rich.console
import rich.table
import tensorflow as tf
from gradients import Gradients, all_reduce, mean_over_workers, on_replica
from turns import Contender, timed

import tf_gradcomp as gc
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.traffic import Traffic


@click.command(help=__doc__)
@click.option("--warmup", default=100, show_default=True, help="Steps before timing starts.")
@click.option("--repeats", default=15, show_default=True, help="Timed steps of each contender.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True),
    help="Where to write the figures.",
)
def main(warmup: int, repeats: int, json_path: str | None) -> None:
    strategy = gc.MultiWorkerMirroredStrategy(compressor="adacomp")
    if strategy.num_replicas_in_sync == 1:
        raise click.UsageError("One worker exchanges nothing; start it by `gradcomp run -n 2`.")
    with strategy.scope():
        model = keras.applications.ResNet50(weights=None)
    variables = model.trainable_variables
    exchange = strategy.gradient_exchange(variables)
    gradients = Gradients(variables, seed=strategy.cluster_resolver.task_id or 0)
    reductions = {
        "all-reduce": all_reduce,
        "AdaComp": lambda values: strategy.reduce_gradients(values, variables),
    }
    contenders = {
        name: Contender(on_replica(strategy, reduction, gradients.values))
        for name, reduction in reductions.items()
    }
    mean = mean_over_workers(strategy)
    for _ in range(warmup):
        gradients.draw()
        timed(contenders["AdaComp"], mean)
    before = exchange.traffic()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        gradients.draw()
        for name, contender in contenders.items():
            elapsed = timed(contender, mean)
            if repeat > 0:  # the first traces the all-reduce
                seconds[name].append(elapsed)
    if gc.is_chief(strategy):
        report(seconds, exchange, exchange.traffic().since(before), strategy, json_path)


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
        Path(json_path).parent.mkdir(parents=True, exist_ok=True)
        with open(json_path, "w") as file:
            json.dump({"seconds": seconds, "payload_bytes": payload}, file)


if __name__ == "__main__":
    main()
