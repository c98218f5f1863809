"""The main settings of variables may change between steps, without a new trace."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.compressors.lockstep import Lockstep, assert_equal_bits, in_lockstep, specs_of
from tests.compressors.methods import (
    CHUNKED,
    Method,
    adacomp_with,
    alternating_with,
    arc_top_k_with,
    few_bits,
    max_norm_with,
    power_sgd_with,
    qsgd_with,
    random_k_oracle,
    scalecom_oracle,
    short_top_k_with,
    top_k_with,
)
from tests.compressors.test_conformance import assert_as_oracle, random_gradients
from tests.replicas import names_without_stages
from tf_gradcomp.compressors import (
    PowerSGD,
    RandomK,
    ScaleCom,
    StepInputs,
    get,
)
from tf_gradcomp.compressors.base import start
from tf_gradcomp.compressors.power_sgd import FACTOR
from tf_gradcomp.exchange.state import handles, new_state

SHAPES = [(40, 60), (3, 3, 8, 32), (50,), (60, 80), (70, 20), (0, 6), (90, 41), (33,)]
SIZE = 2
CHUNK_SIZES = [
    [400, 50, 25, 7, 50, 3, 65536, 25],  # the two vectors together
    [7, 50, 25, 7, 1, 3, 2, 24],
    [1] * 8,
    [3, 64, 1, 65, 20000, 1, 5, 40],
    [400, 50, 40, 7, 50, 3, 65536, 40],
]
PLANS = [
    (
        adacomp_with(""),
        [
            [50] * 8,
            [500, 63, 64, 1, 16383, 7, 0, 4],
            [0] * 8,
            [63, 500, 0, 2, 50, 0, 9, 64],
            [50] * 8,
        ],
    ),
    (
        qsgd_with(""),
        [[4] * 8, [2, 3, 4, 5, 6, 7, 8, 0], [0] * 8, [8, 0, 2, 0, 3, 0, 4, 5], [3] * 8],
    ),
    (
        max_norm_with("", density=0.3),
        [[4] * 8, [2, 3, 4, 5, 6, 7, 8, 2], [8] * 8, [5, 2, 2, 7, 3, 3, 4, 5], [3] * 8],
    ),
    *[
        (
            make(label, **options),
            [
                [30] * 8,
                [1, 2000, 50, 4800, 0, 3, 9, 0],
                [0] * 8,
                [10**6] * 8,
                [5, 0, 7, 1, 90, 0, 0, 3],
            ],
        )
        for make, label, options in (
            (top_k_with, "", {}),
            (top_k_with, ", momentum", {"momentum": 0.9}),
            (short_top_k_with, ", 2 bits in chunks", {"value_bits": 2, "chunk": 64}),
        )
    ],
    *[
        (
            make("", rank=6),
            [
                [4, 6, 0, 4, 3, 0, 1, 0],
                [2, 0, 0, 1, 3, 0, 2, 0],
                [5, 6, 0, 6, 0, 0, 6, 0],
                [0] * 8,
                [6, 5, 0, 2, 4, 0, 3, 0],
            ],
        )
        for make in (power_sgd_with, alternating_with)
    ],
    (
        arc_top_k_with("", rank=2, block=8),
        [
            [6, 5, 1, 12, 3, 0, 9, 1],
            [300, 1, 7, 601, 9, 0, 2, 5],
            [1] * 5 + [0, 1, 1],
            [4, 300, 2, 7, 3, 0, 462, 4],
            [6, 5, 1, 12, 3, 0, 9, 1],
        ],
    ),
    (Method("ScaleCom", ScaleCom(), scalecom_oracle, **CHUNKED), CHUNK_SIZES),
    (Method("ScaleCom, filtered", ScaleCom(beta=0.25), scalecom_oracle, **CHUNKED), CHUNK_SIZES),
    (few_bits(16, overrides={"_1": None}), CHUNK_SIZES),
    (few_bits(8, overrides={"_1": None}), CHUNK_SIZES),
    (Method("RandomK", RandomK(), random_k_oracle, **CHUNKED), CHUNK_SIZES),
]


def inputs_of(compressor, shapes=((40, 60),), **changes):
    """The step of one replica."""
    gradients = [np.ones(shape, np.float32) for shape in shapes]
    specs = specs_of(gradients)
    state = handles(new_state(compressor, specs))
    given = [tf.constant(gradient) for gradient in gradients]
    inputs = StepInputs(specs, given, state, tf.constant(0, tf.int64), tf.constant(True), 0, 1)
    return dataclasses.replace(inputs, **changes)


@pytest.mark.parametrize(("method", "plans"), PLANS, ids=[method.label for method, _ in PLANS])
def test_five_plans_in_one_trace_equal_the_oracle_with_these_settings(method, plans):
    steps = [random_gradients(SHAPES, SIZE, seed=seed) for seed in range(5)]
    assert assert_as_oracle(method, steps, graph=True, plans=plans).traces == 1


@pytest.mark.parametrize(("method", "plans"), PLANS, ids=[method.label for method, _ in PLANS])
def test_a_step_with_the_own_settings_given_is_the_step_without(method, plans):
    gradients = random_gradients(SHAPES, SIZE)
    specs = specs_of(gradients[0])
    defaults = tf.Variable(method.compressor.settings(specs), dtype=tf.int64)
    plain, given = (
        Lockstep(method.compressor, specs, SIZE, settings=settings).step(gradients)
        for settings in (None, defaults)
    )
    for actual, expected in zip(given.payloads, plain.payloads, strict=True):
        assert_equal_bits(actual, expected)
    assert given.payload_bytes == plain.payload_bytes


WITHOUT_SETTINGS = [one for one in map(get, names_without_stages()) if one.settings([]) is None]


@pytest.mark.parametrize("compressor", WITHOUT_SETTINGS, ids=lambda one: one.name)
def test_a_method_without_such_a_setting_refuses_them(compressor):
    assert compressor.settings_in_force(inputs_of(compressor)) is None
    inputs = inputs_of(compressor, settings=tf.constant([4], tf.int64))
    with pytest.raises(ValueError, match="has no setting that differs by variable"):
        start(compressor, inputs)


@pytest.mark.parametrize(
    "compressor",
    [
        PowerSGD(rank=3),
        ScaleCom(7),
        ScaleCom(7, overrides={"_1": None}, value_bits=16),
        ScaleCom(7, overrides={"_1": None}, value_bits=1),
        RandomK(0.1),
    ],
    ids=repr,
)
def test_lengths_of_vectors_are_known_in_a_graph_unless_settings_may_change(compressor):
    """Where they are known, communicators may cut long vectors into pieces."""
    plan = tf.Variable([2, 0] if compressor.name == "power_sgd" else [5, 9], dtype=tf.int64)
    inputs = inputs_of(compressor, ((40, 60), (50,)))

    def known_and_real(settings):
        known = []

        @tf.function(autograph=False)
        def step():
            step_inputs = dataclasses.replace(inputs, settings=settings())
            (end,) = in_lockstep(compressor, [step_inputs])
            known.extend(given.shape[0] for given in end.given)
            return [tf.size(given) for given in end.given]

        return [int(length) for length in step()], known

    real, known = known_and_real(lambda: None)
    assert known == real
    real, known = known_and_real(plan.read_value)
    assert known == [None] * len(real)


def test_ranks_that_shrink_and_grow_keep_the_first_columns_alike_on_all_replicas():
    plan = tf.Variable([4], dtype=tf.int64)
    gradients = random_gradients([(60, 80)], SIZE)
    lockstep = Lockstep(PowerSGD(6), specs_of(gradients[0]), SIZE, graph=True, settings=plan)
    for step, rank in enumerate([4, 2, 5]):
        plan.assign([rank])
        outcome = lockstep.step(random_gradients([(60, 80)], SIZE, seed=step))
        (factor,) = outcome.state[0][FACTOR]
        for replica in outcome.state[1:]:
            assert_equal_bits(replica[FACTOR][0], factor)
        assert factor.any(axis=0).tolist() == [column < rank for column in range(6)]
    assert lockstep.traces == 1
