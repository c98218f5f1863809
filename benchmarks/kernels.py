"""Times what methods compute beside `residual += gradient` on arrays of the same size.

Of AdaComp, that is encoding and decoding; of ScaleCom, what the leader does before it broadcasts;
and of every method the whole step of one replica that has nobody to talk to: all but communication.

Gradients are a fixed mean from N(0, 0.02^2) with fresh noise from N(0, 0.3^2), and the residuals
are warmed up first: from an empty residual ten times as much is sent. All is timed in one run, in
turns, because memory bandwidth varies from minute to minute.
"""

import math
import os
import statistics
import time
from collections import defaultdict

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import numpy as np
import rich
import tensorflow as tf
from machine import processor
from rich.progress import track
from rich.table import Table

from tf_gradcomp import compressors, ops
from tf_gradcomp.compressors import ExchangeInputs
from tf_gradcomp.distribute.lockstep import exchange_in_lockstep, handles, new_state
from tf_gradcomp.policy import DENSE, GradientSpec

REPLICAS = 2
FLOOR = "r += g"


class AdaComp:
    """The residual of one tensor that is sent in bins of one size."""

    def __init__(self, elements, bin_size):
        self.residual = tf.Variable(tf.zeros(elements))
        self.layout = {"bin_sizes": [bin_size], "fingerprint": 0}
        self.payload = None

    def encode(self, gradient):
        """One step; what it sends stays in `payload`."""
        self.payload, _ = ops.adacomp_encode([self.residual], [gradient], 0, **self.layout)

    def decode(self, gradient):
        """As if all replicas had sent the same."""
        payloads = tf.stack([self.payload] * REPLICAS)
        ops.adacomp_decode(payloads, 0, shapes=[self.residual.shape], **self.layout)


class ScaleComLeader:
    """The leader's choice, with a residual that is left as it is."""

    def __init__(self, elements, rate):
        self._residual = tf.Variable(tf.random.normal([elements]))
        self._rate = rate

    def select(self, gradient):
        """What is done before the broadcast."""
        ops.chunk_select(ops.Chunked([self._residual], [gradient], [self._rate], [0]), lead=True)


class Adam:
    """A replica's second moment."""

    def __init__(self, elements):
        self._moment = tf.Variable(tf.zeros(elements))

    def divide(self, gradient):
        """What is done before a sparse method."""
        ops.precondition(ops.SecondMoments([self._moment], 1, 0.999, 1e-7), [gradient])


class WholeStep:
    """A method's step by one replica, on a square matrix."""

    def __init__(self, elements, compressor):
        side = math.isqrt(elements)
        specs = [GradientSpec("layer/kernel", (side, side), "float32", DENSE)]
        state = new_state(compressor, specs)
        self._step = 0

        @tf.function(autograph=False)
        def run(gradient, step):
            given = [tf.reshape(gradient[: side * side], [side, side])]
            inputs = ExchangeInputs(specs, given, handles(state), step, tf.constant(True), 0, 1)
            return exchange_in_lockstep(compressor, [inputs])[0].exchanged

        self._run = run

    def step(self, gradient):
        """Encode and decode, or what takes their place."""
        self._run(gradient, tf.constant(self._step, tf.int64))
        self._step += 1


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


def contenders(elements, methods):
    """What is timed, by label."""
    work = {}
    for bin_size in (50, 500):
        replica = AdaComp(elements, bin_size)
        work[f"AdaComp encode, bins of {bin_size}"] = replica.encode
        work[f"AdaComp decode of {REPLICAS}, bins of {bin_size}"] = replica.decode
    for rate in (50, 400):
        work[f"ScaleCom select, rate {rate}"] = ScaleComLeader(elements, rate).select
    work["Adam's preconditioning"] = Adam(elements).divide
    for name in methods:
        work[f"{name}, whole step"] = WholeStep(elements, compressors.get(name)).step
    return work


def measure(elements, work, warm_up, repeats):
    stopwatch = Stopwatch()
    accumulator = tf.Variable(tf.zeros(elements))
    array, ones = np.zeros(elements, np.float32), np.ones(elements, np.float32)
    for step, gradient in enumerate(gradients(elements, warm_up + repeats)):
        for label, run in work.items():
            if step < warm_up:
                run(gradient)
                continue
            # In turns, so that neither always finds what the other left in the cache.
            pair = [(FLOOR, add, accumulator), (label, run)]
            for name, do, *first in pair if step % 2 else reversed(pair):
                stopwatch.run(name, do, *first, gradient)
        if step >= warm_up:
            stopwatch.run("r += g in NumPy, one thread", np.add, array, ones, out=array)
    return stopwatch.times


def add(variable, value):
    tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=value)


def report(elements, times):
    floor = statistics.median(times[FLOOR])
    table = Table("", "ms", "min", "max", "ms per million elements", "x r += g")
    for label in [FLOOR, *(name for name in times if name != FLOOR)]:
        median = statistics.median(times[label])
        numbers = [median, min(times[label]), max(times[label]), 1e6 * median / elements]
        table.add_row(label, *[f"{number:.2f}" for number in numbers], f"{median / floor:.2f}")
    rich.print(table)


@click.command(help=__doc__)
@click.option("--elements", default=25_000_000, show_default=True)
@click.option("--methods", default=",".join(compressors.names()), show_default=True)
@click.option("--threads", default=os.cpu_count(), show_default=True)
@click.option("--repeats", default=21, show_default=True)
@click.option("--warm-up", default=100, show_default=True, help="Steps before measuring.")
def main(elements, methods, threads, repeats, warm_up):
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    work = contenders(elements, [name for name in methods.split(",") if name])
    times = measure(elements, work, warm_up, repeats)
    rich.print(
        f"{processor()}, {threads} threads, {ops.library_info().simd} kernels, "
        f"TensorFlow {tf.__version__}, {elements:,} elements, {repeats} repeats (medians)"
    )
    report(elements, times)


if __name__ == "__main__":
    main()
