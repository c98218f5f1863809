"""Settings of the inner optimizer, and faults, in local steps: compared with NumPy and Keras."""

import functools
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close, rounding, training
from tests.distributed.common import Setup, scalar
from tests.distributed.local_learners import (
    RATE,
    SHAPES,
    KeepsNorms,
    Learners,
    assert_equal,
    gradients,
)
from tests.distributed.local_training import Trained
from tests.ranks import RANK, exchange_of, report, values
from tests.replicas import mirrored, stepper
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file


def clipped():
    """Each worker clips its own gradients."""

    def trained(name):
        inner = functools.partial(keras.optimizers.SGD, RATE, **{name: CLIPS[name]})
        return Trained("no_compression", lambda: 3, inner).on(gradients(6))

    return {name: trained(name).seen() for name in CLIPS}


def scaled():
    """A loss scaler around: in the first round, worker 1 skips a step and halves its own scale."""
    steps = gradients(6)
    steps[1][1][0][0, 0] = np.inf
    trained = Trained(
        "no_compression",
        lambda: 3,
        scaler=lambda inner: keras.optimizers.LossScaleOptimizer(
            inner, 8.0, dynamic_growth_steps=2
        ),
    )
    seen = trained.on(steps).seen()
    return {**seen, "scale": scalar(trained.applies.dynamic_scale)}


def accumulates():
    """Worker 1 skips its second update, of which the first batch was not finite."""
    steps = gradients(8)
    steps[2][1][1][0] = np.nan
    trained = Trained(
        "no_compression",
        lambda: 2,
        lambda: keras.optimizers.Adam(2.0**-6, epsilon=1.0, gradient_accumulation_steps=2),
        keras.optimizers.LossScaleOptimizer,
    )
    return trained.on(steps).seen()


def overflows():
    """Worker 1's momentum overflows in the first round."""
    steps = gradients(6)
    steps[1][1][1][0] = 1e38
    trained = Trained("no_compression", lambda: 3, lambda: keras.optimizers.SGD(4.0, momentum=0.5))
    return [trained.on(steps[:3]).seen(), trained.on(steps[3:]).seen()]


def rising(step):
    return 2 if step < 4 else 3


def scheduled():
    """Rounds of 1, 1, 3 and 3 steps; and after two synchronous steps, of 2 and 3."""
    seen = []
    for settings in (gc.LocalSteps([(0, 1), (2, 3)]), gc.LocalSteps(rising, warmup_steps=2)):
        trained = Trained("no_compression", lambda settings=settings: settings)
        trained.on(gradients(8)).optimizer.synchronize()
        seen.append({**trained.seen(), "traces": trained.take.experimental_get_tracing_count()})
    return seen


def unlike():
    """The error of workers whose functions have one name, and differ from step 1,000 on."""

    def later(step):
        return 2 if step < 1000 + 100 * RANK else 3

    try:
        Trained("no_compression", lambda: gc.LocalSteps(later))
    except gc.WorkersDisagreeError as error:
        return str(error)
    return None


def nesterov():
    return keras.optimizers.SGD(0.5, momentum=0.75, nesterov=True)


def created():
    """The elements of all variables that an optimizer creates, in copies of the weights."""

    def copies(settings):
        elements = 0

        def counting(create, **arguments):
            nonlocal elements
            variable = create(**arguments)
            elements += int(np.prod(variable.shape))
            return variable

        with strategy.scope(), tf.variable_creator_scope(counting):
            weights = keras.Variable(np.zeros((100, 100), "float32"), aggregation="mean")
            inner = keras.optimizers.SGD(RATE)
            gc.CompressedOptimizer(inner, "adacomp", local_steps=settings()).build([weights])
        return elements / 100**2

    outer = functools.partial(keras.optimizers.SGD, 0.7, momentum=0.9)
    return [copies(s) for s in (lambda: None, lambda: 4, lambda: gc.LocalSteps(4, outer()))]


def statistics():
    """Two of the statistics of worker 1, of eight on each, have become infinite and NaN."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    for index, variable in enumerate(model.non_trainable_variables):
        variable.assign(np.arange(4) + 4 * index + 2.0 * RANK)
    if RANK == 1:
        model.non_trainable_variables[0].assign([np.inf, 3.0, np.nan, 5.0])
    trained = Trained("no_compression", lambda: 3)
    trained.optimizer.synchronize(model)
    return values(model.non_trainable_variables)


def in_float16():
    """`fit` with a loss scaler that Keras makes; worker 1 has one batch that overflows."""
    x, y = float16_data()
    setup = Setup("optimizer", "no_compression")
    model = setup.model(
        lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)]),
        lambda: setup.wrap(keras.optimizers.SGD(0.25), local_steps=3),
        policy="mixed_float16",
        loss="mse",
    )
    before = values(model.trainable_variables)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return {
        "before": before,
        "values": values(model.trainable_variables),
        "scale": scalar(model.optimizer.dynamic_scale),
        "skipped": scalar(exchange_of(model).skipped_steps),
    }


def float16_data():
    rng = np.random.default_rng(5)
    x = rng.integers(-8, 9, (48, 4)).astype("float32") / 8
    y = rng.integers(-8, 9, (48, 1)).astype("float32") / 8
    x[8 + 4] = 1e6  # worker 1's first row of the second batch
    return x, y


CLIPS = {"clipvalue": 4.0, "clipnorm": 40.0, "global_clipnorm": 60.0}


@pytest.fixture(scope="module")
def jobs():
    return results(run_workers(PROGRAM, 2))


@pytest.mark.parametrize("clip", CLIPS)
def test_each_worker_clips_its_own_gradients(jobs, clip):
    steps = gradients(6)
    learners = Learners(lambda: keras.optimizers.SGD(RATE, **{clip: CLIPS[clip]}))
    learners.round(steps[:3]).round(steps[3:])
    unclipped = Learners(lambda: keras.optimizers.SGD(RATE)).round(steps[:3]).round(steps[3:])
    assert np.abs(learners.values[0] - unclipped.values[0]).max() > RATE
    for job in jobs:
        for actual, expected in zip(job["clipped"][clip]["values"], learners.values, strict=True):
            # A norm sums up to 320 squares, and each step rounds the weight.
            assert_close(actual, expected, terms=320, steps=6, scale=1.0)


def test_loss_scaler_around_skips_a_step_of_one_worker_alone(jobs):
    steps = gradients(6)
    total = [RATE * sum(g[i] for step_gradients in steps for g in step_gradients) for i in range(2)]
    for job in jobs:
        expected = [rest - one for one, rest in zip(total, share_moves(steps[1][1]), strict=True)]
        assert_equal(job["scaled"]["values"], expected)
    # The scale doubles after two finite steps, and is halved by the one that is not.
    assert [job["scaled"]["scale"] for job in jobs] == [64.0, 16.0]
    assert [job["scaled"]["skipped"] for job in jobs] == [0, 1]


def share_moves(shares):
    return [RATE * share for share in shares]


def test_update_of_accumulated_gradients_is_skipped_on_one_worker_alone(jobs):
    steps = gradients(8)
    means = [
        [
            [(a + b) / 2 for a, b in zip(first, second, strict=True)]
            for first, second in zip(steps[i], steps[i + 1], strict=True)
        ]
        for i in (0, 2, 4, 6)
    ]
    means[1][1] = None
    learners = Learners(lambda: keras.optimizers.Adam(2.0**-6, epsilon=1.0))
    learners.round(means[:2]).round(means[2:])
    bound = training(gain=2.0**-6, terms=8, steps=8, gradients=16.0)
    for job in jobs:
        for actual, expected in zip(job["accumulates"]["values"], learners.values, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)
    assert [job["accumulates"]["skipped"] for job in jobs] == [0, 1]


def test_worker_whose_momentum_overflows_takes_part_in_the_next_round(jobs):
    steps = gradients(6)
    steps[1][1][1][0] = 1e38
    common = [np.zeros(shape, np.float32) for shape in SHAPES]
    momentum = [[np.zeros(shape, np.float32) for shape in SHAPES] for _ in range(2)]
    for step in range(2):
        local = [[one.copy() for one in common] for _ in range(2)]
        for step_gradients in steps[3 * step : 3 * step + 3]:
            for rank, shares in enumerate(step_gradients):
                for i, share in enumerate(shares):
                    with np.errstate(over="ignore"):
                        momentum[rank][i] = momentum[rank][i] / 2 - 4 * np.float32(2) * share
                    local[rank][i] = local[rank][i] + momentum[rank][i]
        if step == 0:
            assert not np.isfinite(local[1][1]).all()
            local[1] = common  # the round of worker 1 counts as none
            momentum[1] = [np.where(np.isfinite(m), m, 0.0) for m in momentum[1]]
        common = [np.mean(pair, 0, np.float32) for pair in zip(*local, strict=True)]
        for job in jobs:
            assert_equal(job["overflows"][step]["values"], common)


def test_rounds_have_the_lengths_of_a_schedule_in_one_trace(jobs):
    steps = gradients(8)
    learners = Learners(lambda: keras.optimizers.SGD(RATE))
    learners.round(steps[:1]).round(steps[1:2]).round(steps[2:5]).round(steps[5:])
    total = [sum(g[i] for step_gradients in steps for g in step_gradients) for i in range(2)]
    for job in jobs:
        by_list, by_function = job["scheduled"]
        assert_equal(by_list["values"], learners.values)
        assert by_list["rounds"] == 4
        # Two synchronous steps; rounds of 2 and of 3 steps, and one that has begun.
        assert_equal(by_function["values"], [-RATE * one for one in total])
        assert (by_function["rounds"], by_function["exchanges"]) == (3, 5)
        assert by_list["traces"] == by_function["traces"] == 1


def test_workers_with_schedules_of_one_name_disagree_unless_these_are_equal(jobs):
    for job in jobs:
        assert "local_steps' steps: worker 0 has 'unlike.<locals>.later, which" in job["unlike"]


def test_rounds_keep_as_many_copies_as_the_page_on_memory_says(jobs):
    for job in jobs:
        without, average, with_momentum = job["created"]
        assert average == pytest.approx(without + 1, abs=0.01)
        assert with_momentum == pytest.approx(without + 2, abs=0.01)


def test_statistics_that_are_not_finite_are_left_out_of_the_mean(jobs):
    for job in jobs:
        mean, variance = job["statistics"]
        assert mean == [0.0, (1.0 + 3.0) / 2, 2.0, (3.0 + 5.0) / 2]
        assert variance == [5.0, 6.0, 7.0, 8.0]


def test_fit_in_float16_skips_a_step_of_one_worker_alone(jobs):
    first, second = (job["in_float16"] for job in jobs)
    rng = np.random.default_rng(5)
    x, y = (rng.integers(-8, 9, (48, n)) / 8 for n in (4, 1))
    common = np.float64(first["before"][0])
    for begin in (0, 3):
        local = [common.copy(), common.copy()]
        for step in range(begin, begin + 3):
            for rank in range(2):
                rows = slice(8 * step + 4 * rank, 8 * step + 4 * rank + 4)
                if (step, rank) != (1, 1):
                    error = x[rows] @ local[rank] - y[rows]
                    local[rank] -= 0.25 * 2 * x[rows].T @ error / 4
        common = np.mean(local, 0)
    # A step rounds the products and sums of 4 inputs and of 4 rows in float16.
    bound = rounding(4.0, terms=16, steps=6, dtype="float16")
    np.testing.assert_allclose(first["values"][0], common, rtol=0, atol=bound)
    assert first["values"] == second["values"]
    assert (first["skipped"], second["skipped"]) == (0, 1)
    assert second["scale"] == first["scale"] / 2


def test_one_worker_that_accumulates_takes_no_rounds():
    strategy = mirrored(1)
    with strategy.scope():
        weights = keras.Variable(np.zeros(4, "float32"), aggregation="mean")
        inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        settings = gc.LocalSteps(3, keras.optimizers.SGD(0.5))
        optimizer = gc.CompressedOptimizer(inner, "no_compression", local_steps=settings)
        optimizer.build([weights])
    step = stepper(strategy, lambda grads: optimizer.apply(grads, [weights]), graph=True)
    for _ in range(2 * 4):
        step([[np.ones(4, "float32")]])
    with optimizer.exchange.hooks.rolled_back():
        np.testing.assert_array_equal(weights.numpy(), np.full(4, -4, "float32"))
    assert not optimizer.rounds.pending


def test_job_without_local_steps_takes_no_norms_of_differences_of_weights(tmp_path):
    models = []
    for steps in (3, None):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        inner = keras.optimizers.SGD(RATE)
        model.compile(gc.CompressedOptimizer(inner, KeepsNorms(), local_steps=steps), "mse")
        model.optimizer.build(model.trainable_variables)
        models.append(model)
    local, synchronous = models
    norms = local.optimizer.exchange.job_state["norms"]
    norms.assign(tf.ones_like(norms))
    local.optimizer._local_state()["residual_in_weight_units"].assign(True)
    local.save_weights(tmp_path / "of.weights.h5")
    synchronous.load_weights(tmp_path / "of.weights.h5")
    assert not np.any(synchronous.optimizer.exchange.job_state["norms"])


def test_job_without_an_outer_optimizer_tells_once_that_it_drops_the_state_of_one(tmp_path, caplog):
    caplog.set_level("WARNING", "tensorflow")
    created = []
    for steps in (gc.LocalSteps(3, keras.optimizers.SGD(0.5, momentum=0.5)), 3, None):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        optimizer = gc.CompressedOptimizer("sgd", "no_compression", local_steps=steps)
        model.compile(optimizer, "mse")
        model.optimizer.build(model.trainable_variables)
        created.append(model)
    with_outer, *others = created
    with_outer.save_weights(tmp_path / "of.weights.h5")
    with_outer.load_weights(tmp_path / "of.weights.h5")
    assert not caplog.text
    for model in others:
        caplog.clear()
        model.load_weights(tmp_path / "of.weights.h5")
        assert caplog.text.count("holds the state of an outer optimizer of local steps") == 1
        assert "cannot use" not in caplog.text


if __name__ == "__main__":
    strategy = Setup("optimizer").strategy
    checks = (
        *(clipped, scaled, accumulates, overflows, scheduled, unlike),
        *(created, statistics, in_float16),
    )
    report({check.__name__: check() for check in checks})
