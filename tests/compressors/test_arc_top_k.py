"""Tests ARC-Top-K's choice of blocks; test_conformance.py tests the behaviour of all
compressors."""

import numpy as np
import pytest

from tests.compressors.lockstep import Lockstep, assert_equal_bits, specs_of
from tf_gradcomp.compressors import ArcTopK
from tf_gradcomp.compressors.base import RESIDUAL


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def lockstep_of(compressor, gradients):
    return Lockstep(compressor, specs_of(gradients[0]), len(gradients))


def rows_of_different_size(sigma, seed):
    """Gradients of four replicas that are half alike; each row has its own scale."""
    draw = np.random.default_rng(seed)

    def scaled():
        return draw.normal(size=(1024, 256)) * np.exp(sigma * draw.normal(size=(1024, 1)))

    common = scaled()
    return [[(common + scaled()).astype(np.float32)] for _ in range(4)]


def kept_by_gaussian_numbers(total, sent, rank, seed):
    """Returns the share of the squared norm in the rows that the paper's sketch chooses."""
    scores = np.sum((total @ np.random.default_rng(seed).normal(size=(256, rank))) ** 2, axis=1)
    return np.sum(total[np.argsort(scores)[-sent:]] ** 2) / np.sum(total**2)


@pytest.mark.parametrize(
    ("sigma", "density", "rank"), [(0.5, 0.05, 4), (1.0, 0.05, 1), (1.0, 0.05, 16), (1.0, 0.2, 4)]
)
def test_keeps_as_much_of_the_squared_norm_as_a_gaussian_sketch(sigma, density, rank):
    kept, by_gaussian = [], []
    for seed in range(3):
        gradients = rows_of_different_size(sigma, seed)
        outcome = lockstep_of(ArcTopK(density, rank, block=256), gradients).step(gradients)
        total = sum(gradient for (gradient,) in gradients)
        kept.append(np.sum(outcome.reduced[0][0] ** 2) / np.sum(total**2))
        sent = round(density * 1024)
        by_gaussian += [kept_by_gaussian_numbers(total, sent, rank, draw) for draw in range(5)]
    assert np.mean(kept) == pytest.approx(np.mean(by_gaussian), abs=0.03)
    assert np.mean(kept) > 1.5 * density


def test_where_each_group_has_one_entry_it_chooses_the_largest_blocks_of_the_sum():
    """Norms differ by more than bfloat16 rounds."""
    scales = np.random.default_rng(1).permutation(1.2 ** np.arange(50))
    gradients = [[(normal(50, 16, seed=seed) + 5) * scales[:, None]] for seed in range(3)]
    gradients = [[gradient.astype(np.float32)] for (gradient,) in gradients]
    for (gradient,) in gradients:
        gradient[:, 8:] = 0
    reduced = lockstep_of(ArcTopK(0.1, 8, 16), gradients).step(gradients).reduced[0][0]
    norms = np.linalg.norm(sum(gradient for (gradient,) in gradients), axis=1)
    assert set(np.flatnonzero(reduced.any(axis=1))) == set(np.argsort(norms)[-5:])


def test_it_is_a_contraction():
    """Keeps at least as much as a random choice, if all blocks have equal norms."""
    gradient = [[normal(200, 64)]]
    missed = []
    for step in range(20):
        lockstep = lockstep_of(ArcTopK(0.1, 4, 64), gradient)
        for _ in range(step):
            lockstep.skip_a_step()
        missed.append(np.sum(lockstep.step(gradient).residuals[0][0] ** 2))
    assert np.mean(missed) <= 0.9 * np.sum(gradient[0][0] ** 2)
    assert len(set(missed)) > 10  # each step has other signs


def test_all_replicas_send_the_same_blocks_and_as_many_bytes_for_any_number_of_them():
    shapes = [(60, 50), (3, 3, 16, 32), (40,)]
    compressor = ArcTopK(0.1, rank=4, block=32)
    for size in (1, 2, 9):
        gradients = [[normal(*shape, seed=s) for shape in shapes] for s in range(size)]
        outcome = lockstep_of(compressor, gradients).step(gradients)
        blocks = [round(0.1 * 94), round(0.1 * 144)]
        expected = [4 * 32 * blocks[0] + 2 * 4 * 94, 4 * 32 * blocks[1] + 2 * 4 * 144, 4 * 40]
        for replica in range(size):
            assert list(outcome.tensor_bytes[replica]) == expected
            assert outcome.payload_bytes[replica] == sum(expected) + 4  # the flag
            kept = outcome.residuals[replica][0].reshape(-1)
            sent = np.pad(kept == 0, (0, 8), constant_values=True).reshape(-1, 32).all(axis=1)
            assert sent.sum() == blocks[0]
            reduced = np.pad(outcome.reduced[replica][0].reshape(-1), (0, 8)).reshape(-1, 32)
            assert list(reduced.any(axis=1)) == list(sent)
        assert compressor.payload_bytes(specs_of(gradients[0])) == sum(expected)


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100], ids=["tiny", "huge"])
def test_the_scale_of_gradients_changes_nothing_else(scale):
    gradients = [[normal(90, 64, seed=seed)] for seed in range(3)]
    scaled = [[np.float32(scale) * g for g in replica_gradients] for replica_gradients in gradients]
    expected = lockstep_of(ArcTopK(), gradients).step(gradients)
    actual = lockstep_of(ArcTopK(), gradients).step(scaled)
    assert_equal_bits(actual.reduced[0][0], np.float32(scale) * expected.reduced[0][0])


def test_all_that_waits_is_sent_in_the_end():
    gradients = [[normal(40, 64, seed=seed)] for seed in range(2)]
    lockstep = lockstep_of(ArcTopK(0.1, 4, 64), gradients)
    total = lockstep.step(gradients).reduced[0][0]
    zeros = [[np.zeros((40, 64), np.float32)]] * 2
    for _ in range(9):
        outcome = lockstep.step(zeros)
        total = total + outcome.reduced[0][0]
    assert_equal_bits(total, gradients[0][0] + gradients[1][0])
    assert not outcome.residuals[0][0].any()


def test_of_a_sum_that_is_too_large_the_sent_blocks_are_dropped():
    gradients = [[normal(40, 64, seed=seed)] for seed in range(2)]
    for (gradient,) in gradients:
        gradient[7, 3] = 2.5e38
    lockstep = lockstep_of(ArcTopK(0.1, 4, 64), gradients)
    outcome = lockstep.step(gradients)
    assert outcome.finite == [False, False]
    assert not outcome.reduced[0][0].any()
    for (gradient,), state in zip(gradients, outcome.state, strict=True):
        (residual,) = state[RESIDUAL]
        dropped = ~residual.any(axis=1)
        assert dropped.sum() == 4
        assert dropped[7]
        assert_equal_bits(residual[~dropped], gradient[~dropped])


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((), 0),
        ((128,), 0),
        ((0, 500), 0),
        ((257,), 0),  # two of three blocks would be the half of it
        ((300,), 1),
        ((128, 1000), 20),
        ((128, 1001), 20),
    ],
    ids=str,
)
def test_small_variables_are_sent_whole(shape, blocks):
    (spec,) = specs_of([np.zeros(shape, np.float32)])
    assert ArcTopK().settings([spec]) == [blocks]
