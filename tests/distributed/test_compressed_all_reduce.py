"""`gc.CompressedAllReduce` is the strategy's `CrossDeviceOps`: gradients are reduced by it."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.workers import result, run_workers

KINDS = {"workers": 2, "devices": 1}  # and the number of processes


@pytest.fixture(scope="module", params=KINDS)
def found(request):
    """Reports of the workers; the program is at the end of this file."""
    return [
        result(worker)
        for worker in run_workers(Path(__file__), KINDS[request.param], [request.param])
    ]


def test_the_strategy_reduces_by_compressed_all_reduce(found):
    for worker in found:
        assert worker["class"] == "CompressedAllReduce"
        assert worker["bases"] == [True, True]


@pytest.mark.parametrize("case", ["fit", "optimizer in a loop", "reduce_gradients"])
def test_gradients_pass_through_batch_reduce(found, case):
    for worker in found:
        gradients = [names for names, compressed in worker[case]["passages"] if compressed]
        assert gradients
        assert all(names == worker[case]["variables"] for names in gradients)
        assert worker[case]["exchanges"] > 0


def test_other_values_pass_through_and_stay_exact(found):
    """Statistics of synchronized BatchNormalization, a program's sums and `Strategy.reduce`."""
    for worker in found:
        passages = worker["others"]["passages"]
        assert passages
        assert not any(compressed for _, compressed in passages)
        assert worker["others"]["sums"] == worker["others"]["expected"]
        assert worker["others"]["exchanges"] == 0


def test_an_update_is_that_of_compressed_optimizer(found):
    for worker in found:
        if worker["by wrapper"]:  # one process can have both, one after the other
            assert worker["fit"]["weights"] == worker["by wrapper"]


def test_workers_have_equal_weights(found):
    for worker in found:
        for case in ("fit", "optimizer in a loop"):
            assert worker[case]["weights"] == found[0][case]["weights"]


def main(kind):
    import keras
    import tensorflow as tf

    import tf_gradcomp as gc
    from tests.ranks import report

    method = gc.compressors.AdaComp(bin_sizes=4)
    passages = []

    def recorded(ops, reduce_op, pairs, options=None):
        step = ops._step.get()
        names = [variable.name for variable in step.variables] if step else []
        passages.append((names, step is not None))
        return batch_reduce(ops, reduce_op, pairs, options)

    batch_reduce = gc.CompressedAllReduce.batch_reduce
    gc.CompressedAllReduce.batch_reduce = recorded
    if kind == "workers":
        strategy = gc.MultiWorkerMirroredStrategy(compressor=method)
    else:
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, logical)
        ops = gc.CompressedAllReduce(method)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)
    ops = strategy.extended._cross_device_ops
    x = np.random.RandomState(0).normal(size=(48, 6)).astype("float32")
    y = x[:, :1] * 2

    def network(*extra):
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(16, "tanh", name="hidden")
        return keras.Sequential([keras.Input((6,)), hidden, *extra, keras.layers.Dense(1)])

    def fitted(optimizer):
        model = network()
        model.compile(optimizer, "mse", metrics=["mae"])
        model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
        return model

    def findings(model):
        exchange = ops.find_exchange(model.trainable_variables)
        seen, passages[:] = list(passages), []
        weights = [weight.tolist() for weight in model.get_weights()]
        exchanges = int(exchange.exchanges) if exchange else 0
        names = [variable.value.name for variable in model.trainable_variables]
        found = {"passages": seen, "weights": weights, "exchanges": exchanges}
        return {**found, "variables": names}

    with strategy.scope():
        model = fitted(keras.optimizers.SGD(0.1, momentum=0.9))
        by_fit = findings(model)

    with strategy.scope():
        looped, optimizer = network(), keras.optimizers.SGD(0.1)  # built by its first step

    @tf.function
    def step(apply):
        def replica_step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(looped(x[:8]) ** 2) / strategy.num_replicas_in_sync
            return apply(tape.gradient(loss, looped.trainable_variables))

        return strategy.run(replica_step)

    trained = looped.trainable_variables
    step(lambda gradients: optimizer.apply(gradients, trained))
    in_loop = findings(looped)
    step(lambda gradients: ops.reduce_gradients(gradients, trained))
    by_hand = findings(looped)

    with strategy.scope():
        norm = keras.layers.BatchNormalization(synchronized=True)
        normalized = network(norm)

    @tf.function
    def others():
        def replica_step():
            context = tf.distribute.get_replica_context()
            rank = tf.cast(context.replica_id_in_sync_group, tf.float32)
            normalized(x[:8], training=True)
            sums = context.all_reduce("SUM", [rank + 0.1, tf.ones(3) * rank])
            return [*sums, rank]

        *sums, rank = strategy.run(replica_step)
        sums = [strategy.experimental_local_results(total)[0] for total in sums]
        return [*sums, strategy.reduce("MEAN", rank, axis=None)]

    sums = [total.numpy().tolist() for total in others()]
    expected = [float(np.float32(0.1) + np.float32(1.1)), [1.0] * 3, 0.5]
    rest = {**findings(normalized), "sums": sums, "expected": expected}

    by_wrapper = None
    if kind == "devices":
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            inner = keras.optimizers.SGD(0.1, momentum=0.9)
            by_wrapper = fitted(gc.CompressedOptimizer(inner, method)).get_weights()
            by_wrapper = [weight.tolist() for weight in by_wrapper]

    report(
        {
            "class": type(ops).__name__,
            "bases": [
                isinstance(ops, gc.CompressedAllReduce),
                isinstance(ops, tf.distribute.CrossDeviceOps),
            ],
            "fit": by_fit,
            "optimizer in a loop": in_loop,
            "reduce_gradients": by_hand,
            "others": rest,
            "by wrapper": by_wrapper,
        }
    )


if __name__ == "__main__":
    main(sys.argv[1])
