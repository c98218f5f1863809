"""Tests each name of `tf_private` that needs several workers, and stock Keras.

When a test here fails, a release of TensorFlow or Keras has changed what its name says.
"""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests.distributed.common import dense_model, digits
from tests.ranks import RANK, report
from tests.workers import results, run_workers
from tf_gradcomp.private import tensorflow as tf_private

PROGRAM = Path(__file__)  # each worker runs this file


def replica_call(fn):
    """Returns the result of `fn(context)` in this worker's replica, in a graph."""
    run = tf.function(lambda: strategy.run(lambda: fn(tf.distribute.get_replica_context())))
    return run().numpy()


def coordinating():
    """Returns the milliseconds of silence after which a worker is lost."""
    return context.context().coordination_service.heartbeat_timeout_in_ms


def all_gather_of():
    def gather(context):
        launcher = tf_private.launcher(strategy, tf_private.local_replica_id(context))
        return tf_private.all_gather_of(launcher)(tf.constant([RANK, 10]))

    return replica_call(gather)


def all_reduce_of():
    def reduce(context):
        launcher = tf_private.launcher(strategy, tf_private.local_replica_id(context))
        return tf_private.all_reduce_of(launcher)(tf.constant([RANK + 1.0, 10.0]))

    return replica_call(reduce)


def launcher_of_workers():
    launcher = tf_private.launcher_of_workers(strategy)
    return tf_private.all_reduce_of(launcher)(tf.constant([RANK + 1.0, 10.0])).numpy()


def sum_over_workers():
    total = tf.function(lambda: tf_private.sum_over_workers(strategy, tf.constant([RANK + 1.0, 8])))
    return total().numpy()


def rank():
    return tf_private.rank(strategy, 0)


def launch_broadcast():
    """From each worker in turn, as a step says."""

    def broadcast(context, root):
        launcher = tf_private.launcher(strategy, tf_private.local_replica_id(context))
        mine = tf.constant([RANK, 10 + RANK])
        return tf_private.launch_broadcast(launcher, mine, tf.equal(root, RANK))

    run = tf.function(
        lambda root: strategy.run(lambda: broadcast(tf.distribute.get_replica_context(), root))
    )
    return [run(tf.constant(step % 2)).numpy() for step in range(3)]


def allow_collectives_in_loops():
    """Sums in a function that is called from a branch within a loop, as Keras does."""
    tf_private.allow_collectives_in_loops(strategy)

    @tf.function
    def step():
        return strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM, tf.constant(1.0)
            )
        )

    @tf.function
    def loop():
        total = 0.0
        for i in tf.range(3):
            if i >= 0:
                total += step()
        return total

    return loop().numpy()


def exchange_no_empty_tensors():
    """The shapes of a sum and of gathers of nothing."""
    tf_private.exchange_no_empty_tensors(strategy)
    nothing = tf.constant(np.zeros((0, 3), np.float32))
    gather = tf.function(lambda value: strategy.gather(strategy.run(lambda: value), axis=0))
    some = tf.TensorSpec([None, 3])
    gathered = [gather(nothing), gather.get_concrete_function(some)(nothing)]
    gathered.append(gather.get_concrete_function(some)(tf.ones([1 + RANK, 3])))
    total = strategy.reduce("SUM", nothing, axis=None)
    return [list(one.shape) for one in (total, *gathered)]


def broadcast_no_empty_variables():
    """The shape of a variable of nothing, and the value of another one."""
    tf_private.broadcast_no_empty_variables(strategy)
    with strategy.scope():
        nothing = tf.Variable(np.zeros((0, 3), np.float32))
        created = tf.Variable(lambda: 5 + RANK)
    return [list(nothing.shape), created.numpy()]


def broadcasting_no_variables():
    """The values of a variable that is not broadcast, and of one that is."""
    with strategy.scope():
        with tf_private.broadcasting_no_variables(strategy):
            local = tf.Variable(lambda: 5 + RANK)
        created = tf.Variable(lambda: 5 + RANK)
    return [local.numpy(), created.numpy()]


def host_all_gather():
    return tf_private.host_all_gather(strategy, tf.constant([RANK])).numpy()


def timeout_seconds():
    return tf_private.timeout_seconds(strategy)


def in_multi_worker_mode():
    return tf_private.in_multi_worker_mode(strategy)


def is_collective():
    return tf_private.is_collective(strategy)


def announced():
    """Returns the results of three barriers; one worker misses the second."""
    tf_private.announce(f"test/{RANK}", f"by {RANK}")
    logged = [tf_private.announced(f"test/{rank}", 60) for rank in range(2)]
    come = [tf_private.reach_barrier("test/first", 60)]
    come.append(RANK == 0 and tf_private.reach_barrier("test/second", 0.5))
    come.append(tf_private.reach_barrier("test/third", 60))
    tf_private.withdraw(f"test/{RANK}")
    nothing = [tf_private.announced(f"test/{key}", 0.1) for key in ("nothing", RANK)]
    tf_private.announce(f"test/{RANK}", "again")
    return {"told": logged, "come": come, "nothing": nothing}


def on_collectives():
    """Returns the calls for sums and a gather, eagerly and in a graph."""
    turns = []
    tf_private.on_collectives(strategy, lambda tensors: turns.append(len(tensors)))
    value = tf.constant([1.0])
    strategy.reduce("SUM", value, axis=None)
    tf_private.host_all_gather(strategy, tf.constant([RANK]))
    tf.function(lambda: tf_private.sum_over_workers(strategy, value))()
    replica_call(lambda context: context.all_reduce("SUM", value))
    return list(turns)


def stock_fit():
    """The error that Keras' fit ends with under TensorFlow's own strategy."""
    with strategy.scope():
        model = dense_model()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    try:
        model.fit(*digits(64), batch_size=32, epochs=1, verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def on_initial_values():
    """Broadcasts the first worker's value plus one. All later variables are affected, so this is
    last."""
    tf_private.on_initial_values(strategy, lambda value, broadcast: broadcast(value) + 1)
    with strategy.scope():
        return tf.Variable(lambda: tf.constant([10.0 + RANK])).numpy()


CHECKS = (
    coordinating,
    is_collective,
    in_multi_worker_mode,
    host_all_gather,
    timeout_seconds,
    all_gather_of,
    all_reduce_of,
    launcher_of_workers,
    sum_over_workers,
    rank,
    launch_broadcast,
    allow_collectives_in_loops,
    exchange_no_empty_tensors,
    broadcast_no_empty_variables,
    broadcasting_no_variables,
    announced,
    on_collectives,
    stock_fit,
    on_initial_values,
)


pytestmark = [pytest.mark.oldest, pytest.mark.quick]


@pytest.fixture(scope="module")
def workers():
    return results(run_workers(PROGRAM, 2))


def test_is_collective(workers):
    assert [worker["is_collective"] for worker in workers] == [True, True]
    assert not tf_private.is_collective(tf.distribute.get_strategy())


def test_in_multi_worker_mode(workers):
    assert [worker["in_multi_worker_mode"] for worker in workers] == [True, True]


def test_host_all_gather(workers):
    assert [worker["host_all_gather"] for worker in workers] == [[0, 1]] * 2


def test_timeout_seconds(workers):
    assert [worker["timeout_seconds"] for worker in workers] == [0, 0]


def test_launcher_and_all_gather_of(workers):
    assert [worker["all_gather_of"] for worker in workers] == [[0, 10, 1, 10]] * 2


def test_coordinating(workers):
    assert [worker["coordinating"] for worker in workers] == [20500] * 2


def test_launcher_of_workers(workers):
    assert [worker["launcher_of_workers"] for worker in workers] == [[3, 20]] * 2


def test_sum_over_workers(workers):
    assert [worker["sum_over_workers"] for worker in workers] == [[3, 16]] * 2


def test_all_reduce_of(workers):
    assert [worker["all_reduce_of"] for worker in workers] == [[3, 20]] * 2


def test_rank(workers):
    assert [worker["rank"] for worker in workers] == [0, 1]


def test_exchange_no_empty_tensors(workers):
    shapes = [[0, 3], [0, 3], [0, 3], [3, 3]]
    assert [worker["exchange_no_empty_tensors"] for worker in workers] == [shapes] * 2


def test_broadcast_no_empty_variables(workers):
    assert [worker["broadcast_no_empty_variables"] for worker in workers] == [[[0, 3], 5]] * 2


def test_broadcasting_no_variables(workers):
    assert [worker["broadcasting_no_variables"] for worker in workers] == [[5, 5], [6, 5]]


def test_launch_broadcast(workers):
    from_each = [[0, 10], [1, 11], [0, 10]]
    assert [worker["launch_broadcast"] for worker in workers] == [from_each] * 2


def test_allow_collectives_in_loops(workers):
    assert [worker["allow_collectives_in_loops"] for worker in workers] == [6, 6]


def test_on_initial_values(workers):
    assert [worker["on_initial_values"] for worker in workers] == [[11], [11]]


def test_stock_keras_still_fails_under_the_stock_strategy(workers):
    # keras-team/keras#20585. When this fails, our strategy no longer needs its patch of `reduce`.
    for worker in workers:
        assert worker["stock_fit"] is not None
        assert "unsupported type" in worker["stock_fit"]


def test_announce_withdraw_and_all_come(workers):
    for worker in workers:
        logged, come, nothing = worker["announced"].values()
        assert (logged, come, nothing) == (["by 0", "by 1"], [True, False, True], [None, None])


def test_on_collectives(workers):
    assert [worker["on_collectives"] for worker in workers] == [[1] * 8] * 2


if __name__ == "__main__":
    with tf_private.coordinating(20.5):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    seen = {}
    for check in CHECKS:
        try:
            seen[check.__name__] = check()
        except Exception as error:  # all workers continue with the next
            seen[check.__name__] = f"{type(error).__name__}: {error}"
    report(seen)
