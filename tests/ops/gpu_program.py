"""Compares ops on the device GPU:0 with those on the host.

python gpu_program.py LIBRARY PART...  # kernels, host, without_nvrtc, benchmark, exchange:METHODS
python gpu_program.py LIBRARY mixed  # one worker has the GPU

LIBRARY is that of an emulated GPU, or "real" where there is one. METHODS are on_gpu, one or copied.
"""

import collections
import ctypes
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import load_library

import tf_gradcomp as gc
from tests import test_exchange
from tests.replicas import copies, stepper
from tf_gradcomp import compressors, ops
from tf_gradcomp.adam.handover import InnerOptimizer, InnerState
from tf_gradcomp.adam.preconditioner import SECOND_MOMENT, Preconditioner
from tf_gradcomp.advice.probe import choose
from tf_gradcomp.compressors.base import RESIDUAL, StepInputs
from tf_gradcomp.compressors.stages import run_stage
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.replica import ReplicaStep
from tf_gradcomp.exchange.setup import Candidate, Method
from tf_gradcomp.exchange.state import handles, new_state
from tf_gradcomp.groups.communicator import communicate
from tf_gradcomp.groups.current import current_group
from tf_gradcomp.groups.lockstep import lockstep_communicators
from tf_gradcomp.ops import library
from tf_gradcomp.policy import DENSE, GradientSpec

KERNEL_NAMES = Path(__file__).parents[2] / "custom_ops" / "gpu" / "kernel_names.h"
BEGINS = "part begins:"
FINGERPRINT, STEP = 7, 3
SIZES, BIN_SIZES = [5003, 0, 700, 1, 9000, 33], [50, 500, 7, 50, 5000, 0]
CHUNK_SIZES = [50, 25, 25, 1, 5000, 25]
ENTRIES = [50, 0, 700, 1, 90, 0]
BITS = [4, 2, 0, 3, 5, 8]
SHAPES, RANKS = [[5003], [0], [100, 7], [1], [3, 30, 100], [11, 3]], [0, 0, 2, 0, 5, 0]
DTYPES = ["float32", "float16", "bfloat16"]
METHODS = {
    "on_gpu": [
        compressors.AdaComp(50),
        compressors.ScaleCom(rates=20, beta=0.5),
        compressors.ScaleCom(rates=20, value_bits=4),
        compressors.RandomK(density=0.1),
        compressors.TopK(density=0.05),
        compressors.QSGD(),
        compressors.SignSGD(),
        compressors.PowerSGD(rank=2),
        compressors.LGreCo("adacomp(bin_sizes=50)"),
    ],
    "one": [compressors.AdaComp(50)],
    "copied": [compressors.TopK(density=0.05, momentum=0.9)],  # except the second moments
}
IN_TURN = [
    compressors.AdaComp(50, warmup_steps=2),
    compressors.TopK(density=0.05, warmup_steps=2, warmup=compressors.AdaComp(20)),
]


def numbers(seed, scale=1.0):
    generator = np.random.default_rng(seed)
    return [generator.normal(scale=scale, size=size).astype("float32") for size in SIZES]


def same(first, second):
    """Tells whether all are equal to the bit, NaNs aside: a GPU's have other bits than a CPU's."""
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
        assert bits(a) == bits(b)


def bits(tensor):
    value = tensor.numpy()
    return np.where(np.isnan(value), value.dtype.type(0), value).tobytes()


class Replica:
    """Residuals and second moments on a device, and steps of the ops there."""

    def __init__(self, device):
        self.device = device
        with tf.device(device):
            self.residuals = [tf.Variable(value) for value in numbers(0)]
            self.moments = [tf.Variable(tf.fill(value.shape, 0.01)) for value in self.residuals]

    def encode(self, gradients, divides):
        moments = ops.SecondMoments(self.moments, 5, beta_2=0.999, epsilon=1e-7)
        with tf.device("GPU:0"):  # as in a replica; variables may be elsewhere
            return ops.adacomp_encode(
                self.residuals,
                gradients,
                STEP,
                bin_sizes=BIN_SIZES,
                fingerprint=FINGERPRINT,
                second_moments=moments if divides else None,
            )

    def put_back(self, payload):
        with tf.device("GPU:0"):
            ops.adacomp_put_back(
                self.residuals, payload, bin_sizes=BIN_SIZES, fingerprint=FINGERPRINT
            )


def decode(device, payloads):
    with tf.device(device):
        return ops.adacomp_decode(
            payloads,
            STEP,
            shapes=[[size] for size in SIZES],
            bin_sizes=BIN_SIZES,
            fingerprint=FINGERPRINT,
        )


def compare_steps(wrap, dtype, divides):
    on_gpu, on_host = Replica("GPU:0"), Replica("CPU:0")
    assert all("GPU:0" in variable.device for variable in on_gpu.residuals)
    for step in range(2):
        gradients = [tf.cast(value, dtype) for value in numbers(1 + step, 0.3)]
        shared = on_gpu.residuals[0].read_value()  # of which the op must not write the buffer
        before = on_host.residuals[0].numpy()
        sent = [
            wrap(lambda replica=replica: replica.encode(gradients, divides))()  # noqa: B023
            for replica in (on_gpu, on_host)
        ]
        same(*sent)
        assert shared.numpy().tobytes() == before.tobytes()
        same(on_gpu.residuals, on_host.residuals)
        same(on_gpu.moments, on_host.moments)
        payloads = tf.stack([sent[0][0]] * 3)
        (sums, finite), (expected, _) = (
            wrap(lambda device=device: decode(device, payloads))()  # noqa: B023
            for device in ("GPU:0", "CPU:0")
        )
        assert finite.numpy()
        same(sums, expected)
        for replica in (on_gpu, on_host):
            wrap(lambda replica=replica: replica.put_back(sent[0][0]))()  # noqa: B023
        same(on_gpu.residuals, on_host.residuals)


def compare_not_finite():
    on_gpu, on_host = Replica("GPU:0"), Replica("CPU:0")
    gradients = numbers(1)
    gradients[4][8000] = np.inf
    payload, lengths = on_gpu.encode(gradients, False)
    same((payload, lengths), on_host.encode(gradients, False))
    assert payload.shape == [14]
    for after, before in zip(on_gpu.residuals, numbers(0), strict=True):
        np.testing.assert_array_equal(after.numpy(), before)
    sums, finite = decode("GPU:0", payload[tf.newaxis])
    assert not finite.numpy()
    assert not any(total.numpy().any() for total in sums)
    on_gpu.put_back(payload)


def compare_errors():
    payload, _ = Replica("GPU:0").encode(numbers(1), False)
    broken = payload.numpy()
    broken[20] ^= 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="payload of replica 0: the checksum"):
        decode("GPU:0", broken[np.newaxis])


def divide(device, moments, gradients, with_squares):
    squares = [tf.abs(gradient) if i % 2 else None for i, gradient in enumerate(numbers(8))]
    with tf.device(device):
        given = ops.SecondMoments(moments, 5, 0.999, 1e-7, 2.0, (), squares if with_squares else ())
        return ops.precondition(given, gradients)


def compare_divided(wrap, dtype):
    moments = {}
    for device in ("GPU:0", "CPU:0"):
        with tf.device(device):
            moments[device] = [tf.Variable(tf.fill([size], 0.01)) for size in SIZES]
    for bad in (1.0, np.nan):
        gradients = numbers(1, 0.3)
        gradients[4][8000] *= bad
        gradients = [tf.cast(value, dtype) for value in gradients]
        shared = moments["GPU:0"][0].read_value()
        before = shared.numpy()
        divided = [
            wrap(lambda device=device: divide(device, moments[device], gradients, bad == 1))()  # noqa: B023
            for device in moments
        ]
        same(*divided)
        same(*moments.values())
        assert shared.numpy().tobytes() == before.tobytes()
        assert np.isnan(divided[0][0].numpy()).all() == np.isnan(bad)


def compare_fixed(wrap, dtype, method, layout, **to_encode):
    encode, decode, put_back = (
        getattr(ops, f"{method}_{what}") for what in ("encode", "decode", "put_back")
    )
    residuals = {}
    for device in ("GPU:0", "CPU:0"):
        with tf.device(device):
            residuals[device] = [tf.Variable(value) for value in numbers(0)]
    for largest in (1, 3e37, 1e38, np.inf):  # nine of which are finite, may be, are not
        gradients = numbers(1, 0.3)
        gradients[4][8000] = largest
        gradients = [tf.cast(value, dtype) for value in gradients]
        shared = residuals["GPU:0"][0].read_value()
        before = shared.numpy()

        def encode_on(device, gradients=gradients):
            with tf.device("GPU:0"):
                return encode(residuals[device], gradients, STEP, **layout, **to_encode)

        def decode_and_put_back(device, payload):
            with tf.device(device):
                shapes = [[size] for size in SIZES]
                rows = tf.stack([payload] * 9)
                reduced, finite = decode(rows, STEP, shapes=shapes, **layout)
            with tf.device("GPU:0"):
                put_back(residuals[device], payload, **layout)
            return [*reduced, finite]

        sent = [wrap(lambda device=device: encode_on(device))() for device in residuals]
        same(*sent)
        same(*residuals.values())
        assert shared.numpy().tobytes() == before.tobytes()
        same(
            *[
                wrap(lambda device=device: decode_and_put_back(device, sent[0][0]))()  # noqa: B023
                for device in residuals
            ]
        )
        same(*residuals.values())


def compare_all_fixed(wrap, dtype):
    same_job = {"fingerprint": FINGERPRINT}
    compare_fixed(wrap, dtype, "top_k", {"entries": ENTRIES, **same_job})
    levels = {"bits": BITS, "bucket_size": 96, **same_job}
    compare_fixed(wrap, dtype, "qsgd", levels, replica=2)
    compare_fixed(wrap, dtype, "sign_sgd", same_job)


def step_in_chunks(residuals, gradients, lead, local_finite, with_rests):
    """Runs the ops for chunks as in a step."""
    chunked = ops.Chunked(residuals, gradients, CHUNK_SIZES)
    selected, finite = ops.chunk_select(chunked, lead)
    offsets = selected if lead else ops.chunk_draw(chunked, STEP)
    split = ops.chunk_split(chunked)
    values = ops.chunk_take(chunked, offsets, local_finite)
    rests = values[:-1] / 4 if with_rests else None
    reduced, taken = ops.chunk_apply(
        chunked, offsets, values, local_finite, finite, rests=rests, filter=0.3
    )
    return [offsets, finite, *split, values, *reduced, taken]


def compare_chunks(wrap, dtype):
    residuals = {}
    for device in ("GPU:0", "CPU:0"):
        with tf.device(device):
            residuals[device] = [tf.Variable(value) for value in numbers(0)]
    for lead, bad in ((True, 1), (False, 1), (True, np.nan)):
        gradients = numbers(1, 0.3)
        gradients[4][8000] *= bad
        gradients = [tf.cast(value, dtype) for value in gradients]
        shared = residuals["GPU:0"][0].read_value()
        before = shared.numpy()

        def step(device, lead=lead, gradients=gradients, finite=bad == 1):
            with tf.device("GPU:0"):
                return step_in_chunks(residuals[device], gradients, lead, finite, not lead)

        done = [wrap(lambda device=device: step(device))() for device in residuals]
        same(*done)
        assert done[0][-1].numpy() == (bad == 1)
        same(*residuals.values())
        assert shared.numpy().tobytes() == before.tobytes()


def matrices(seed, scale=1.0):
    return [value.reshape(shape) for value, shape in zip(numbers(seed, scale), SHAPES, strict=True)]


def step_by_factors(variables, gradients, by_others, keep):
    """Runs PowerSGD's ops as in a step, with sums of what others send."""
    residuals, factors = variables
    left, finite = ops.power_sgd_left(residuals, gradients, factors, STEP, ranks=RANKS)
    sent, right, summed = ops.power_sgd_right(residuals, gradients, left * by_others, ranks=RANKS)
    reduced, all_finite = ops.power_sgd_reduce(
        residuals,
        gradients,
        factors,
        sent,
        right,
        right * 2,
        keep=keep,
        finite=summed,
        ranks=RANKS,
    )
    return [left, finite, sent, right, summed, *reduced, all_finite]


def compare_factors(wrap, dtype):
    variables = {}
    for device in ("GPU:0", "CPU:0"):
        with tf.device(device):
            residuals = [tf.Variable(value) for value in matrices(0)]
            factor_shapes = [
                [shape[-1], rank + 1] if rank else [0]
                for shape, rank in zip(SHAPES, RANKS, strict=True)
            ]
            variables[device] = residuals, [tf.Variable(tf.zeros(shape)) for shape in factor_shapes]
    # As many as all are; too large only as a sum; too large as a product; not finite.
    for bad, by_others in ((1.0, 2.0), (1.0, 1e38), (1e38, 1.0), (np.nan, 1.0), (1.0, 1.0)):
        gradients = matrices(1, 0.3)
        gradients[4][2, 20, 0] *= bad
        gradients = [tf.cast(value, dtype) for value in gradients]
        shared = variables["GPU:0"][0][0].read_value()
        before = shared.numpy()

        def step(device, gradients=gradients, by_others=by_others, keep=bad == bad):
            with tf.device("GPU:0"):
                return step_by_factors(variables[device], gradients, by_others, keep)

        same(*[wrap(lambda device=device: step(device))() for device in variables])
        for on_gpu, on_host in zip(*variables.values(), strict=True):
            same(on_gpu, on_host)
        assert shared.numpy().tobytes() == before.tobytes()


def encode_without_memory(fake):
    """A payload that finds no memory on the host is taken back."""
    values = tf.random.stateless_normal([600_000], [1, 2])
    with tf.device("GPU:0"):
        residual = tf.Variable(values)
        gradient = tf.identity(values / 2)
    before = residual.numpy()
    fake.fake_gpu_fill_host()
    with tf.device("GPU:0"), pytest.raises(tf.errors.ResourceExhaustedError):
        ops.adacomp_encode([residual], [gradient], STEP, bin_sizes=[0], fingerprint=FINGERPRINT)
    np.testing.assert_allclose(residual.numpy(), before, atol=1e-6)


def compare_turns(wrap, compressor):
    """A method and its warm-up, which begins with the state of a step of the other."""
    specs = [GradientSpec(f"v{i}", (size,), "float32", DENSE) for i, size in enumerate(SIZES)]
    after = []
    for device in ("GPU:0", "CPU:0"):
        with tf.device(device):
            states = [new_state(compressor, specs) for _ in range(2)]

        def step(number, gradients, states=states, device=device):
            with tf.device(device):
                replicas = [
                    ReplicaStep.new(
                        StepInputs(specs, gradients[rank], handles(state), number, True, rank, 2)
                    )
                    for rank, state in enumerate(states)
                ]

                def exchange(method):
                    reductions = [replica.reduce_by(method) for replica in replicas]
                    return communicate(reductions, lockstep_communicators(2))[0][0].reduced

                return run_stage(compressor, replicas[0].inputs, exchange)

        turns = wrap(step)
        reduced = []
        for number in (2, 3, 1, 0, 2):
            gradients = [numbers(10 + number), numbers(20 + number, 0.5)]
            reduced += turns(tf.constant(number, tf.int64), gradients).gradients
        residuals = [one for state in states for one in state[RESIDUAL]]
        assert all(device in residual.device for residual in residuals)
        after.append([*reduced, *residuals])
    same(*after)


def compare(*cases):
    for wrap, dtype, divides in cases:
        compare_steps(wrap, dtype, divides)
        compare_divided(wrap, dtype)
        compare_chunks(wrap, dtype)
        compare_all_fixed(wrap, dtype)
        compare_factors(wrap, dtype)
    compare_not_finite()
    compare_errors()


def eager(function):
    return function


class Dividing(test_exchange.Exchanging):
    """An exchange of gradients that are divided by the roots of their second moments."""

    def __init__(self, compressor):
        super().__init__(compressor=compressor)
        with tf.device("CPU:0"):
            self.inner = [tf.Variable(tf.zeros(variable.shape)) for variable in self.variables]

    def reduce(self, gradients):
        inner = InnerState(tf.constant(3, tf.int64), {SECOND_MOMENT: self.inner}, self.inner)
        communicator = current_group().communicator()
        self.reduced[communicator.local_replica], self.finite, *_ = self.exchange.reduce(
            gradients, self.variables, InnerOptimizer(lambda _: inner, lambda given, _: given)
        )


def exchange(gradients, devices, compressor, graphs=(True, False)):
    """The reduced gradients of all steps, and the state after them.

    The steps are traced or not, in turns.
    """
    test_exchange.mirrored = lambda _: tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    adam = Preconditioner(0.999, 1e-7)
    test_exchange.exchange_by = lambda method, policy: GradientExchange(
        Method(repr(method), [Candidate(method, adam)], choose, adam), policy
    )
    exchanging = Dividing(compressor=compressor)
    steppers = [stepper(exchanging.strategy, exchanging.reduce, graph=graph) for graph in graphs]
    reduced = []
    for index, step in enumerate(gradients):
        graph = graphs[index % len(graphs)]
        steppers[index % len(graphs)](step)
        reduced += [] if graph else exchanging.reduced[0] + exchanging.reduced[1]
    state = [variable for all_coded in exchanging.exchange.state.values() for variable in all_coded]
    return [value.numpy() for value in reduced] + [copies(exchanging.strategy, s) for s in state]


def compare_exchange(methods):
    generator = np.random.default_rng(0)
    gradients = [
        [[generator.normal(size=s).astype("float32") for s in ((20, 30), (30,))] for _ in range(2)]
        for _ in range(4)
    ]
    gradients[2][1][0][3, 3] = np.nan
    for index, compressor in enumerate(METHODS[methods]):
        graphs = (True, False) if index == 0 else (False,)  # tracing takes most of the time
        pairs = zip(
            exchange(gradients, ["GPU:0", "CPU:0"], compressor, graphs),
            exchange(gradients, ["CPU:0", "CPU:1"], compressor, graphs),
            strict=True,
        )
        for ours, theirs in pairs:
            np.testing.assert_array_equal(ours, theirs)


def run_benchmark(path):
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import gpu_kernels

    bare = gpu_kernels.Gpu(path)
    gpu_kernels.check(bare, (1, 4099))
    gpu_kernels.check(bare, (70001,), [gpu_kernels.ADACOMP])  # of several blocks
    gpu_kernels.REPEATS = 1
    gpu_kernels.BYTES_IN_FRONT = 1 << 12  # no cache to fill
    gpu_kernels.measure(bare, [5000])


def start_where_one_has_a_gpu(path):
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
        load_fake(path)
    gc.MultiWorkerMirroredStrategy()


def fail_for_two_reasons(path):
    """Runs an op on a GPU whose context cannot be had, for one reason and then for another."""
    load_fake(path)
    for fault in ("no_contexts", "no_memory_for_contexts"):
        os.environ["GRADCOMP_FAKE_GPU"] = fault
        Replica("GPU:0").encode(numbers(1), divides=False)


def load_fake(path):
    load_library.load_pluggable_device_library(path)
    return ctypes.CDLL(path)


def launches(fake):
    if not fake:
        return collections.Counter()
    names = re.findall(r"KERNEL\((gradcomp_\w+)\)", KERNEL_NAMES.read_text())
    return collections.Counter({name: fake.fake_gpu_launches(name.encode()) for name in names})


def main():
    path, *parts = sys.argv[1:]
    if parts == ["mixed"]:
        return start_where_one_has_a_gpu(path)
    if parts == ["contexts"]:
        return fail_for_two_reasons(path)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    fake = None if path == "real" else load_fake(path)
    if parts == ["without_nvrtc"]:
        ctypes.CDLL(str(library.PATH)).tf_gradcomp_set_nvrtc(b"")  # as before it is told
        library._NVRTC_PACKAGE = "nothing.of.this.name"
        library._set_nvrtc_path()
    error = library.gpu_info(0).error  # with the first call, the check
    if path == "real" and os.environ.get("GRADCOMP_GPU") != "0":
        assert not error, error  # otherwise all is done on the host, and equal
    seen = {}  # how often each part launched each kernel
    for part in parts:
        before = launches(fake)
        for stream in (sys.stdout, sys.stderr):
            print(BEGINS, part, file=stream, flush=True)
        run_part(part, path, fake)
        seen[part] = dict(launches(fake) - before)
    with open(os.environ["RESULT_PATH"] + ".json", "w") as file:
        json.dump({"error": error, "launches": seen}, file)


def run_part(part, path, fake):
    name, _, methods = part.partition(":")
    if name == "kernels":
        cases = [(eager, dtype, dtype != "float16") for dtype in DTYPES]
        compare(*cases, (tf.function, "float32", True))
        for wrap, compressor in zip((eager, tf.function), IN_TURN, strict=True):
            compare_turns(wrap, compressor)
        if fake:
            encode_without_memory(fake)
    elif name == "exchange":
        compare_exchange(methods)
    elif name == "benchmark":
        run_benchmark(path)
    else:
        compare((eager, "float16", True))


main()
