"""Saves on two workers within a round; three workers resume from it, and from a save of one:
FOLDER."""

from local_training import Trained, gradients

import tf_gradcomp as gc
from tests.ranks import RANK, SIZE, argument, report

FOLDER = argument(1)
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
    trained.on(gradients(3, seed=5)).optimizer.synchronize()
    return {"restored": restored, "end": trained.seen()}


if SIZE == 2:
    report(
        {
            "rounds": save("rounds", [(0, 3), (4, 1)]),
            "fragments": save("fragments", IN_FRAGMENTS, 2),
        }
    )
else:
    # Two workers have taken four steps, and one worker two more.
    report(
        {
            "rounds": go_on("worker_0/rounds", [(0, 3), (4, 1)]),
            "alone": go_on("alone", [(0, 3), (6, 1)]),
            "fragments": go_on("worker_0/fragments", IN_FRAGMENTS, 3),
            "whole": go_on("worker_0/fragments", IN_FRAGMENTS),
        }
    )
