"""Tests TopK's counts and momentum; test_conformance.py tests the behaviour of all compressors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import assert_close, rounding
from tests.compressors.lockstep import Lockstep, assert_equal_bits, specs_of
from tests.compressors.methods import short_top_k_with
from tests.compressors.test_conformance import assert_as_oracle, random_gradients
from tf_gradcomp.compressors import TopK
from tf_gradcomp.compressors.base import RESIDUAL, VELOCITY, StateSpec
from tf_gradcomp.compressors.top_k_coding import words_of
from tf_gradcomp.keras.common.model_policy import Policy
from tf_gradcomp.policy import GradientSpec


def spec(elements, kind="dense", path="layer/kernel"):
    return GradientSpec(path, (elements,), "float32", kind)


def steps_of(compressor, steps):
    """Outcomes of steps; `steps` are gradients by step, replica and tensor."""
    lockstep = Lockstep(compressor, specs_of(steps[0][0]), len(steps[0]))
    return [lockstep.step(gradients) for gradients in steps]


def sent_at(outcome, replica=0):
    """Where the replica's payload of a single tensor names entries."""
    entries = (outcome.payloads[replica].size - 14) // 2
    return outcome.payloads[replica][14 : 14 + entries]


@pytest.mark.parametrize(
    ("density", "elements", "entries"),
    [(0.01, 3, 1), (0.01, 199, 1), (0.01, 200, 2), (0.25, 10, 2), (0.49, 7, 3)],
)
def test_at_least_one_entry_is_sent_and_fractions_are_rounded_down(density, elements, entries):
    assert TopK(density).settings([spec(elements)])[0] == entries


@pytest.mark.parametrize(
    ("density", "elements"),
    [(1, 7), (0.5, 10), (0.99, 7), (0.01, 2), (0.01, 1), (0.01, 0), (None, 7)],
)
def test_a_variable_is_sent_whole_if_at_least_half_of_it_is_sent(density, elements):
    """With their indices, half of the entries take as many bytes as all without."""
    assert TopK(density).settings([spec(elements)])[0] == 0


def test_densities_by_kind_and_override():
    compressor = TopK({"vector": None, "recurrent": 0.4}, overrides={"^first/": 0.1})
    assert compressor.settings([spec(1000)])[0] == 10
    assert compressor.settings([spec(1000, "recurrent")])[0] == 400
    assert compressor.settings([spec(1000, "vector")])[0] == 0
    assert compressor.settings([spec(1000, "vector", "first/bias")])[0] == 100


def test_the_largest_entries_are_sent_and_the_others_later():
    gradient = np.float32([[3, -9, 1], [7, 0, -5]])
    zeros = np.zeros_like(gradient)
    outcomes = steps_of(TopK(0.34), [[[gradient]], [[zeros]], [[zeros]]])
    assert [outcome.reduced[0][0].tolist() for outcome in outcomes] == [
        [[0, -9, 0], [7, 0, 0]],
        [[3, 0, 0], [0, 0, -5]],
        [[0, 0, 1], [0, 0, 0]],
    ]


def test_all_equal_elements_are_sent_in_the_end():
    gradient = np.full(1000, 0.5, np.float32)
    steps = [[[gradient]]] + [[[np.zeros_like(gradient)]]] * 99
    outcomes = steps_of(TopK(0.01), steps)
    np.testing.assert_array_equal(sum(o.reduced[0][0] for o in outcomes), gradient)
    assert [sent_at(o)[0] for o in outcomes] == list(range(0, 1000, 10))


def test_the_payload_has_one_length_and_64_bits_for_each_entry():
    shapes = [(40, 30), (3, 3, 7, 11), (5,), (0,), ()]
    compressor = TopK({"dense": 0.05, "vector": None})
    steps = [random_gradients(shapes, 2, seed=seed) for seed in range(3)]
    steps[2][1][0][3, 3] = np.nan
    for outcome in steps_of(compressor, steps):
        expected = [8 * 60, 8 * 6, 4 * 5, 0, 4]
        for tensor_bytes, payload in zip(outcome.tensor_bytes, outcome.payloads, strict=True):
            assert tensor_bytes.tolist() == expected
            assert payload.nbytes == 56 + sum(expected)
    gathered = 4 * outcome.payloads[0].size
    assert outcome.sent_bytes == [gathered] * 2  # without lengths, for they are known


@pytest.mark.parametrize(("density", "ratio"), [(0.01, 43.31), (0.001, 194.3)])
def test_the_counted_ratio_equals_the_papers_formula(density, ratio):
    """64 max(1, floor(p N)) bits, and 32 for each element of a vector."""
    model = keras.applications.ResNet50(weights=None)
    policy = Policy.from_model(model)
    specs = [policy.spec(v.path, v.shape, "float32") for v in model.trainable_variables]
    compressor = TopK(density, overrides={"bias|gamma|beta": None})
    bits = [
        32 * spec.elements if not entries else 64 * entries
        for spec, entries in ((s, compressor.settings([s])[0]) for s in specs)
    ]
    assert 32 * sum(s.elements for s in specs) / sum(bits) == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize(
    ("value_bits", "chunk"), [(32, 4096), (16, None), (8, 2), (4, 65536), (2, 256)]
)
def test_each_coding_of_entries_equals_the_oracle(value_bits, chunk):
    method = short_top_k_with("", density=0.1, value_bits=value_bits, chunk=chunk)
    steps = [random_gradients([(40, 30), (7,), (0, 3), (200, 50)], 2, seed=s) for s in range(3)]
    steps[1][1][3][3, 4] = np.nan
    assert_as_oracle(method, steps)


def test_chunks_choose_the_same_entries_in_fewer_bits():
    gradients = random_gradients([(128, 256)], 2)
    plain, short = (steps_of(TopK(1 / 64, chunk=chunk), [gradients])[0] for chunk in (None, 4096))
    assert_equal_bits(short.reduced[0][0], plain.reduced[0][0])
    # 512 entries of 12 + 32 bits, and 8 chunks of 13.
    assert short.tensor_bytes[0].tolist() == [(512 * 44 + 8 * 13) // 8]
    assert plain.tensor_bytes[0].tolist() == [512 * 8]


def test_two_bits_are_a_sign_and_one_of_two_means():
    gradient = np.zeros(1000, np.float32)
    gradient[[3, 50, 700, 701]] = [2, -4, 10, -20]
    (outcome,) = steps_of(TopK(0.004, value_bits=2), [[[gradient]]])
    sent = outcome.reduced[0][0]
    assert sent[[3, 50, 700, 701]].tolist() == [3, -3, 15, -15]
    assert_equal_bits(outcome.residuals[0][0], gradient - sent)


def test_velocities_are_kept_with_momentum_alone():
    assert TopK().state(spec(7)) == {RESIDUAL: StateSpec((7,))}
    assert TopK(momentum=0.9).state(spec(7)) == {
        RESIDUAL: StateSpec((7,)),
        VELOCITY: StateSpec((7,)),
    }


def test_golden_run_with_momentum():
    gradients = np.float32([[4, 1, -2, 0], [0, 2, 2, 1], [1, 0, 0, 0]])
    outcomes = steps_of(TopK(0.25, momentum=0.5), [[[g]] for g in gradients])
    assert [outcome.reduced[0][0].tolist() for outcome in outcomes] == [
        [4, 0, 0, 0],  # u = v = 4, 1, -2, 0
        [0, 3.5, 0, 0],  # u = 0, 2.5, 1, 1; v = 0, 3.5, -1, 1
        [0, 0, 0, 1.5],  # u = 1, 0, 0.5, 0.5; v = 1, 0, -0.5, 1.5
    ]
    state = outcomes[-1].state[0]
    assert state[VELOCITY][0].tolist() == [1, 0, 0.5, 0]
    assert state[RESIDUAL][0].tolist() == [1, 0, -0.5, 0]


def test_sent_plus_residual_equals_the_old_residual_plus_the_velocity():
    shapes = [(64, 25), (77,)]
    lockstep = Lockstep(TopK(0.05, momentum=0.9), specs_of(random_gradients(shapes, 1)[0]), 3)
    for seed in range(20):
        gradients, before = random_gradients(shapes, 3, seed=seed), lockstep.state
        outcome = lockstep.step(gradients)
        for tensor, reduced in enumerate(outcome.reduced[0]):
            velocities = [
                np.float32(0.9) * had[VELOCITY][tensor] + replica_gradients[tensor]
                for had, replica_gradients in zip(before, gradients, strict=True)
            ]
            had = sum(state[RESIDUAL][tensor] for state in before)
            kept = sum(state[RESIDUAL][tensor] for state in outcome.state)
            largest = np.max(np.abs(had) + sum(map(np.abs, velocities)))
            assert_close(reduced + kept, had + sum(velocities), terms=3 * 4, scale=largest)


def test_velocity_and_residual_are_masked_where_an_entry_was_sent_and_nowhere_else():
    first, second = (random_gradients([(1000,)], 2, seed=seed) for seed in range(2))
    before, after = steps_of(TopK(0.02, momentum=0.9), [first, second])
    for replica in range(2):
        sent = np.zeros(1000, bool)
        sent[sent_at(after, replica)] = True
        assert sent.sum() == 20
        velocity = np.float32(0.9) * before.state[replica][VELOCITY][0] + second[replica][0]
        expected = np.where(sent, np.float32(0), velocity)
        assert_equal_bits(after.state[replica][VELOCITY][0], expected)
        assert not after.state[replica][RESIDUAL][0][sent].any()


@pytest.mark.parametrize("density", [0.02, None])
def test_a_skipped_step_masks_nothing_and_leaves_the_bad_replica_as_it_was(density):
    warm_up, gradients = (random_gradients([(60, 10), (9,)], 2, seed=seed) for seed in range(2))
    gradients[1][0][17, 3] = np.inf
    before, after = steps_of(TopK(density, momentum=0.9), [warm_up, gradients])
    assert after.finite == [False, False]
    for tensor in range(2):
        had, has = before.state[0], after.state[0]
        velocity = np.float32(0.9) * had[VELOCITY][tensor] + gradients[0][tensor]
        assert_equal_bits(has[VELOCITY][tensor], velocity)
        assert_equal_bits(has[RESIDUAL][tensor], had[RESIDUAL][tensor] + velocity)
        for name in (RESIDUAL, VELOCITY):
            assert_equal_bits(after.state[1][name][tensor], before.state[1][name][tensor])


def test_variables_sent_whole_have_the_momentum_of_an_optimizer():
    steps = [random_gradients([(30, 20), (5,)], 3, seed=seed) for seed in range(10)]
    outcomes = steps_of(TopK(None, momentum=0.9), steps)
    velocity = [np.zeros((30, 20)), np.zeros(5)]
    for gradients, outcome in zip(steps, outcomes, strict=True):
        for tensor in range(2):
            velocity[tensor] = 0.9 * velocity[tensor] + sum(
                replica_gradients[tensor] for replica_gradients in gradients
            )
            assert_close(outcome.reduced[0][tensor], velocity[tensor], terms=3 + 1, steps=10)


def global_norm(tensors):
    return np.sqrt(sum(np.sum(np.square(tensor, dtype=np.float64)) for tensor in tensors))


@pytest.mark.parametrize("size", [1, 4])
def test_each_replica_clips_to_the_norm_over_the_root_of_their_number(size):
    gradients = random_gradients([(100, 20), (50,)], size)
    for clip_norm in (3.0, 1e4):
        compressor = TopK(None, clip_norm=clip_norm)
        small = [
            [np.zeros_like(g) for g in replica_gradients] for replica_gradients in gradients[1:]
        ]
        (outcome,) = steps_of(compressor, [[gradients[0], *small]])
        norm = global_norm(outcome.reduced[0])
        given = global_norm(gradients[0])
        assert norm == pytest.approx(
            min(given, clip_norm / np.sqrt(size)), rel=rounding(1, terms=100 * 20 + 50)
        )
        # The direction is the same.
        ratio = outcome.reduced[0][0] / gradients[0][0]
        np.testing.assert_allclose(ratio, norm / given, rtol=rounding(1, terms=4))


@pytest.mark.parametrize("number", [0, 1, 33, 2**26 + 1, 2**31 - 1])
@pytest.mark.parametrize("bits", [1, 13, 32])
def test_words_of_many_codes_are_counted_without_overflow(number, bits):
    assert words_of(tf.constant(number), bits).numpy() == -(-number * bits // 32)
