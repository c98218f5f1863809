"""Tests the measurements of a job's methods and collectives."""

import importlib
import itertools
import math
import types

import keras
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.replicas import collective, mirrored
from tests.workers import run_workers
from tf_gradcomp import compressors
from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.advice import codec_speed
from tf_gradcomp.advice.codec_speed import Sample
from tf_gradcomp.advice.cost_model import Kind
from tf_gradcomp.advice.probe import QUICK, Collectives, Timed, probe, trains_like_dense
from tf_gradcomp.exchange.setup import Candidate
from tf_gradcomp.groups.current import current_group
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.policy import LayerPolicy

advise_module = importlib.import_module(
    "tf_gradcomp.keras.common.advice"
)  # as the function is called

SHAPES = {"dense/kernel": (300, 400), "dense/bias": (400,), "conv/kernel": (3, 3, 16, 64)}
SPECS = [LayerPolicy().spec(path, shape, "float32") for path, shape in SHAPES.items()]
ELEMENTS = sum(spec.elements for spec in SPECS)
ADAM = Preconditioner(0.999, 1e-7)


def work(name, preconditioner=None, most=ELEMENTS):
    return work_of(compressors.get(name), SPECS, most, preconditioner)


def work_of(method, specs, most, preconditioner=None):
    return Sample(specs, [method], 0, 2, most).work(method, preconditioner, list)


def test_requests_come_from_the_method():
    kinds = {
        name: [kind for kind, _ in work(name).requests]
        for name in ("cast", "scalecom", "qsgd", "lgc")
    }
    assert kinds == {
        "cast": [Kind("AllReduce", "float16")],
        "scalecom": [Kind("Broadcast", "int32"), Kind("AllReduce", "float32")],
        "qsgd": [Kind("AllGather", "int32", same_length=True)],
        # LGC uses its autoencoder, as in most of a long job; its fallback gathers.
        "lgc": [Kind("Broadcast", "int32"), Kind("AllReduce", "float32")],
    }


@pytest.mark.parametrize("most", [ELEMENTS, 30_000])
def test_bytes_count_the_whole_model(most):
    dense = work("no_compression", most=most)
    assert dense.payload_bytes == pytest.approx(4 * ELEMENTS, rel=1e-3)  # and a tag
    assert dense.requests[0].sent_bytes == pytest.approx(4 * ELEMENTS, rel=1e-3)  # of two workers
    assert work("cast", most=most).payload_bytes == pytest.approx(2 * ELEMENTS, rel=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        "power_sgd",
        "power_sgd(rank=1)",
        "power_sgd(alternate=True)",
        "lgreco(method='power_sgd')",
    ],
)
@pytest.mark.parametrize("most", [10**6, 30_000])
def test_bytes_determined_by_shapes_use_the_models_shapes(name, most):
    shapes = [(300, 400), (300, 400), (300, 400), (64, 10), (64, 10), (2000, 30), (3, 3, 16, 64)]
    specs = [LayerPolicy().spec(f"{i}", shape, "float32") for i, shape in enumerate(shapes)]
    work = work_of(compressors.get(name), specs, most)
    rank = 1 if "1" in name else 4
    rows = [(math.prod(shape[:-1]), shape[-1]) for shape in shapes]
    sent = 0.5 if "alternate" in name else 1.0
    tensor_bytes = [
        (sent * rank * (n + m) if rank * (n + m) < n * m / 2 else n * m) for n, m in rows
    ]
    assert work.payload_bytes == pytest.approx(4 * sum(tensor_bytes), rel=5e-3)
    assert sum(sent for _, sent in work.requests) == pytest.approx(4 * sum(tensor_bytes), rel=5e-3)


@pytest.mark.parametrize("preconditioner", [None, ADAM], ids=["", "preconditioned"])
def test_a_residual_is_as_after_many_steps(monkeypatch, preconditioner):
    soon = work("adacomp", preconditioner).payload_bytes
    monkeypatch.setattr(codec_speed, "_WARM_UP", 150)
    late = work("adacomp", preconditioner).payload_bytes
    assert 0.7 < soon / late < 1.4


@pytest.mark.parametrize(
    ("name", "preconditioner", "like_dense"),
    [
        ("cast", None, True),
        ("adacomp", ADAM, True),
        ("adacomp", None, None),  # with Adam it is behind without, and others were hardly measured
        ("adacomp(bin_sizes=2000)", ADAM, None),
        ("scalecom", ADAM, False),
        ("random_k", None, False),
        ("qsgd", None, False),
        ("qsgd(bits=8)", None, None),
    ],
)
def test_measured_accuracies_are_known(name, preconditioner, like_dense):
    assert trains_like_dense(Candidate(compressors.get(name), preconditioner)) is like_dense


def test_all_replicas_of_a_process_take_part(monkeypatch):
    curves, measured = Collectives.curves, {}

    def noting(self, most, enough):
        measured.update(curves(self, most, enough))
        return measured

    monkeypatch.setattr(Collectives, "curves", noting)
    names = ("no_compression", "cast", "adacomp", "scalecom")
    table = LayerPolicy().spec("model/words/embeddings", (20, 3), "float32")
    with collective().scope():
        candidates = [Candidate(compressors.get(name)) for name in names]
        found = probe(current_group(), [*SPECS, table], candidates, QUICK)
    assert found.tables == ["model/words/embeddings"]
    assert [prediction.method for prediction in found.predictions] == list(names)
    assert all(prediction.exchange > 0 for prediction in found.predictions)
    assert len(measured) == 4
    most = max(index for index, _ in measured[Kind("AllReduce", "float32")].points)
    assert most == pytest.approx(4 * ELEMENTS, rel=1e-3)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_advice_counts_adams_second_moment_also_within_a_loss_scaler(monkeypatch, scaled, wrapped):
    seen = []
    monkeypatch.setattr(advise_module, "probe", lambda *args: seen.extend(args[2]))
    monkeypatch.setattr(advise_module, "advice_on", lambda *args: None)
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam()
        if wrapped:
            optimizer = gc.CompressedOptimizer(optimizer)
        if scaled:  # as Keras does under mixed_float16
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(optimizer, "mse")
        gc.advise(model, ["adacomp"])
    assert [bool(one.preconditioner) for one in seen] == [False, True]


def test_advice_is_for_the_group_of_a_wrapper_within_a_multi_optimizer():
    with mirrored(2).scope():
        group = current_group()
        wrapped = gc.CompressedOptimizer("sgd", group=group)
        by_name = keras.optimizers.OptimizerMap(wrapped, {})
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.MultiOptimizer(by_name), "mse")
    assert advise_module._group_of(model) is group


def test_deterministic_ops_have_no_clock_to_time_methods_by():
    program = """
        import keras
        import pytest
        import tensorflow as tf
        import tf_gradcomp as gc

        tf.config.experimental.enable_op_determinism()
        keras.utils.set_random_seed(0)
        with gc.MultiWorkerMirroredStrategy().scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(300)])
            model.compile(gc.CompressedOptimizer("sgd", "auto"), "mse")
        with pytest.raises(ValueError, match="Name a compressor, such as compressor='adacomp'"):
            model.fit(tf.ones((8, 4)), tf.ones((8, 300)), verbose=0)
        """
    run_workers(program, 2)


def replace_clock(monkeypatch, seconds):
    """Gives the measurements a clock of their own, since other threads read the real one."""
    monkeypatch.setattr(
        "tf_gradcomp.advice.probe.time", types.SimpleNamespace(perf_counter=seconds)
    )


def test_a_few_slow_collectives_do_not_decide(monkeypatch):
    clock = iter(range(10**6))
    times = [0.0]

    def seconds():  # each second reading ends a collective; of the first 17 five are slow
        number = next(clock)
        if number % 2:
            times[0] += 0.08 if number in (3, 5, 15, 17, 19) else 0.001
        return times[0]

    with tf.device("CPU:0"):
        group = StrategyGroup(collective())
        collectives = Collectives(group, group.communicators())
        collectives._overhead = 0.0
        replace_clock(monkeypatch, seconds)  # the constructor reads the real one
        taken = collectives._measure(lambda values: 8.0, tf.zeros([2]), enough=0.5)
    assert taken == (8.0, pytest.approx(0.001), pytest.approx(0))


def test_a_machine_that_is_slow_for_a_while_does_not_decide(monkeypatch):
    kinds = [Kind("AllReduce", "float32"), Kind("AllReduce", "float16")]
    taken = iter([0.05, 0.05, 0.001, 0.002, 0.002, 0.003])  # two sizes of each, and the least again

    def measure(self, collect, values, enough):
        seconds = next(taken)
        return Timed(4.0 * len(values), seconds, seconds / 10)

    monkeypatch.setattr(Collectives, "_measure", measure)
    with tf.device("CPU:0"):
        group = StrategyGroup(collective())
        collectives = Collectives(group, group.communicators())
        first, second = collectives.curves(dict.fromkeys(kinds, 3e4), enough=1.0).values()
    assert (first.points[0][1], first.noise) == (0.002, 0.0002)
    assert (second.points[0][1], second.noise) == (0.001, 0.0001)


def test_noise_is_the_range_of_half_of_the_times(monkeypatch):
    times = itertools.cycle([0.01, 0.02, 0.03, 0.04, 0.05])
    now = [0.0, False]

    def seconds():
        now[0] += next(times) if now[1] else 0.0
        now[1] = not now[1]
        return now[0]

    with tf.device("CPU:0"):
        group = StrategyGroup(collective())
        collectives = Collectives(group, group.communicators())
        collectives._overhead = 0.0
        replace_clock(monkeypatch, seconds)  # the constructor reads the real one
        timed = collectives._measure(lambda values: 8.0, tf.zeros([2]), enough=0.15)
    # Half of the fifteen times, three of each value, are within 0.01 of the median.
    assert timed == (8.0, pytest.approx(0.03), pytest.approx(0.02 / 15**0.5))


def test_nothing_larger_is_timed_than_what_takes_long_enough(monkeypatch):
    seconds = iter(range(1, 100))
    measured = []

    def measure(self, collect, values, enough):
        measured.append(len(values))
        return Timed(4.0 * len(values), 0.02 * next(seconds), 0.0)

    monkeypatch.setattr(Collectives, "_measure", measure)
    with tf.device("CPU:0"):
        group = StrategyGroup(collective())
        collectives = Collectives(group, group.communicators())
        kind = Kind("AllReduce", "float32")
        curve = collectives.curves({kind: 1e9}, enough=0.05)[kind]
    assert len(curve.points) == 3  # 20, 40 and 60 milliseconds
    assert max(measured) < 1e9 / 4


@pytest.mark.parametrize("name", ["qsgd", "scalecom", "cast"])
def test_gradients_that_are_alike_are_tried_as_one(name):
    kinds = [("conv2d", (3, 3, 64, 64)), ("dense", (300, 100)), ("lstm/recurrent_kernel", (90, 80))]

    def payload_bytes(repeats, most):
        specs = [
            LayerPolicy().spec(f"{path}_{i}/kernel", shape, "float32")
            for i in range(repeats)
            for path, shape in kinds
        ]
        method = compressors.get(name)
        tried = Sample(specs, [method], 0, 2, most)
        assert len(tried._specs) == len(kinds)
        return tried.work(method, None, list).payload_bytes

    once = payload_bytes(1, 10**9)
    assert payload_bytes(30, 10**9) == pytest.approx(30 * once, rel=0.05)
    assert payload_bytes(30, 200_000) == pytest.approx(30 * once, rel=0.05)


@pytest.mark.parametrize("override", ["block_0/", "block_7/", "block_[1-7]/"])
@pytest.mark.parametrize("method", [compressors.TopK, compressors.LGreCo])
def test_layers_of_one_shape_may_have_their_own_settings(method, override):
    top_k = compressors.TopK(0.01, overrides={override: None})
    specs = [LayerPolicy().spec(f"m/block_{i}/kernel", (100, 100), "float32") for i in range(8)]
    expected = sum(8 * (top_k.settings([spec])[0] or spec.elements / 2) for spec in specs)
    found = work_of(top_k if method is compressors.TopK else method(top_k), specs, 10**6)
    assert found.payload_bytes == pytest.approx(expected, rel=0.02)


def test_a_part_of_a_convolution_is_compressed_at_the_rate_of_the_whole():
    scalecom = compressors.get("scalecom")
    whole = LayerPolicy().spec("conv/kernel", (3, 3, 512, 2048), "float32")
    (part,) = Sample([whole], [], 0, 2, whole.elements // 30)._specs
    assert part.elements < whole.elements / 15
    assert scalecom.settings([part])[0] == scalecom.settings([whole])[0]
