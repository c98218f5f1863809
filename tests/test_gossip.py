"""Gossip in one process, compared with NumPy and with the figures of the specification."""

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.bounds import rounding
from tests.gossiping import Workers, fresh
from tests.reference.gossip import PowerGossip, ring
from tf_gradcomp.keras.local.gossip import Messages, settings_of

SHAPES = [(3, 3, 4, 6), (12, 5), (7,), (), (4, 1)]


def values(workers, shapes=SHAPES, seed=0):
    rng = np.random.default_rng(seed)
    return [[np.float32(rng.normal(size=shape)) for shape in shapes] for _ in range(workers)]


@pytest.mark.parametrize(("size", "rank"), [(2, 1), (3, 2), (4, 1), (4, None), (5, 3)])
def test_rounds_agree_with_numpy(size, rank):
    initial, settings = values(size), gc.Gossip("ring", rank=rank, diffusion=1.1)
    oracle = PowerGossip(ring(size), rank, settings.share(size), fresh(size))
    workers, expected = Workers(settings, initial), initial
    for _ in range(4):
        workers.rounds(1)
        expected = oracle.round(expected)
    for local, theirs in zip(workers.values, expected, strict=True):
        for value, other in zip(local, theirs, strict=True):
            # Products have at most 36 terms, and each basis is the product of the round before.
            bound = rounding(np.abs(initial[0][0]).max(), terms=36, steps=2**4)
            np.testing.assert_allclose(value, other, rtol=0, atol=bound)


SQUARE, THIN = (100, 100), (64, 9)


@pytest.mark.parametrize(
    ("settings", "figures"),
    [
        ({"rank": 1}, {10: (0.898,), 100: (0.328, 5.8e-3), 300: (6.4e-2, 1.1e-6)}),
        ({"rank": 1, "diffusion": 1.308}, {10: (0.892,), 100: (0.306,), 300: (5.1e-2,)}),
        ({"rank": 4}, {10: (0.647,), 100: (3.7e-2,), 300: (7.9e-4,)}),
        ({"rank": None}, {10: (3.7e-3,)}),
    ],
)
def test_eight_workers_of_a_ring_agree_as_fast_as_specified(settings, figures):
    initial = values(8, [SQUARE, THIN])
    workers = Workers(gc.Gossip("ring", **settings), initial, graph=True)
    start, means, done = workers.errors, workers.means, 0
    for number, expected in figures.items():
        workers.rounds(number - done)
        done = number
        for error, figure in zip(workers.errors / start, expected, strict=False):
            assert figure / 2 < error < 2 * figure
    # Each round adds a sum of two products to a weight; a product has as many terms as the rank.
    bound = rounding(np.abs(initial[0][0]).max(), terms=2 * 4 + 1, steps=done)
    for mean, before in zip(workers.means, means, strict=True):
        np.testing.assert_allclose(mean, before, rtol=0, atol=bound)
    assert_factors_are_equal_at_both_ends(workers)


def assert_factors_are_equal_at_both_ends(workers):
    found = 0
    for rank, message in enumerate(workers.messages):
        for edge, partner in enumerate(message.partners):
            second = workers.messages[partner].partners.index(rank)
            for factors in workers.factors.values():
                np.testing.assert_array_equal(factors[rank][edge], factors[partner][second])
                found += np.any(factors[rank][edge].numpy()) or not factors[rank].shape[1]
    assert found == 2 * 2 * len(workers.messages)


@pytest.mark.parametrize("settings", [{"rank": None}, {"rank": 50}])
def test_whole_differences_are_averaged_at_once(settings):
    initial = values(2)
    workers = Workers(gc.Gossip("ring", **settings), initial).rounds(1)
    for index, pair in enumerate(zip(*initial, strict=True)):
        mean = np.mean(np.float64(pair), 0)
        for value in workers.values:
            bound = rounding(np.abs(pair).max(), terms=2)
            np.testing.assert_allclose(value[index], mean, rtol=0, atol=bound)


@pytest.mark.parametrize("rank", [1, 2])
def test_equal_weights_stay_equal_and_new_differences_are_found(rank):
    initial = [values(1)[0]] * 3
    workers = Workers(gc.Gossip("ring", rank=rank), initial).rounds(5)
    for local in workers.values:
        for value, before in zip(local, initial[0], strict=True):
            np.testing.assert_array_equal(value, before)
    workers.values[1][1][-1, -1].assign(99.0)
    before = workers.errors[1]
    assert workers.rounds(12).errors[1] < 1e-4 * before


def test_a_worker_whose_numbers_overflow_moves_no_neighbour():
    initial = values(4)
    initial[1][1][0, 0] = np.inf
    workers = Workers(gc.Gossip("ring", rank=1), initial).rounds(3)
    mean = np.mean([workers.values[i][1].numpy() for i in (0, 2, 3)], 0)
    expected = np.mean([initial[i][1] for i in (0, 2, 3)], 0)
    bound = rounding(np.abs(mean).max(), terms=3, steps=3)
    np.testing.assert_allclose(mean, expected, rtol=0, atol=bound)
    assert np.any(workers.values[2][1].numpy() != initial[2][1])
    for value, before in zip(workers.values[1], initial[1], strict=True):
        np.testing.assert_array_equal(value, before)
    workers.values[1][1].assign(initial[0][1])
    assert workers.rounds(1).values[1][0].numpy()[0, 0, 0, 0] != initial[1][0][0, 0, 0, 0]


def test_a_message_for_resnet_20_is_59_times_smaller_than_its_weights():
    kernels = [(3, 3, 3, 16)]
    for width, before in ((16, 16), (32, 16), (64, 32)):
        kernels += [(3, 3, before, width), *[(3, 3, width, width)] * 5]
    norms = [(shape[-1],) for shape in kernels for _ in range(2)]
    shapes = [*kernels, *norms, (64, 10), (10,)]
    messages = Messages(gc.Gossip("ring", rank=1), shapes, 8, 0)
    sent = [int(messages.sent(rows=rows)[0].sent_bytes) for rows in (True, False)]
    dense = 4 * sum(int(np.prod(shape)) for shape in shapes)
    assert round(dense / (np.mean(sent) / len(messages.partners))) == 59


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="no share in its own mean"):
        gc.Gossip("ring", diffusion=1.5).share(4)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="gossip is not simulated"):
        gc.simulation.Learners(model, 2, local_steps=gc.Gossip())
    optimizer = gc.CompressedOptimizer("sgd", "top_k", local_steps=gc.Gossip(warmup_steps=2))
    assert optimizer.compressor.name == "top_k"


def test_the_config_restores_the_settings():
    outer = keras.optimizers.SGD(0.7, momentum=0.5)
    settings = gc.Gossip("ring", None, [(0, 1), (9, 4)], outer, 3, 0.5)
    optimizer = gc.CompressedOptimizer("sgd", local_steps=settings)
    again = gc.CompressedOptimizer.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert isinstance(again.local_steps, gc.Gossip)
    assert settings_of(settings.get_config()).facts() == settings.facts()
    assert again.outer_optimizer.momentum == 0.5
