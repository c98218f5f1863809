"""Gossip in one process, compared with NumPy and with the figures of the specification."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import rounding
from tests.gossiping import Workers, fresh
from tests.reference.gossip import NoLoCo, PowerGossip, ring
from tf_gradcomp.keras.common.gossip import settings_of
from tf_gradcomp.keras.common.gossip_graphs import GRAPHS, degree, matchings_of
from tf_gradcomp.keras.common.gossip_messages import Messages

SHAPES = [(3, 3, 4, 6), (12, 5), (7,), (), (4, 1)]


def values(workers, shapes=SHAPES, seed=0):
    rng = np.random.default_rng(seed)
    return [[np.float32(rng.normal(size=shape)) for shape in shapes] for _ in range(workers)]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8, 9, 16])
@pytest.mark.parametrize("graph", GRAPHS)
def test_each_edge_of_a_graph_is_in_one_matching(graph, size):
    if graph == "torus" and size in (2, 3, 5):
        with pytest.raises(ValueError, match="cannot form a torus"):
            matchings_of(graph, size)
        return
    matchings, workers = matchings_of(graph, size), np.arange(size)
    for matching in matchings:
        np.testing.assert_array_equal(matching[matching], workers)
    edges = [(i, int(j)) for matching in matchings for i, j in enumerate(matching) if i < j]
    sides = {4: 2, 6: 3, 8: 4, 9: 3, 16: 4}  # the number of columns of a torus, by workers
    if graph == "ring":
        expected = ring(size)
    elif graph == "torus":
        columns = sides[size]
        down = {(i, (i + columns) % size) for i in range(size)}
        right = {(i, i // columns * columns + (i + 1) % columns) for i in range(size)}
        expected = sorted({tuple(sorted(edge)) for edge in down | right})
    else:
        expected = [(i, j) for i in range(size) for j in range(i + 1, size)]
    assert sorted(edges) == expected
    neighbours = np.bincount(np.ravel(edges), minlength=size)
    assert set(neighbours) == {size - 1 if graph == "random_pairs" else degree(graph, size)}


@pytest.mark.parametrize(("size", "rank"), [(2, 1), (3, 2), (4, 1), (4, None), (5, 3)])
def test_rounds_agree_with_numpy(size, rank):
    given, settings = values(size), gc.Gossip("ring", rank=rank, diffusion=1.1)
    oracle = PowerGossip(ring(size), rank, settings.share(size), fresh(size))
    workers, expected = Workers(settings, given), given
    for _ in range(4):
        workers.rounds(1)
        expected = oracle.round(expected)
    for own, theirs in zip(workers.values, expected, strict=True):
        for value, other in zip(own, theirs, strict=True):
            # Products have at most 36 terms, and each basis is the product of the round before.
            bound = rounding(np.abs(given[0][0]).max(), terms=36, steps=2**4)
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
    given = values(8, [SQUARE, THIN])
    workers = Workers(gc.Gossip("ring", **settings), given, graph=True)
    start, means, done = workers.errors, workers.means, 0
    for number, expected in figures.items():
        workers.rounds(number - done)
        done = number
        for error, figure in zip(workers.errors / start, expected, strict=False):
            assert figure / 2 < error < 2 * figure
    # Each round adds a sum of two products to a weight; a product has as many terms as the rank.
    bound = rounding(np.abs(given[0][0]).max(), terms=2 * 4 + 1, steps=done)
    for mean, before in zip(workers.means, means, strict=True):
        np.testing.assert_allclose(mean, before, rtol=0, atol=bound)
    assert_factors_are_equal_at_both_ends(workers)


def assert_factors_are_equal_at_both_ends(workers):
    found = 0
    for rank, one in enumerate(workers.messages):
        for edge, partner in enumerate(map(int, one.partners(tf.constant(1)))):
            other = workers.messages[partner].matchings.index(one.matchings[edge])
            for factors in workers.factors.values():
                np.testing.assert_array_equal(factors[rank][edge], factors[partner][other])
                found += np.any(factors[rank][edge].numpy()) or not factors[rank].shape[1]
    assert found == 2 * 2 * len(workers.messages)


@pytest.mark.parametrize("settings", [{"rank": None}, {"rank": 50}])
def test_whole_differences_are_averaged_at_once(settings):
    given = values(2)
    workers = Workers(gc.Gossip("ring", **settings), given).rounds(1)
    for place, pair in enumerate(zip(*given, strict=True)):
        mean = np.mean(np.float64(pair), 0)
        for own in workers.values:
            bound = rounding(np.abs(pair).max(), terms=2)
            np.testing.assert_allclose(own[place], mean, rtol=0, atol=bound)


@pytest.mark.parametrize("rank", [1, 2])
def test_equal_weights_stay_equal_and_new_differences_are_found(rank):
    given = [values(1)[0]] * 3
    workers = Workers(gc.Gossip("ring", rank=rank), given).rounds(5)
    for own in workers.values:
        for value, before in zip(own, given[0], strict=True):
            np.testing.assert_array_equal(value, before)
    workers.values[1][1][-1, -1].assign(99.0)
    before = workers.errors[1]
    assert workers.rounds(12).errors[1] < 1e-4 * before


def test_a_worker_whose_numbers_overflow_moves_no_neighbour():
    given = values(4)
    given[1][1][0, 0] = np.inf
    workers = Workers(gc.Gossip("ring", rank=1), given).rounds(3)
    mean = np.mean([workers.values[i][1].numpy() for i in (0, 2, 3)], 0)
    expected = np.mean([given[i][1] for i in (0, 2, 3)], 0)
    bound = rounding(np.abs(mean).max(), terms=3, steps=3)
    np.testing.assert_allclose(mean, expected, rtol=0, atol=bound)
    assert np.any(workers.values[2][1].numpy() != given[2][1])
    for own, before in zip(workers.values[1], given[1], strict=True):
        np.testing.assert_array_equal(own, before)
    workers.values[1][1].assign(given[0][1])
    assert workers.rounds(1).values[1][0].numpy()[0, 0, 0, 0] != given[1][0][0, 0, 0, 0]


RATE, ROWS, STEPS = 2.0**-5, 2, 6


def trained(learners, settings, steps=STEPS):
    """Returns learners and their batches, whose gradients are small integers, halved."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(4, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((3,)), dense])
    model.compile(keras.optimizers.SGD(RATE), lambda y, out: tf.reduce_sum(y * out, -1))
    rng = np.random.default_rng(1)
    batches = [
        [rng.integers(-4, 5, (ROWS * learners, n)).astype("float32") for n in (3, 4)]
        for _ in range(steps)
    ]
    own = gc.simulation.Learners(model, learners, local_steps=settings)
    for x, y in batches:
        own.train_on_batch(x, y)
    return own, batches


def gradients(x, y, learner):
    x, y = (part[learner * ROWS : (learner + 1) * ROWS] for part in (x, y))
    return [x.T @ y / ROWS, y.sum(0) / ROWS]


def weights_of(learners):
    return [[part.numpy() for part in own[:2]] for own in learners._rounds._each]


@pytest.mark.parametrize("size", [4, 5])
def test_learners_agree_with_noloco(size):
    outer = keras.optimizers.SGD(0.5, momentum=0.5)
    settings = gc.Gossip("random_pairs", rank=None, steps=2, outer=outer)
    learners, batches = trained(size, settings)
    zeros = [[np.zeros((3, 4)), np.zeros(4)] for _ in range(size)]
    oracle = NoLoCo(zeros, rate=0.5, momentum=0.5)
    fast = [list(own) for own in oracle.slow]
    seen = set()
    for step, (x, y) in enumerate(batches):
        for learner, own in enumerate(fast):
            pairs = zip(own, gradients(x, y, learner), strict=True)
            fast[learner] = [value - RATE * gradient for value, gradient in pairs]
        if step % 2:
            time = tf.constant(1 + step // 2)
            messages = learners._rounds._messages
            partners = [int(one.partners(time)[0]) for one in messages]
            assert sum(i == j for i, j in enumerate(partners)) == size % 2
            seen.add(tuple(partners))
            oracle.round(fast, partners)
            fast = [list(own) for own in oracle.slow]
    assert len(seen) > 1
    # Float32 holds all numbers of few bits exactly, but not the fifths of 5 learners' losses.
    bound = rounding(1.0, terms=ROWS, steps=STEPS) if size % 2 else 0.0
    for own, expected in zip(weights_of(learners), oracle.slow, strict=True):
        for value, other in zip(own, expected, strict=True):
            np.testing.assert_allclose(value, other, rtol=0, atol=bound)
    learners.synchronize()
    for variable, *of_all in zip(learners.model.trainable_variables, *oracle.slow, strict=True):
        bound = rounding(np.abs(of_all).max(), terms=size + ROWS, steps=STEPS)
        np.testing.assert_allclose(variable, np.mean(of_all, 0), rtol=0, atol=bound)


def test_a_learner_whose_weights_overflow_goes_back_to_the_start_of_its_round():
    settings = gc.Gossip("ring", rank=None, steps=2)
    learners, _ = trained(2, settings, steps=2)
    (before, _), _ = weights_of(learners)  # both learners have the mean
    x, y = np.ones((4, 3), "float32"), np.ones((4, 4), "float32")
    learners.train_on_batch(x, y)
    learners._rounds._each[1][0] += np.inf
    learners.train_on_batch(x, y)
    # The first learner has taken two steps, the second learner none; the mean has moved by one.
    for kernel, _ in weights_of(learners):
        np.testing.assert_array_equal(kernel, before - RATE)
    y[2:] = np.nan
    assert not learners.train_on_batch(x, y).finite
    assert int(learners.exchange.skipped_steps) == 1


def test_steps_report_the_bytes_of_a_learner():
    learners, _ = trained(4, gc.Gossip("ring", rank=1), steps=2)
    x, y = np.ones((8, 3), "float32"), np.ones((8, 4), "float32")
    reports = [learners.train_on_batch(x, y) for _ in range(2)]
    # Each of two neighbours gets the rank, a factor of rows or of columns, and the bias.
    assert [report.payload_bytes for report in reports] == [2 * 4 * (1 + n + 4) for n in (3, 4)]
    assert [report.sent_bytes for report in reports] == [2 * 4 * (1 + n + 4) for n in (3, 4)]
    assert reports[0].dense_bytes == 4 * 16


def test_a_message_for_resnet_20_is_59_times_smaller_than_its_weights():
    kernels = [(3, 3, 3, 16)]
    for width, before in ((16, 16), (32, 16), (64, 32)):
        kernels += [(3, 3, before, width), *[(3, 3, width, width)] * 5]
    norms = [(shape[-1],) for shape in kernels for _ in range(2)]
    shapes = [*kernels, *norms, (64, 10), (10,)]
    messages = Messages(gc.Gossip("ring", rank=1), shapes, 8, 0)
    partners = messages.partners(tf.constant(1))
    sent = [int(messages.sent(partners, rows=rows)[0].sent_bytes) for rows in (True, False)]
    dense = 4 * sum(int(np.prod(shape)) for shape in shapes)
    assert round(dense / (np.mean(sent) / len(partners))) == 59


def test_impossible_settings_are_refused():
    for settings, message in (
        ({"graph": "star"}, "expected as graph one of ring, torus"),
        ({"rank": 0}, "expected a whole number as rank"),
        ({"steps": "auto"}, "needs a vote"),
        ({"steps": 0}, "expected a whole number of steps"),
        ({"diffusion": 2.0}, "above 0 and below 2"),
    ):
        with pytest.raises(ValueError, match=message):
            gc.Gossip(**settings)
    with pytest.raises(ValueError, match="no share in its own mean"):
        gc.Gossip("ring", diffusion=1.5).share(4)
    with pytest.raises(ValueError, match="'top_k' would exchange nothing"):
        gc.CompressedOptimizer("sgd", "top_k", local_steps=gc.Gossip())
    optimizer = gc.CompressedOptimizer("sgd", "top_k", local_steps=gc.Gossip(warmup_steps=2))
    assert optimizer.compressor.name == "top_k"


def test_the_config_restores_the_settings():
    outer = keras.optimizers.SGD(0.7, momentum=0.5)
    settings = gc.Gossip("random_pairs", None, [(0, 1), (9, 4)], outer, 3, 0.5)
    optimizer = gc.CompressedOptimizer("sgd", local_steps=settings)
    again = gc.CompressedOptimizer.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert isinstance(again.local_steps, gc.Gossip)
    assert settings_of(settings.get_config()).facts() == settings.facts()
    assert again.outer_optimizer.momentum == 0.5
