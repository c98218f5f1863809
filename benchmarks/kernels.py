"""Times the computation of methods relative to `residual += gradient` on arrays of the same size.

For AdaComp, encoding and decoding are timed; for ScaleCom, the leader's work before its broadcast.
For every method, the whole step of a single replica is timed: everything except communication.

Gradients are a fixed mean from N(0, 0.02^2) with fresh noise from N(0, 0.3^2), and the residuals
are warmed up first: from an empty residual ten times as much is sent. All is timed in one run, in
turns, because memory bandwidth varies from minute to minute, and once for each setting of malloc.

With --check, kernels are compared with ratios that --record wrote for the same processor and
instruction set. This check runs on one thread and counts the processor's time, which other programs
disturb least. Kernels are also timed relative to a product of matrices, because machines with the
same processor differ in their memory's speed. A kernel is too slow only if both ratios are too
large.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import rich
import tensorflow as tf
from output import print_table, processor
from placed import SETTINGS, malloc_option
from rich.progress import track
from rich.table import Table
from turns import Used

from tf_gradcomp import compressors, ops
from tf_gradcomp.compressors import StepInputs
from tf_gradcomp.compressors.base import start
from tf_gradcomp.exchange.state import handles, new_state
from tf_gradcomp.groups.communicator import RequestStream, communicate
from tf_gradcomp.groups.lockstep import lockstep_communicators
from tf_gradcomp.ops import library
from tf_gradcomp.policy import DENSE, GradientSpec

UNDER = "BENCHMARK_MALLOC"  # the setting of malloc that this process has
REPLICAS = 2
FLOOR = "r += g"
SIDE = 512  # of the matrices in the floor that memory does not bound
ELEMENTS = 10_000_000  # where ratios are recorded or checked: far more than a cache holds
WARM_UP, REPEATS = 20, 15  # likewise
MORE_TRIES = 4
FILE = Path(__file__).with_name("kernel_ratios.json")
TOLERANCE = 2  # times as long as recorded: noise is far below it, and a scalar loop is above it


class Handover:
    """Hands gradients to a graph as a backward pass does: nothing else uses their memory."""

    def __init__(self, shape):
        self._shape = shape
        # A queue could still hold the gradient while the next ops run.
        self._area = {"dtypes": [tf.float32], "shared_name": f"handover_{id(self)}"}

    @tf.function(autograph=False)
    def give(self, gradient):
        """Copies a gradient for the next step; an array may have more elements than the shape."""
        part = tf.reshape(gradient[: math.prod(self._shape)], self._shape)
        tf.raw_ops.Stage(
            values=[tf.raw_ops.DeepCopy(x=part)], shared_name=self._area["shared_name"]
        )

    def take(self):
        """Returns the gradient, in the graph of the step."""
        (gradient,) = tf.raw_ops.Unstage(**self._area)
        return tf.ensure_shape(gradient, self._shape)


class AdaComp:
    """The residual of one tensor that is sent in bins of one size, and its second moment."""

    def __init__(self, elements, bin_size):
        self.handover = Handover([elements])
        self.residual = tf.Variable(tf.zeros(elements))
        self._moment = tf.Variable(tf.zeros(elements))
        self._step = 0
        self.layout = {"bin_sizes": tf.constant([bin_size], tf.int64), "fingerprint": 0}
        self.payload = None

    def encode(self, _gradient):
        """Encodes the gradient that was handed over into `payload`."""
        self.payload, _ = self._encode()

    @tf.function(autograph=False)
    def _encode(self):
        return ops.adacomp_encode([self.residual], [self.handover.take()], 0, **self.layout)

    def encode_in_use(self, gradient):
        """Encodes a gradient whose memory is still in use."""
        self.payload, _ = ops.adacomp_encode([self.residual], [gradient], 0, **self.layout)

    def divide_and_encode(self, gradient):
        """Encodes the gradient of one step, divided by Adam's second moment."""
        self._step += 1
        moments = second_moments(self._moment, self._step)
        ops.adacomp_encode([self.residual], [gradient], 0, second_moments=moments, **self.layout)

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
        """Selects the leader's entries, as a step does before the broadcast."""
        ops.chunk_select(ops.Chunked([self._residual], [gradient], [self._rate]), lead=True)


class Adam:
    """A replica's second moment."""

    def __init__(self, elements):
        self._moment = tf.Variable(tf.zeros(elements))

    def divide(self, gradient):
        """Divides the gradient, as a step does before a sparse method compresses it."""
        ops.precondition(second_moments(self._moment, 1), [gradient])


def second_moments(variable, step):
    return ops.SecondMoments([variable], step, beta_2=0.999, epsilon=1e-7)


class Work(NamedTuple):
    """Work to time on a gradient, and what prepares it, which is not timed."""

    run: Callable[[tf.Tensor], object]
    prepare: Callable[[tf.Tensor], object] = lambda gradient: None


class WholeStep:
    """A method's step by one replica, on a square matrix.

    As after a backward pass, nothing else uses the gradient's memory.
    """

    def __init__(self, elements, compressor):
        side = math.isqrt(elements)
        specs = [GradientSpec("layer/kernel", (side, side), "float32", DENSE)]
        state = new_state(compressor, specs)
        self._step = 0
        self.handover = Handover((side, side))

        @tf.function(autograph=False)
        def run(step):
            gradients = [self.handover.take()]
            inputs = StepInputs(specs, gradients, handles(state), step, tf.constant(True), 0, 1)
            streams = [RequestStream(start(compressor, inputs))]
            results, _ = communicate(streams, lockstep_communicators(1))
            return results[0]

        self._run = run

    def step(self, _gradient):
        """Encode and decode, or what takes their place."""
        self._run(tf.constant(self._step, tf.int64))
        self._step += 1


class Stopwatch:
    """Milliseconds and page faults of each run, by name."""

    def __init__(self, clock):
        self._clock = clock
        self.times = defaultdict(list)
        self.page_faults = defaultdict(list)

    def run(self, name, work, *arguments, **options):
        """Does the work and notes how long it took."""
        before, start = Used.now(), self._clock()
        work(*arguments, **options)
        self.times[name].append(1e3 * (self._clock() - start))
        self.page_faults[name].append(Used.now().since(before).page_faults)


def gradients(elements, count):
    mean = tf.random.normal([elements], stddev=0.02)
    for _ in track(range(count), "warming up, then measuring"):
        yield mean + tf.random.normal([elements], stddev=0.3)


def contenders(elements, methods):
    """Returns the work to time, by label."""
    work = {}
    for bin_size in (50, 500):
        replica = AdaComp(elements, bin_size)
        work[f"AdaComp encode, bins of {bin_size}"] = Work(replica.encode, replica.handover.give)
        work[f"AdaComp decode of {REPLICAS}, bins of {bin_size}"] = Work(replica.decode)
        in_use = AdaComp(elements, bin_size)
        work[f"AdaComp encode in use, bins of {bin_size}"] = Work(in_use.encode_in_use)
        dividing = AdaComp(elements, bin_size)
        work[f"AdaComp divide and encode, bins of {bin_size}"] = Work(dividing.divide_and_encode)
    for rate in (50, 400):
        work[f"ScaleCom select, rate {rate}"] = Work(ScaleComLeader(elements, rate).select)
    work["Adam's preconditioning"] = Work(Adam(elements).divide)
    for name in methods:
        whole_step = WholeStep(elements, compressors.get(name))
        work[f"{name}, whole step"] = Work(whole_step.step, whole_step.handover.give)
    return work


def warm_up(work, stream, steps):
    """All of it: what decodes needs what another one encoded from a residual that is warm."""
    for gradient in itertools.islice(stream, steps):
        for job in work.values():
            job.prepare(gradient)
            job.run(gradient)


def measure(work, floors, stream, clock=time.perf_counter):
    """Returns a stopwatch of all work and one of each floor, all by the labels of the work."""
    stopwatch, *floor_stopwatches = [Stopwatch(clock) for _ in range(1 + len(floors))]
    for step, gradient in enumerate(stream):
        for label, job in work.items():
            job.prepare(gradient)
            # The order alternates, so that neither always finds the other's data in the cache.
            order = [*zip(floor_stopwatches, floors, strict=True), (stopwatch, job.run)]
            for watch, do in order if step % 2 else reversed(order):
                watch.run(label, do, gradient)
    return stopwatch, *floor_stopwatches


def addition(elements):
    """The floor: `r += g`."""
    accumulator = tf.Variable(tf.zeros(elements))
    return lambda gradient: tf.raw_ops.AssignAddVariableOp(
        resource=accumulator.handle, value=gradient
    )


def product():
    """A floor that stays in the cache: a product of matrices."""
    matrix = tf.random.normal([SIDE, SIDE])
    return lambda gradient: tf.linalg.matmul(matrix, matrix)


def report(elements, stopwatch, floor_stopwatch):
    floor_times = [ms for samples in floor_stopwatch.times.values() for ms in samples]
    floor_faults = [
        faults for samples in floor_stopwatch.page_faults.values() for faults in samples
    ]
    floor = statistics.median(floor_times)
    table = Table("", "ms", "min", "max", "ms per million elements", "x r += g", "page faults")
    all_faults = {FLOOR: floor_faults, **stopwatch.page_faults}
    for label, times in {FLOOR: floor_times, **stopwatch.times}.items():
        median = statistics.median(times)
        cells = [median, min(times), max(times), 1e6 * median / elements, median / floor]
        faults = f"{statistics.median(all_faults[label]):,.0f}"
        table.add_row(label, *[f"{cell:.2f}" for cell in cells], faults)
    print_table(table)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The record of one processor.

    Attributes:
        processor: The processor, and the instruction set that the kernels use.
        ratios: The least time of each kernel by label, relative to `r += g` and relative to a
            product of matrices.
    """

    processor: str
    ratios: Mapping[str, Sequence[float]]

    @classmethod
    def read(cls, processor: str, file: Path = FILE) -> Recorded | None:
        """Reads the record of a processor; returns None if there is no record."""
        ratios_by_processor = json.loads(file.read_text()) if file.exists() else {}
        return (
            cls(processor, ratios_by_processor[processor])
            if processor in ratios_by_processor
            else None
        )

    def write(self, file: Path = FILE) -> None:
        """Replaces the record of the same processor."""
        ratios_by_processor = json.loads(file.read_text()) if file.exists() else {}
        ratios_by_processor[self.processor] = {
            label: [round(ratio, 2) for ratio in ratios] for label, ratios in self.ratios.items()
        }
        file.write_text(json.dumps(ratios_by_processor, indent=2, sort_keys=True) + "\n")


def slower(measured: Mapping[str, Sequence[float]], recorded: Recorded) -> dict[str, str]:
    """Yields a sentence on each kernel that is too slow relative to both floors."""
    sentences = {}
    for label, now in measured.items():
        before = recorded.ratios.get(label, now)
        if all(ratio > TOLERANCE * limit for ratio, limit in zip(now, before, strict=True)):
            sentences[label] = (
                f"{label}: {_both(now)}, and {_both(before)} when recorded "
                f"({recorded.processor}); expected at most {TOLERANCE} times one of them. Find "
                "what slows it, or record the new speed: python benchmarks/kernels.py --record"
            )
    return sentences


def _both(ratios: Sequence[float]) -> str:
    addition, product = ratios
    return f"{addition:.2f} times as long as r += g, {product:.2f} as a product of matrices"


def not_recorded(measured: Mapping[str, Sequence[float]], recorded: Recorded) -> list[str]:
    """Yields a sentence on each kernel that has no record."""
    return [
        f"{label}: not recorded yet, so not checked: python benchmarks/kernels.py --record"
        for label in measured
        if label not in recorded.ratios
    ]


# L-GreCo is the step of another method, and a sum; LGC begins with another, and has a state that
# only a job keeps.
_NOT_TIMED = (compressors.Auto.name, compressors.LGreCo.name, compressors.LGC.name)
METHODS = [name for name in compressors.names() if name not in _NOT_TIMED]


def ratios(labels=None):
    """Returns the least time of all kernels, or of some, divided by the least time of each floor.

    Each call allocates new arrays, because the speed of reading also depends on an array's pages.
    """
    all_work = contenders(ELEMENTS, methods=[])
    stream = gradients(ELEMENTS, WARM_UP + REPEATS)
    warm_up(all_work, stream, WARM_UP)
    work = {label: all_work[label] for label in labels or all_work}
    floors = [addition(ELEMENTS), product()]
    stopwatch, *floor_stopwatches = measure(work, floors, stream, time.process_time)
    return {
        label: [
            min(stopwatch.times[label]) / min(floor.times[label]) for floor in floor_stopwatches
        ]
        for label in work
    }


def record():
    """Records the ratios of each instruction set that the kernels can be limited to here."""
    measured = lesser(ratios(), ratios())
    Recorded(used_processor(), measured).write()
    print(f"Recorded {used_processor()}.", flush=True)
    if "GRADCOMP_SIMD" in os.environ:
        return
    for limit in filter(None, library.SIMD_LIMITS):
        environment = {**os.environ, "GRADCOMP_SIMD": limit}
        subprocess.run([sys.executable, __file__, "--record"], env=environment, check=True)


def lesser(measured, again):
    """Returns the lesser ratios of two measurements; the second may lack some kernels."""
    paired = {label: zip(measured[label], ratios, strict=True) for label, ratios in again.items()}
    return measured | {label: [min(pair) for pair in pairs] for label, pairs in paired.items()}


def used_processor():
    """Returns the processor, and the instruction set that the kernels use."""
    return f"{processor()}, {ops.library_info().simd}"


def variants():
    """Returns the instruction sets that the kernels use."""
    simd = ops.library_info().simd
    return f"{simd} (AdaComp's encoder) and AVX2 (all other)" if simd == "AVX-512" else simd


def check():
    """Ends the program with an error if a kernel is slower than it was."""
    recorded = Recorded.read(used_processor())
    if recorded is None:
        print(f"No speed is recorded for {used_processor()}: there is nothing to compare with.")
        return
    measured = ratios()
    for sentence in not_recorded(measured, recorded):
        print(sentence)
    for _ in range(MORE_TRIES):
        slow = slower(measured, recorded)
        if not slow:
            break
        print(f"Measuring again, for it may be noise: {', '.join(slow)}", flush=True)
        measured = lesser(measured, ratios(slow))
    slow = slower(measured, recorded)
    if slow:
        sys.exit("\n".join(slow.values()))
    print(f"No kernel is far slower than recorded for {recorded.processor}.")


def measure_under_each(mallocs):
    """Runs this program once for each setting of malloc."""
    for name in mallocs:
        env = {**os.environ, **SETTINGS[name], UNDER: name}
        subprocess.run([sys.executable, *sys.argv], env=env, check=True)


@click.command(help=__doc__)
@click.option("--elements", default=25_000_000, show_default=True)
@click.option("--methods", default=",".join(METHODS), show_default=True)
@click.option("--threads", default=os.cpu_count(), show_default=True)
@click.option("--repeats", default=21, show_default=True)
@click.option("--warm-up", "warm_up_steps", default=100, show_default=True, help="Steps before.")
@click.option("--record", "mode", flag_value="record", help="Record this processor's ratios.")
@click.option("--check", "mode", flag_value="check", help="Compare ratios with the recorded ones.")
@malloc_option
def main(elements, methods, threads, repeats, warm_up_steps, mode, mallocs):
    tf.config.threading.set_intra_op_parallelism_threads(1 if mode else threads)
    library.load()  # fails now if the library is broken
    if mode:
        return record() if mode == "record" else check()
    if UNDER not in os.environ:
        return measure_under_each(mallocs)
    work = contenders(elements, [name for name in methods.split(",") if name])
    stream = gradients(elements, warm_up_steps + repeats)
    warm_up(work, stream, warm_up_steps)
    stopwatches = measure(work, [addition(elements)], stream)
    rich.print(
        f"{processor()}, {threads} threads, {variants()} kernels, "
        f"malloc {os.environ[UNDER]}, TensorFlow {tf.__version__}, "
        f"{elements:,} elements, {repeats} repeats (medians)"
    )
    report(elements, *stopwatches)


if __name__ == "__main__":
    main()
