"""The names of `tf_private` that need several workers, one by one, then stock Keras."""

import keras
import numpy as np
import tensorflow as tf
from common import dense_model, digits
from tensorflow.python.eager import context

from tests.ranks import RANK, report
from tf_gradcomp.private import tensorflow as tf_private

with tf_private.coordinating(20.5):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()


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

if __name__ == "__main__":
    seen = {}
    for check in CHECKS:
        try:
            seen[check.__name__] = check()
        except Exception as error:  # all workers continue with the next
            seen[check.__name__] = f"{type(error).__name__}: {error}"
    report(seen)
