"""Two workers save in the middle of a round, and three go on: FOLDER."""

import tensorflow as tf
from local_training import Trained, gradients

import tf_gradcomp as gc
from tests.ranks import RANK, SIZE, argument, report

FOLDER = argument(1)
# Three workers exchange in each step, as they have taken four already.
trained = Trained("top_k(density=0.1)", lambda: gc.LocalSteps([(0, 3), (4, 1)]))
weights = [variable.value for variable in trained.variables]
checkpoint = tf.train.Checkpoint(optimizer=trained.optimizer, variables=weights)

if SIZE == 2:
    trained.on(gradients(4))
    checkpoint.write(f"{FOLDER}/worker_{RANK}/rounds")
    report(trained.seen())
else:
    checkpoint.read(f"{FOLDER}/worker_0/rounds").assert_existing_objects_matched()
    restored = trained.seen()
    report({"restored": restored, "end": trained.on(gradients(3, seed=5)).seen()})
