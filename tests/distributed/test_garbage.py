"""Python's garbage collection while a strategy's step is traced."""

from tests.workers import run_workers

PROGRAM = """
import gc as garbage
import tensorflow as tf
import tf_gradcomp as gc

strategy = gc.MultiWorkerMirroredStrategy()
seen = []

def step(fails):
    seen.append(garbage.isenabled())
    if fails:
        raise ValueError("the program's own")

def run_eagerly(fails):
    strategy.run(step, args=(fails,))

run_traced = tf.function(run_eagerly, autograph=False)
for run in (run_traced, run_eagerly):
    for fails in (False, True):
        try:
            run(fails)
        except ValueError as error:
            assert "the program's own" in str(error)
        seen.append(garbage.isenabled())
assert seen == 2 * [False, True] + 2 * [True, True], seen
garbage.disable()
tf.function(lambda: run_eagerly(False), autograph=False)()
assert not garbage.isenabled()
"""


def test_no_garbage_is_collected_during_a_trace_and_then_as_before():
    run_workers(PROGRAM, 1)
