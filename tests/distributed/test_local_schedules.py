"""Tests jobs that resume with other local steps than the job that saved within a round."""

import functools
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.distributed.common import Setup
from tests.distributed.local_learners import RATE, SHAPES, assert_equal, gradients
from tests.distributed.local_training import Trained
from tests.ranks import RANK, argument, exchange_of, report, values
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
TOP_K = "top_k(density=0.1)"
BEFORE, AFTER = gradients(4), gradients(6, seed=5)
nesterov = functools.partial(keras.optimizers.SGD, 0.5, momentum=0.5, nesterov=True)
OUTERS = {
    "none": None,
    "plain": functools.partial(keras.optimizers.SGD, 0.5),
    "less momentum": functools.partial(keras.optimizers.SGD, 0.5, momentum=0.25, nesterov=True),
    "adagrad": functools.partial(keras.optimizers.Adagrad, 0.5),
    "adam": functools.partial(keras.optimizers.Adam, 0.5, epsilon=1.0),
}
LATER = {
    "longer": lambda: gc.LocalSteps(5),
    "warm-up": lambda: gc.LocalSteps(3, warmup_steps=100),
}


def rounds(steps, outer=None):
    return lambda: gc.LocalSteps(steps, outer and outer())


def saved(name, method, settings):
    """Returns a checkpoint after four steps, which ends a round, and the values in it."""
    trained = Trained(method, settings).on(gradients(4))
    return trained.checkpoint().write(f"{FOLDER}/{name}"), trained.seen()


def resumed(path, method, settings):
    """Six steps from a checkpoint."""
    trained = Trained(method, settings)
    trained.checkpoint().read(path)
    trained.on(AFTER).optimizer.synchronize()
    return trained.seen()


def by_schedule():
    """From a save within a round, and of a synchronous job; by other schedules."""
    path, saved_rounds = saved("rounds", TOP_K, rounds(3))
    after = {name: resumed(path, TOP_K, settings) for name, settings in LATER.items()}
    path, synchronous = saved("synchronous", TOP_K, lambda: None)
    settings = {"rounds": rounds(3), "warm-up": lambda: gc.LocalSteps(3, warmup_steps=6)}
    later = {name: resumed(path, TOP_K, make) for name, make in settings.items()}
    return {
        "rounds": saved_rounds,
        "of rounds": after,
        "synchronous": synchronous,
        "of synchronous": later,
    }


def by_outer():
    """From a save within a round of an outer optimizer; by other outer optimizers."""
    path, saved_rounds = saved("outer", "no_compression", rounds(3, nesterov))
    seen = {}
    for name, outer in OUTERS.items():
        try:
            seen[name] = resumed(path, "no_compression", rounds(3, outer))
        except ValueError as error:
            seen[name] = str(error)
    return {"saved": saved_rounds, "resumed": seen, "by_keras": by_keras()}


def by_keras():
    """The error of a Keras file that was saved with another outer optimizer."""
    models = []
    for outer in (nesterov, OUTERS["adagrad"]):
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            model.compile(gc.CompressedOptimizer("sgd", local_steps=rounds(3, outer)()), "mse")
            model.optimizer.build(model.trainable_variables)
        models.append(model)
    models[0].save_weights(f"{FOLDER}/of.weights.h5")
    models[0].load_weights(f"{FOLDER}/of.weights.h5")
    try:
        models[1].load_weights(f"{FOLDER}/of.weights.h5")
    except ValueError as error:
        return str(error)
    return None


def dense_model(local_steps):
    """Returns a model whose weights have the shapes of the gradients, and a function of steps."""
    with strategy.scope():
        layer = keras.layers.Dense(8, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((40,)), layer])
        inner = keras.optimizers.SGD(RATE)
        created = gc.CompressedOptimizer(inner, "no_compression", local_steps=local_steps())
        model.compile(created, "mse")
        created.build(model.trainable_variables)

    @tf.function
    def step(grads):
        strategy.run(lambda: created.apply(grads, model.trainable_variables))

    def take(steps):
        for step_gradients in steps:
            step([tf.constant(gradient) for gradient in step_gradients[RANK]])

    return model, take


def synchronous_between():
    """Jobs with, without and with local steps, each from the Keras file of the job before."""
    later = lambda: gc.LocalSteps([(0, 1), (6, 3)], nesterov(), warmup_steps=6)  # noqa: E731
    parts = [(rounds(3, nesterov), gradients(4)), (lambda: None, AFTER[:2]), (later, AFTER[2:])]
    path, seen = f"{FOLDER}/between_{RANK}.weights.h5", []
    for index, (settings, steps) in enumerate(parts):
        model, take = dense_model(settings)
        if index:
            model.load_weights(path)
        take(steps)
        model.save_weights(path)
        exchanges = exchange_of(model).exchanges
        seen.append({"values": values(model.trainable_variables), "exchanges": exchanges})
    return seen


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedules")
    return results(run_workers(PROGRAM, 2, [folder]))


def moved(*parts):
    """Returns how far plain SGD moves the weights in some steps."""
    steps = [step for part in parts for step in part]
    return [
        RATE * sum(g[i] for worker_gradients in steps for g in worker_gradients) for i in range(2)
    ]


def whole(workers, unit=1.0):
    """Returns the weights if no worker had a residual, whose unit is given."""
    waits = [sum(np.float32(worker["residuals"][i]) for worker in workers) for i in range(2)]
    assert np.any(waits[0])
    values = [np.float32(value) for value in workers[0]["values"]]
    return [
        value - unit * waiting_value for value, waiting_value in zip(values, waits, strict=True)
    ]


# The exchanges: of the save, and of the six steps that follow.
@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "exchanges"),
    [
        ("rounds", "longer", 2 + 2),  # a round of five steps, and one that ends early
        ("rounds", "warm-up", 2 + 2),  # no warm-up comes after the first round
        ("synchronous", "rounds", 4 + 2),
        ("synchronous", "warm-up", 4 + 2 + 2),  # two synchronous steps are left
    ],
)
def test_nothing_is_lost_where_the_schedule_changes(jobs, saved_by, resumed_by, exchanges):
    seen = [job["by_schedule"] for job in jobs]
    unit = 1.0 if saved_by == "rounds" else RATE
    assert_equal(whole([one[saved_by] for one in seen], unit), [-one for one in moved(BEFORE)])
    end = [one[f"of {saved_by}"][resumed_by] for one in seen]
    assert end[0]["values"] == end[1]["values"]
    assert exchanges == end[0]["exchanges"]
    assert_equal(whole(end), [-one for one in moved(BEFORE, AFTER)])


@pytest.mark.parametrize(
    ("name", "momentum"), [("none", None), ("plain", 0.0), ("less momentum", 0.25)]
)
def test_an_outer_optimizer_continues_with_what_it_can_use(jobs, name, momentum):
    values, velocity = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    # Before the save: rounds of three steps and, ended early, of one, by Nesterov's momentum.
    values, velocity = after_rounds(values, velocity, 0.5, BEFORE[:3], BEFORE[3:])
    for job in jobs:
        assert_equal(job["by_outer"]["saved"]["values"], values)
    if momentum is None:
        values = [value - step for value, step in zip(values, moved(AFTER), strict=True)]
    else:
        if momentum == 0:
            velocity = [np.zeros(shape) for shape in SHAPES]
        values, _ = after_rounds(values, velocity, momentum, AFTER[:3], AFTER[3:])
    for job in jobs:
        assert_equal(job["by_outer"]["resumed"][name]["values"], values)


def test_after_a_synchronous_job_local_steps_continue_the_schedule_with_new_momentum(jobs):
    zeros = [np.zeros(shape) for shape in SHAPES]
    # Rounds of three steps and, ended early by the save, of one; then two synchronous steps.
    first, _ = after_rounds(zeros, zeros, 0.5, BEFORE[:3], BEFORE[3:])
    second = [one - step for one, step in zip(first, moved(AFTER[:2]), strict=True)]
    # Six steps are done, so the warm-up is over, and rounds have three steps.
    third, _ = after_rounds(second, zeros, 0.5, AFTER[2:5], AFTER[5:])
    for job in jobs:
        seen = job["synchronous_between"]
        for one, expected in zip(seen, (first, second, third), strict=True):
            assert_equal(one["values"], expected)
        assert [one["exchanges"] for one in seen] == [2, 2 + 2, 2 + 2 + 2]


def after_rounds(values, velocity, momentum, *rounds):
    """Returns weights and velocity after rounds, by SGD(0.5, momentum, nesterov=True)."""
    for steps in rounds:
        change = moved(steps)
        velocity = [momentum * v - 0.5 * one for v, one in zip(velocity, change, strict=True)]
        ahead = [momentum * v - 0.5 * one for v, one in zip(velocity, change, strict=True)]
        values = [one + step for one, step in zip(values, ahead, strict=True)]
    return values, velocity


def test_the_state_of_another_class_of_outer_optimizer_is_refused(jobs):
    for job in jobs:
        seen = job["by_outer"]
        for error in (*(seen["resumed"][name] for name in ("adagrad", "adam")), seen["by_keras"]):
            assert "state of an outer optimizer of another class than" in error


if __name__ == "__main__":
    FOLDER = argument(1)
    strategy = Setup("optimizer").strategy
    report(
        {
            "by_schedule": by_schedule(),
            "by_outer": by_outer(),
            "synchronous_between": synchronous_between(),
        }
    )
