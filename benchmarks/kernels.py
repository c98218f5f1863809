"""Times AdaComp's encode and decode beside `residual += gradient` on arrays of the same size.

Gradients are a fixed mean from N(0, 0.02^2) with fresh noise from N(0, 0.3^2), and the residuals
are warmed up first: from an empty residual ten times as much is sent. All is timed in one run, in
turns, because memory bandwidth varies from minute to minute.
"""

import os
import platform
import statistics
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import numpy as np
import rich
import tensorflow as tf
from rich.progress import track
from rich.table import Table

from tf_gradcomp import ops

REPLICAS = 2


class Replica:
    """The residual of one tensor that is sent in bins of one size."""

    def __init__(self, elements, bin_size):
        self.residual = tf.Variable(tf.zeros(elements))
        self.layout = {"bin_sizes": [bin_size], "fingerprint": 0}
        self.payload = None

    def encode(self, gradient):
        """One step; what it sends stays in `payload`."""
        self.payload, _ = ops.adacomp_encode([self.residual], [gradient], 0, **self.layout)

    def decode(self, payloads):
        """As if all replicas had sent the same."""
        ops.adacomp_decode(payloads, 0, shapes=[self.residual.shape], **self.layout)


class Stopwatch:
    """Milliseconds of each run, by name."""

    def __init__(self):
        self.times = defaultdict(list)

    def run(self, name, work, *arguments, **options):
        """Does the work and notes how long it took."""
        start = time.perf_counter()
        work(*arguments, **options)
        self.times[name].append(1e3 * (time.perf_counter() - start))


def gradients(elements, count):
    mean = tf.random.normal([elements], stddev=0.02)
    for _ in track(range(count), "warming up, then measuring"):
        yield mean + tf.random.normal([elements], stddev=0.3)


def measure(elements, replicas, warm_up, repeats):
    stopwatch = Stopwatch()
    accumulator = tf.Variable(tf.zeros(elements))
    array, ones = np.zeros(elements, np.float32), np.ones(elements, np.float32)
    for step, gradient in enumerate(gradients(elements, warm_up + repeats)):
        if step < warm_up:
            for replica in replicas.values():
                replica.encode(gradient)
            continue
        for bin_size, replica in replicas.items():
            # In turns, so that neither always finds what the other left in the cache.
            pair = [("floor", add, accumulator), (f"encode {bin_size}", replica.encode)]
            for name, work, *first in pair if step % 2 else reversed(pair):
                stopwatch.run(name, work, *first, gradient)
            payloads = tf.stack([replica.payload] * REPLICAS)
            stopwatch.run(f"decode {bin_size}", replica.decode, payloads)
        stopwatch.run("numpy", np.add, array, ones, out=array)
    return stopwatch.times


def add(variable, value):
    tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=value)


def report(elements, times, replicas):
    floor = statistics.median(times["floor"])
    table = Table("", "ms", "min", "max", "ns/element", "x r += g", "bytes/element")
    rows = {"floor": "r += g", "numpy": "r += g in NumPy, one thread"}
    for bin_size in replicas:
        rows[f"encode {bin_size}"] = f"encode, bins of {bin_size}"
        rows[f"decode {bin_size}"] = f"decode {REPLICAS}, bins of {bin_size}"
    for name, label in rows.items():
        median = statistics.median(times[name])
        numbers = [median, min(times[name]), max(times[name]), 1e6 * median / elements]
        kind, _, bin_size = name.partition(" ")
        sent = 4 * replicas[int(bin_size)].payload.shape[0] / elements if bin_size else None
        table.add_row(
            label,
            *[f"{number:.2f}" for number in numbers],
            f"{median / floor:.2f}",
            f"{sent:.4f}" if kind == "encode" else "",
        )
    rich.print(table)


def processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


@click.command(help=__doc__)
@click.option("--elements", default=25_000_000, show_default=True)
@click.option("--bins", default="50,500", show_default=True, help="Bin sizes.")
@click.option("--threads", default=os.cpu_count(), show_default=True)
@click.option("--repeats", default=21, show_default=True)
@click.option("--warm-up", default=100, show_default=True, help="Steps before measuring.")
def main(elements, bins, threads, repeats, warm_up):
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    replicas = {int(size): Replica(elements, int(size)) for size in bins.split(",")}
    times = measure(elements, replicas, warm_up, repeats)
    rich.print(
        f"{processor()}, {threads} threads, {ops.library_info().simd} kernels, "
        f"TensorFlow {tf.__version__}, {elements:,} elements, {repeats} repeats (medians)"
    )
    report(elements, times, replicas)


if __name__ == "__main__":
    main()
