"""Tests jobs of other numbers of workers that resume from a save within a round."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close
from tests.distributed.local_learners import RATE, SHAPES, gradients
from tests.distributed.local_training import Trained
from tests.ranks import RANK, SIZE, argument, report
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
IN_FRAGMENTS = [(0, 1), (3, 3), (7, 1)]


def rounds_of(schedule, fragments=1):
    """Returns variables that are exchanged by a schedule, and their checkpoint."""
    settings = gc.LocalSteps(schedule, fragments=fragments)
    trained = Trained("top_k(density=0.1)", lambda: settings)
    return trained, trained.checkpoint()


def save(name, *arguments):
    trained, checkpoint = rounds_of(*arguments)
    trained.on(gradients(4))
    checkpoint.write(f"{FOLDER}/worker_{RANK}/{name}")
    return trained.seen()


def go_on(path, *arguments):
    trained, checkpoint = rounds_of(*arguments)
    checkpoint.read(f"{FOLDER}/{path}").assert_existing_objects_matched()
    restored = trained.seen()
    trained.on(gradients(3, seed=5, workers=SIZE)).optimizer.synchronize()
    return {"restored": restored, "end": trained.seen()}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Runs a job of two workers that saves within a round, and three workers that resume."""
    folder = tmp_path_factory.mktemp("resumed")
    two = results(run_workers(PROGRAM, 2, [folder]))
    go_on_alone(folder)
    return two, results(run_workers(PROGRAM, 3, [folder]))


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


def test_one_worker_in_between_keeps_the_place_in_the_schedule(resumed):
    _, three = resumed
    for job in three:
        seen = job["alone"]
        assert seen["restored"]["exchanges"] == 2
        assert seen["end"]["exchanges"] == 2 + 3
        assert seen["end"]["values"] == three[0]["alone"]["end"]["values"]


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


if __name__ == "__main__":
    FOLDER = argument(1)
    if SIZE == 2:
        seen = {
            "rounds": save("rounds", [(0, 3), (4, 1)]),
            "fragments": save("fragments", IN_FRAGMENTS, 2),
        }
    else:  # two workers have taken four steps, and one worker two more
        seen = {
            "rounds": go_on("worker_0/rounds", [(0, 3), (4, 1)]),
            "alone": go_on("alone", [(0, 3), (6, 1)]),
            "fragments": go_on("worker_0/fragments", IN_FRAGMENTS, 3),
            "whole": go_on("worker_0/fragments", IN_FRAGMENTS),
        }
    report(seen)
