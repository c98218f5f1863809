"""Settings of the inner optimizer, and faults, in local steps: compared with NumPy and Keras."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close, rounding, training
from tests.distributed.local_learners import (
    RATE,
    SHAPES,
    KeepsNorms,
    Learners,
    assert_equal,
    gradients,
)
from tests.replicas import mirrored, stepper
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "local_settings.py"
CLIPS = {"clipvalue": 4.0, "clipnorm": 40.0, "global_clipnorm": 60.0}


@pytest.fixture(scope="module")
def jobs():
    return [result(worker) for worker in run_workers(PROGRAM, 2)]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Runs a job of two workers that saves within a round, and three workers that resume."""
    folder = tmp_path_factory.mktemp("resumed")
    program = PROGRAM.with_name("local_resume.py")
    two = [result(worker) for worker in run_workers(program, 2, [folder])]
    go_on_alone(folder)
    return two, [result(worker) for worker in run_workers(program, 3, [folder])]


def go_on_alone(folder):
    """Takes two updates of two batches each where two workers have saved, and saves."""
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES]
    inner = keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)
    optimizer = gc.CompressedOptimizer(inner, "top_k(density=0.1, momentum=0.5)", local_steps=3)
    optimizer.build(variables)
    values = [variable.value for variable in variables]
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, variables=values)
    checkpoint.read(f"{folder}/worker_0/rounds")
    velocities = optimizer.exchange.state["velocity"]
    for velocity in velocities:
        velocity.assign(tf.ones_like(velocity))
    for _ in range(4):
        optimizer.apply([np.zeros(shape, "float32") for shape in SHAPES])
    assert not any(np.any(velocity) for velocity in velocities)  # it was of differences of weights
    checkpoint.write(f"{folder}/alone")


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
        expected = [rest - one for one, rest in zip(total, scaled(steps[1][1]), strict=True)]
        assert_equal(job["scaled"]["values"], expected)
    # The scale doubles after two finite steps, and is halved by the one that is not.
    assert [job["scaled"]["scale"] for job in jobs] == [64.0, 16.0]
    assert [job["scaled"]["skipped"] for job in jobs] == [0, 1]


def scaled(shares):
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


def test_one_worker_in_between_keeps_the_place_in_the_schedule(resumed):
    _, three = resumed
    for job in three:
        seen = job["alone"]
        assert seen["restored"]["exchanges"] == 2
        assert seen["end"]["exchanges"] == 2 + 3
        assert seen["end"]["values"] == three[0]["alone"]["end"]["values"]


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


# The exchanges before: a whole round, and one that the save ends early; or three steps with two
# fragments each, and an early end of both. The exchanges after: three rounds of one step; a cycle
# of three steps with two fragments, and an early end of the first; or a round of three steps.
@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "before", "after"),
    [("rounds", "rounds", 2, 3), ("fragments", "fragments", 8, 3), ("fragments", "whole", 8, 1)],
)
def test_three_workers_resume_from_a_save_of_two_within_a_round(
    resumed, saved_by, resumed_by, before, after
):
    two, three = [worker[saved_by] for worker in resumed[0]], [w[resumed_by] for w in resumed[1]]
    saved = two[0]
    assert saved["exchanges"] == before
    assert np.any(saved["residuals"][0])
    total = np.float32(two[0]["residuals"][0]) + np.float32(two[1]["residuals"][0])
    end = [job["end"] for job in three]
    for job in three:
        assert job["restored"]["values"] == saved["values"]
        assert job["restored"]["iterations"] == saved["iterations"]
        assert_close(job["restored"]["residuals"][0], total / 3)
        assert job["end"]["values"] == end[0]["values"]
        assert job["end"]["exchanges"] == before + after
    # Sent values plus residuals equal the steps of plain SGD.
    steps = gradients(3, seed=5, workers=3)
    for i in range(2):
        before = saved["values"][i] - sum(np.float64(one["residuals"][i]) for one in two)
        after = end[0]["values"][i] - sum(np.float64(one["residuals"][i]) for one in end)
        moved = -RATE * sum(
            np.float64(shares[i]) for step_gradients in steps for shares in step_gradients
        )
        assert_close(after - before, moved, terms=3 * 3, steps=3, scale=8.0)
