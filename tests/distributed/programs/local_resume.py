"""Two workers save within a round; three go on from there, and from a save of one: FOLDER."""

from local_training import Trained, gradients

import tf_gradcomp as gc
from tests.ranks import RANK, SIZE, argument, report

FOLDER = argument(1)


def rounds_until(step):
    """Returns variables that are exchanged in each step from this one on, and their checkpoint."""
    trained = Trained("top_k(density=0.1)", lambda: gc.LocalSteps([(0, 3), (step, 1)]))
    return trained, trained.checkpoint()


def go_on(path, step):
    trained, checkpoint = rounds_until(step)
    checkpoint.read(path).assert_existing_objects_matched()
    restored = trained.seen()
    return {"restored": restored, "end": trained.on(gradients(3, seed=5)).seen()}


if SIZE == 2:
    trained, checkpoint = rounds_until(4)
    trained.on(gradients(4))
    checkpoint.write(f"{FOLDER}/worker_{RANK}/rounds")
    report(trained.seen())
else:
    # Two workers have taken four steps, and one worker two more.
    report({**go_on(f"{FOLDER}/worker_0/rounds", 4), "alone": go_on(f"{FOLDER}/alone", 6)})
