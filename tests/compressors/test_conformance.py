"""Tests what every compressor must do, on all of `METHODS` in lockstep."""

from __future__ import annotations

import dataclasses
import inspect
import json

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import assert_close as assert_near
from tests.compressors.lockstep import Lockstep, assert_close, assert_equal_bits, specs_of
from tests.compressors.methods import METHODS, Method
from tests.replicas import method_names
from tests.workers import run_workers
from tf_gradcomp import compressors
from tf_gradcomp.compressors import ArcTopK, Cast, CountSketch, PowerSGD, registry
from tf_gradcomp.compressors.base import RESIDUAL, StepInputs

DTYPES = [np.float16, ml_dtypes.bfloat16]  # other tests have float32


def each(methods):
    return pytest.mark.parametrize("method", methods, ids=lambda method: method.label)


def payload_format(method):
    """Returns what differs between methods whose payloads are made in different ways."""
    kind = type(method.compressor)
    return kind, method.header_bytes, method.padding, method.sends_less, method.tolerance


# All of `METHODS` take steps on random gradients. Some other tests take the first method of each
# class or of each payload format.
ONE_OF_EACH_CLASS = [*{type(method.compressor): method for method in reversed(METHODS)}.values()]
ONE_OF_EACH_FORMAT = [*{payload_format(method): method for method in reversed(METHODS)}.values()]
every_method, every_class, every_format = map(
    each, (METHODS, ONE_OF_EACH_CLASS, ONE_OF_EACH_FORMAT)
)


def random_gradients(shapes, size, *, seed=0, dtype=np.float32, scale=1.0):
    """For each replica, a gradient of each shape."""
    generator = np.random.default_rng(seed)
    return [
        [np.asarray(scale * generator.laplace(size=shape), dtype=dtype) for shape in shapes]
        for _ in range(size)
    ]


def results(outcome, replica):
    """All that a step gave one replica: reduced gradients and state."""
    by_name = sorted(outcome.state[replica].items())
    return [*outcome.reduced[replica], *(array for _, arrays in by_name for array in arrays)]


def magnitude(arrays):
    """The largest finite one in them."""
    return max(float(np.abs(array[np.isfinite(array)]).max(initial=0)) for array in arrays)


def assert_as_oracle(method: Method, steps, *, graph=False, plans=None):
    """Runs `steps` (gradients by step, replica and tensor) and compares all with the oracle.

    Nothing may be lost in a step, either. `plans` are the main settings of all tensors, for each
    step; None uses the compressor's own.
    """
    size, specs = len(steps[0]), specs_of(steps[0][0])
    settings = tf.Variable(plans[0], dtype=tf.int64) if plans else None
    lockstep = Lockstep(method.compressor, specs, size, graph=graph, settings=settings)
    for step, gradients in enumerate(steps):
        before = lockstep.state
        arguments = {}
        if plans:
            settings.assign(plans[step])
            arguments["settings"] = plans[step]
        expected = method.oracle(method.compressor, specs, before, gradients, step, **arguments)
        actual = lockstep.step(gradients)
        assert actual.finite == expected.finite
        if all(actual.finite):
            conserved(method, before, gradients, actual)
        for payload, by_oracle in zip(actual.payloads, expected.payloads, strict=True):
            assert_close(payload, by_oracle, method.tolerance * magnitude([by_oracle]))
        for replica in range(size):
            assert_equal_bits(actual.tensor_bytes[replica], expected.tensor_bytes[replica])
            both = [results(outcome, replica) for outcome in (actual, expected)]
            error = method.tolerance * magnitude(both[1])
            for array, by_oracle in zip(*both, strict=True):
                assert_close(array, by_oracle, error)
    return lockstep


def conserved(method, before, gradients, outcome):
    """Asserts that gradients plus old residuals are the reduced gradients plus new residuals.

    `before` is their state.
    """
    size = len(gradients)
    added = [method.added(size, *pair) for pair in zip(before, gradients, strict=True)]
    for tensor, reduced in enumerate(outcome.reduced[0]):
        had = sum(tensors[tensor].astype(np.float32) for tensors in added)
        kept = np.zeros_like(reduced)
        if method.keeps_residuals:
            scale = method.compressor.residual_scale
            had = had + sum(state[RESIDUAL][tensor] for state in before) / scale
            kept = sum(residuals[tensor] for residuals in outcome.residuals) / scale
        largest = max(1.0, np.abs(had).max(initial=0), np.abs(kept).max(initial=0))
        assert np.abs(reduced + kept - had).max(initial=0) <= method.rounding * largest


SHAPES = [(40, 30), (3, 3, 7, 11), (5,), (500,), (13, 10)]


@every_method
def test_equals_the_oracle_over_steps(method):
    assert_as_oracle(method, [random_gradients(SHAPES, 3, seed=seed) for seed in range(4)])


@every_format
def test_one_replica_equals_the_oracle(method):
    assert_as_oracle(method, [random_gradients(SHAPES, 1, seed=seed) for seed in range(3)])


@pytest.mark.quick
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=pytest.mark.oldest if method in ONE_OF_EACH_CLASS else ())
        for method in ONE_OF_EACH_FORMAT
    ],
    ids=lambda method: method.label,
)
def test_equals_the_oracle_in_a_graph(method):
    steps = [random_gradients([(40, 30), (5,)], 2, seed=seed) for seed in range(3)]
    assert_as_oracle(method, steps, graph=True)


@every_format
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_gradients_of_each_dtype(method, dtype):
    steps = [random_gradients([(33, 31), (70,)], 2, seed=s, dtype=dtype) for s in range(3)]
    assert_as_oracle(method, steps)


@every_class
def test_delayed_reports_gradients_that_wait_in_the_residual(method):
    """The momentum of Adam depends on it."""
    gradients = random_gradients([(64, 25), (3, 3, 4, 8), (200,), (1,)], 2)
    specs = specs_of(gradients[0])
    lockstep = Lockstep(method.compressor, specs, 2)
    added = method.added(2, lockstep.state[0], gradients[0])
    zero = tf.constant(0, tf.int64)
    inputs = StepInputs(
        specs, [], {}, zero, tf.constant(True), 0, 2, job_state=lockstep.job_state[0]
    )
    says = lockstep.current_stage(zero).delayed(inputs).numpy()
    kept = lockstep.step(gradients).residuals[0]
    scale = method.compressor.residual_scale
    waits = [
        np.isclose(residual, scale * one, rtol=1e-5).mean() > 0.5
        for residual, one in zip(kept, added, strict=bool(kept))
    ]
    assert list(says) == (waits or [False] * len(specs))


@every_method
def test_zeros_reduce_to_zeros(method):
    size = 2
    gradients = [[np.zeros((30, 20), np.float32), np.zeros(3, np.float32)]] * size
    lockstep = assert_as_oracle(method, [gradients])
    outcome = lockstep.step(gradients)
    assert outcome.finite == [True] * size
    assert not any(array.any() for replica in range(size) for array in results(outcome, replica))


@every_method
@pytest.mark.parametrize(("size", "shape"), [(1, ()), (2, (1,)), (3, (1, 1, 1))])
def test_one_element_is_sent_at_once(method, size, shape):
    gradients = [[np.full(shape, 0.5 + replica, np.float32)] for replica in range(size)]
    lockstep = assert_as_oracle(method, [gradients])
    assert not any(
        residual.any() for replica in lockstep.state for residual in replica.get(RESIDUAL, [])
    )


@pytest.mark.parametrize(
    "method", [m for m in METHODS if m.sends_equals_at_once], ids=lambda method: method.label
)
@pytest.mark.parametrize("size", [1, 3])
def test_equal_elements_are_sent_at_once(method, size):
    gradients = [[np.full((25, 41), -0.25, np.float32)]] * size
    lockstep = assert_as_oracle(method, [gradients])
    (reduced,) = lockstep.step([[np.zeros((25, 41), np.float32)]] * size).reduced[0]
    assert not reduced.any()


@every_method
def test_empty_tensors_between_others(method):
    shapes = [(0,), (30, 20), (0, 5), (4,)]
    assert_as_oracle(method, [random_gradients(shapes, 2, seed=seed) for seed in range(2)])


@every_method
def test_only_empty_tensors(method):
    assert_as_oracle(method, [random_gradients([(0,), (3, 0)], 2)])


@every_method
def test_ragged_last_bin(method):
    sizes = (6, 7, 8, 49, 50, 51, 499, 500, 501, 1001)
    shapes = [(elements,) for elements in sizes for _ in range(5)]  # of each kind of layer
    assert_as_oracle(method, [random_gradients(shapes, 2)])


@every_class
def test_many_tensors(method):
    shapes = [(i % 17, 3) if i % 2 else (i % 11,) for i in range(100)]
    assert_as_oracle(method, [random_gradients(shapes, 2)])


@every_format
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda d: np.dtype(d).name)
def test_values_near_the_largest_of_float16(method, dtype):
    signs = np.where(np.arange(600) % 3 == 0, -1, 1)
    largest = min(65504, method.largest / 2)
    gradients = [[(largest * signs).astype(dtype)], [(largest * 0.9999 * signs).astype(dtype)]]
    lockstep = assert_as_oracle(method, [gradients, gradients])
    before = lockstep.state
    outcome = lockstep.step(gradients)
    assert outcome.finite == [True, True]
    assert np.isfinite(outcome.reduced[0][0]).all()
    conserved(method, before, gradients, outcome)


def with_one_entry(values, seed):
    """For each replica two gradients, with one of the values in the first of them."""
    gradients = random_gradients([(70, 60), (9,)], len(values), seed=seed)
    for replica_gradients, value in zip(gradients, values, strict=True):
        replica_gradients[0][17, 3] = value
    return gradients


@every_method
def test_a_sum_that_is_too_large_costs_one_step(method):
    """Put back, it would have been too large again in every step."""
    gradients = with_one_entry([2.5e38, 2.5e38], seed=0)
    lockstep = Lockstep(method.compressor, specs_of(gradients[0]), 2)
    outcome = lockstep.step(gradients)
    assert all(np.isfinite(reduced).all() for reduced in outcome.reduced[0])
    if outcome.finite[0]:
        assert method.sends_less
        return
    assert outcome.finite == [False, False]
    assert not any(reduced.any() for arrays in outcome.reduced for reduced in arrays)
    assert not any((np.abs(array) > 20).any() for left in outcome.residuals for array in left)
    before, gradients = outcome.state, random_gradients([(70, 60), (9,)], 2, seed=1)
    outcome = lockstep.step(gradients)
    assert outcome.finite == [True, True]
    conserved(method, before, gradients, outcome)


@every_format
def test_only_what_would_have_been_sent_is_dropped_with_such_a_sum(method):
    """The job therefore continues like a job in which the large entries of the replicas cancel."""
    if isinstance(method.compressor, (PowerSGD, CountSketch, ArcTopK)):
        pytest.skip("the sent values depend on the sum")
    gradients, cancelling = (with_one_entry([2.5e38, last], seed=0) for last in (2.5e38, -2.5e38))
    specs = specs_of(gradients[0])
    lockstep, control = (Lockstep(method.compressor, specs, 2) for _ in range(2))
    if lockstep.step(gradients).finite[0]:
        return
    assert control.step(cancelling).finite[0] or isinstance(method.compressor, Cast)
    for seed in range(1, 4):
        gradients = random_gradients([(70, 60), (9,)], 2, seed=seed)
        outcome, expected = lockstep.step(gradients), control.step(gradients)
        assert outcome.finite == expected.finite == [True, True]
        actual, wanted = (
            [*outcome.reduced, *outcome.residuals],
            [*expected.reduced, *expected.residuals],
        )
        for arrays, wanted_arrays in zip(actual, wanted, strict=True):
            for array, wanted_array in zip(arrays, wanted_arrays, strict=True):
                assert_equal_bits(array, wanted_array)


@every_class
def test_millions_of_elements(method):
    shape = (2_000_003,)  # many blocks of each kernel
    gradients = random_gradients([shape], 1, scale=1e-3) * 2
    lockstep = Lockstep(method.compressor, specs_of(gradients[0]), 2)
    for _ in range(2):
        before = lockstep.state
        outcome = lockstep.step(gradients)
        conserved(method, before, gradients, outcome)
    assert_equal_bits(outcome.reduced[0][0], outcome.reduced[1][0])


@every_format
def test_non_finite_on_one_replica_is_skipped_by_all(method):
    shapes = [(60, 10), (9,)]
    specs = specs_of(random_gradients(shapes, 1)[0])
    lockstep = Lockstep(method.compressor, specs, 3)
    outcome = lockstep.step(random_gradients(shapes, 3))
    scale = method.compressor.residual_scale
    for seed, (bad, culprit) in enumerate([(np.nan, 0), (np.inf, 2), (-np.inf, 0)], start=1):
        before, gradients = outcome.state, random_gradients(shapes, 3, seed=seed)
        gradients[culprit][0][17, 3] = bad
        outcome = lockstep.step(gradients)
        assert outcome.finite == [False] * 3
        assert not any(reduced.any() for arrays in outcome.reduced for reduced in arrays)
        for replica in range(3 if method.keeps_residuals else 0):
            for had, added, has in zip(
                before[replica][RESIDUAL],
                method.added(3, before[replica], gradients[replica]),
                outcome.residuals[replica],
                strict=True,
            ):
                expected = had if replica == culprit else had + scale * added
                assert_near(has, expected, terms=8)
    before, after = outcome.state, random_gradients(shapes, 3, seed=4)
    outcome = lockstep.step(after)
    assert outcome.finite == [True] * 3
    conserved(method, before, after, outcome)


@every_method
def test_non_finite_steps_equal_the_oracle_from_empty_residuals(method):
    steps = [random_gradients([(60, 10), (9,)], 2, seed=seed) for seed in range(2)]
    steps[0][1][0][3, 3] = np.nan
    assert_as_oracle(method, steps)


@every_method
def test_a_step_that_others_found_not_finite_keeps_all_gradients(method):
    gradients = random_gradients([(60, 10), (9,)], 2)
    lockstep = Lockstep(method.compressor, specs_of(gradients[0]), 2)
    before = lockstep.state
    outcome = lockstep.step(gradients, finite=False)
    assert outcome.finite == [False, False]
    if not method.keeps_residuals:
        return
    scale = method.compressor.residual_scale
    for replica, kept in enumerate(outcome.residuals):
        added = method.added(2, before[replica], gradients[replica])
        for residual, expected in zip(kept, added, strict=True):
            assert_near(residual, scale * expected, terms=8)


# Others equal their oracle in every bit, and it gives all replicas the same.
@each([method for method in METHODS if method.tolerance])
def test_all_replicas_get_the_same_bits(method):
    gradients = random_gradients([(123, 45), (3, 3, 8, 8)], 3)
    outcome = Lockstep(method.compressor, specs_of(gradients[0]), 3).step(gradients)
    for replica in (1, 2):
        for first, other in zip(outcome.reduced[0], outcome.reduced[replica], strict=True):
            assert_equal_bits(other, first)


@every_method
def test_tensor_bytes_and_header_are_the_whole_payload(method):
    gradients = random_gradients([(40, 30), (3, 3, 7, 11), (5,)], 2)
    outcome = Lockstep(method.compressor, specs_of(gradients[0]), 2).step(gradients)
    headers = {
        payload_bytes - tensor_bytes.sum()
        for payload_bytes, tensor_bytes in zip(
            outcome.payload_bytes, outcome.tensor_bytes, strict=True
        )
    }
    assert min(headers) >= method.header_bytes
    assert max(headers) <= method.header_bytes + method.padding


_FINGERPRINTS_OF_RESULTS = """
import hashlib, json, os, sys
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
from tests.compressors.lockstep import Lockstep, specs_of
from tests.compressors.methods import METHODS
from tests.compressors.test_conformance import random_gradients, results

digests = {}
shapes = [(400_003,), (3, 3, 128, 128), (7,)]  # several blocks of each kernel
steps = [random_gradients(shapes, 2, seed=seed) for seed in range(2)]
for method in METHODS:
    lockstep = Lockstep(method.compressor, specs_of(steps[0][0]), 2)
    digest = hashlib.sha256()
    for gradients in steps:
        outcome = lockstep.step(gradients)
        for array in [*outcome.payloads, *results(outcome, 0)]:
            digest.update(array.tobytes())
    digests[method.label] = digest.hexdigest()
print(json.dumps(digests))
"""


def test_results_do_not_depend_on_the_number_of_threads():
    def digests(threads):
        (worker,) = run_workers(_FINGERPRINTS_OF_RESULTS, 1, [threads])
        return json.loads(worker.stdout)

    one = digests(1)
    assert list(one) == [method.label for method in METHODS]
    assert digests(2) == one


@every_method
def test_config_round_trips(method):
    compressor = method.compressor
    config = compressor.get_config()
    assert json.loads(json.dumps(config)) == config
    description = compressors.serialize(compressor)
    copies = [
        type(compressor).from_config(config),
        compressors.deserialize(description),
        compressors.deserialize(json.loads(json.dumps(description))),
        compressors.get(description),
    ]
    for copy in copies:
        assert type(copy) is type(compressor)
        assert copy.get_config() == config
    assert compressors.get(compressor) is compressor


@every_method
def test_config_has_all_arguments_of_the_constructor(method):
    """A class that forgets one loses it in a copy, and compares two jobs as equal."""
    arguments = registry._known_settings(type(method.compressor))
    assert {*arguments} - {"warmup", "warmup_steps"} <= set(method.compressor.get_config())


@every_method
def test_its_name_gives_the_defaults(method):
    by_name = compressors.get(method.compressor.name)
    assert type(by_name) is type(method.compressor)
    assert by_name.get_config() == type(method.compressor)().get_config()
    upper = compressors.get(method.compressor.name.upper())
    assert type(upper) is type(method.compressor)


@every_method
def test_repr_names_class_and_settings(method):
    text = repr(method.compressor)
    assert text.startswith(type(method.compressor).__name__ + "(")
    for setting, value in method.compressor.get_config().items():
        assert f"{setting}={value!r}" in text


@every_method
def test_a_copy_has_the_same_fingerprint(method):
    specs = specs_of(random_gradients([(4, 5), (5,)], 1)[0])
    copy = compressors.deserialize(compressors.serialize(method.compressor))
    assert copy.fingerprint(specs) == method.compressor.fingerprint(specs)


@every_method
@pytest.mark.parametrize(
    "change",
    [{"shape": (5, 4)}, {"dtype": "float16"}, {"kind": "embedding"}, {"path": "other/kernel"}],
    ids=lambda change: next(iter(change)),
)
def test_fingerprint_differs_with_the_tensors(method, change):
    specs = specs_of(random_gradients([(4, 5), (5,)], 1)[0])
    changed = [dataclasses.replace(specs[0], **change), specs[1]]
    assert method.compressor.fingerprint(changed) != method.compressor.fingerprint(specs)
    assert method.compressor.fingerprint(specs[:1]) != method.compressor.fingerprint(specs)


def test_fingerprints_differ_with_the_settings():
    specs = specs_of(random_gradients([(4, 5), (5,)], 1)[0])
    assert len({method.compressor.fingerprint(specs) for method in METHODS}) == len(METHODS)


def test_every_compressor_is_in_the_table():
    tested = {type(method.compressor) for method in METHODS}
    public = {getattr(compressors, name) for name in compressors.__all__}
    classes = {c for c in public if isinstance(c, type) and issubclass(c, compressors.Compressor)}
    methods = {c for c in classes if not inspect.isabstract(c)}
    assert methods - {compressors.Auto} == tested
    assert {method.compressor.name for method in METHODS} == set(method_names())


def test_a_name_may_have_settings():
    compressor = compressors.get("AdaComp(bin_sizes={'dense': 70}, scale_factor=3)")
    assert compressor.bin_sizes.by_kind["dense"] == 70
    assert compressor.scale_factor == 3
