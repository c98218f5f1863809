"""Measures the cost of a small collective for each worker: CPU time, context switches and time.

    python benchmarks/collective_cost.py

Two workers on this machine sum, and then gather, 16 floats: 64 bytes. On few cores the cost is CPU
time, so times of small models on one machine say more about its cores than about a network.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import click
from machine import processor
from output import print_table
from reports import reports_of
from rich.table import Table
from used import Used

ELEMENTS = 16
WARM_UP = 20


def work(repeats: int) -> None:
    """Measures on one worker; prints the costs of a call as JSON."""
    import tensorflow as tf

    import tf_gradcomp as gc

    strategy = gc.MultiWorkerMirroredStrategy()
    values = tf.zeros(ELEMENTS)

    def on_replicas(call: Callable[[tf.distribute.ReplicaContext], tf.Tensor]) -> Callable:
        return tf.function(
            lambda: strategy.run(lambda: call(tf.distribute.get_replica_context())),
            autograph=False,
        )

    calls = {
        "no collective": on_replicas(lambda _: tf.identity(values)),
        "all-reduce": on_replicas(lambda context: context.all_reduce("sum", tf.identity(values))),
        "all-gather": on_replicas(lambda context: context.all_gather(tf.identity(values), 0)),
    }
    costs = {}
    for name, call in calls.items():
        for _ in range(WARM_UP):
            call()
        before, start = Used.now(), time.perf_counter()
        for _ in range(repeats):
            call()
        seconds, used = time.perf_counter() - start, Used.now().since(before)
        costs[name] = [total / repeats for total in (seconds, used.cpu, used.switches)]
    print(json.dumps(costs))


@click.command(help=__doc__)
@click.option("--repeats", default=500, show_default=True, help="Calls of each.")
def main(repeats: int) -> None:
    """Prints a table with a row for each call."""
    found = reports_of(__file__, str(repeats))
    table = Table("", "ms", "CPU ms", "context switches", title=f"Two workers on {processor()}")
    for name, (seconds, cpu, switches) in found[0].items():
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{1e3 * cpu:.2f}", f"{switches:.1f}")
    print_table(table)


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        work(int(sys.argv[1]))
    else:
        main()
