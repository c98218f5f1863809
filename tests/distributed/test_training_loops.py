"""Custom training loops train as in one process with the whole batch, in few collectives.

A worker's argument is `stock`, `strategy`, `mirrored`, `mirrored ops` or `alone`. With `strategy`
and `mirrored ops`, the strategy compresses; with `stock` and `mirrored`, the optimizer does.
"""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import training
from tests.distributed.common import WHOLE, classification_loss, digits
from tests.ranks import RANK, SIZE, argument, digest, report
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
BATCH, STEPS = 32, 4


def collectives(function, *args):
    """Returns the op types of a call's collectives; of two branches, the longer counts."""
    graph = function.get_concrete_function(*args).graph.as_graph_def()
    bodies = {f.signature.name: f.node_def for f in graph.library.function}

    def count(nodes):
        found = []
        for node in nodes:
            if node.op.startswith("Collective") and "Group" not in node.op:
                found.append(node.op)
            called = [
                count(bodies[name])
                for value in node.attr.values()
                for name in filter(None, [value.func.name, *(f.name for f in value.list.func)])
                if name in bodies
            ]
            if node.op in ("If", "StatelessIf", "Case"):
                called = [max(called, key=len)]
            found += [op for ops in called for op in ops]
        return found

    return sorted(count(graph.node))


def make_strategy():
    if KIND == "stock":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if KIND == "strategy":
        return gc.MultiWorkerMirroredStrategy(compressor=WHOLE)
    if KIND.startswith("mirrored"):
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
        ops = gc.CompressedAllReduce(WHOLE) if KIND == "mirrored ops" else None
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)
    return tf.distribute.get_strategy()


def compressed(optimizer):
    if KIND not in ("stock", "mirrored"):
        return optimizer
    return gc.CompressedOptimizer(optimizer, WHOLE, precondition=None)


def network(*widths):
    layers = [keras.layers.Dense(width, activation="tanh") for width in widths]
    return keras.Sequential([keras.layers.Input((8,)), *layers, keras.layers.Dense(3)])


def local_batches():
    """Each replica's part of each batch, as values for `strategy.run`."""
    for step in range(STEPS):
        rows = np.arange(step * BATCH, (step + 1) * BATCH).reshape(REPLICAS, -1)
        yield strategy.experimental_distribute_values_from_function(
            lambda context, rows=rows: (
                tf.constant(x[rows[context.replica_id_in_sync_group]]),
                tf.constant(y[rows[context.replica_id_in_sync_group]]),
            )
        )


def gradients_of(model, batch):
    inputs, targets = batch
    with tf.GradientTape() as tape:
        loss = classification_loss()(targets, model(inputs))  # divided by the number of replicas
    return tape.gradient(loss, model.trainable_variables)


def step_by(model, optimizer):
    """A step that applies local gradients by the optimizer."""

    @tf.function
    def step(batch):
        def replica_step(batch):
            optimizer.apply(gradients_of(model, batch), model.trainable_variables)

        strategy.run(replica_step, [batch])

    return step


def by_optimizer():
    """`optimizer.apply` on local gradients."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, optimizer = network(16), compressed(keras.optimizers.Adam(1e-2, epsilon=0.05))
        optimizer.build(model.trainable_variables)
    step = step_by(model, optimizer)
    for batch in local_batches():
        step(batch)
    return {**values(model), "collectives": collectives(step, batch)}


def many_variables():
    """As above, with 20 variables, for the number of collectives."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, optimizer = network(*[4] * 9), compressed(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
    return {
        "variables": len(model.trainable_variables),
        "collectives": collectives(step_by(model, optimizer), next(local_batches())),
    }


def two_models():
    """Trains two models, each with its own optimizer, one after the other in a step."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        models = [network(16), network(5, 5)]
        optimizers = [
            compressed(keras.optimizers.Adam(1e-2, epsilon=0.05)),
            compressed(keras.optimizers.SGD(0.1)),
        ]
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch):
        def replica_step(batch):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.apply(gradients_of(model, batch), model.trainable_variables)

        strategy.run(replica_step, [batch])

    for batch in local_batches():
        step(batch)
    return {f"model {i}": values(model) for i, model in enumerate(models)}


def by_hand():
    """Plain variables that the loop updates by itself, the gradients reduced by the strategy."""
    rng = np.random.default_rng(7)
    initial = [rng.normal(size=shape).astype("float32") / 3 for shape in ((8, 16), (16, 3))]
    with strategy.scope():
        variables = [tf.Variable(value) for value in initial]
        unused = tf.Variable(np.ones(3, np.float32))

    @tf.function
    def step(batch):
        def replica_step(batch):
            inputs, targets = batch
            with tf.GradientTape() as tape:
                outputs = tf.tanh(inputs @ variables[0]) @ variables[1]
                loss = classification_loss()(targets, outputs)
            trained = [*variables, unused]
            gradients = tape.gradient(loss, trained)
            if KIND != "alone":
                ops = strategy.extended._cross_device_ops
                gradients = ops.reduce_gradients(gradients, trained)
            tf.distribute.get_replica_context().merge_call(update, args=[gradients[:2]])
            return gradients[2] is None

        def update(strategy, gradients):
            for variable, gradient in zip(variables, gradients, strict=True):
                strategy.extended.update(variable, lambda v, g: v.assign_sub(0.1 * g), [gradient])

        assert strategy.run(replica_step, [batch])

    for batch in local_batches():
        step(batch)
    return {
        "digest": digest(variables),
        "values": [variable.numpy() for variable in variables],
        "collectives": collectives(step, batch),
    }


def values(model):
    return {
        "digest": digest(model.trainable_variables),
        "values": [np.asarray(variable) for variable in model.trainable_variables],
    }


# Adam(0.01) has an epsilon of 0.05, and SGD a rate of 0.1. Sums are over up to 32 rows, 16 inputs
# of a layer and 3 classes.
TRAINED = training(gain=0.2, terms=32 + 16 + 3, steps=4)


def reports(n, kind):
    return results(run_workers(PROGRAM, n, [kind]))


@pytest.fixture(scope="module", params=["stock", "strategy", "mirrored", "mirrored ops"])
def loop(request):
    """Returns the findings of a loop under the strategy, on each worker."""
    return reports(1 if "mirrored" in request.param else 2, request.param)


@pytest.fixture(scope="module")
def loop_alone():
    return reports(1, "alone")[0]


def test_training_loop_trains_as_one_process(loop, loop_alone):
    for worker in loop:
        assert_close(worker["by_optimizer"]["values"], loop_alone["by_optimizer"]["values"])
        assert worker["by_optimizer"]["digest"] == loop[0]["by_optimizer"]["digest"]


def test_two_models_with_an_optimizer_each_train_as_in_one_process(loop, loop_alone):
    for worker in loop:
        for model, seen in worker["two_models"].items():
            assert_close(seen["values"], loop_alone["two_models"][model]["values"])
            assert seen["digest"] == loop[0]["two_models"][model]["digest"]


def test_loop_that_updates_by_itself_trains_as_one_process(loop, loop_alone):
    if "by_hand" not in loop[0]:
        return  # only CompressedAllReduce reduces gradients for such a loop
    for worker in loop:
        assert_close(worker["by_hand"]["values"], loop_alone["by_hand"]["values"])
        assert worker["by_hand"]["digest"] == loop[0]["by_hand"]["digest"]


def test_two_collectives_a_step_for_any_number_of_variables(loop):
    if loop[0]["workers"] == 1:
        return  # MirroredStrategy uses none
    for worker in loop:
        assert worker["many_variables"]["variables"] == 20
        for check in ("by_optimizer", "many_variables", "by_hand"):
            if check in worker:
                assert worker[check]["collectives"] == ["CollectiveGatherV2"] * 2


def assert_close(values, expected):
    assert len(values) == len(expected)
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=TRAINED)


if __name__ == "__main__":
    KIND = argument(1)
    x, y = digits(BATCH * STEPS)
    strategy = make_strategy()
    REPLICAS = strategy.num_replicas_in_sync
    CHECKS = [by_optimizer, two_models]
    if KIND in ("stock", "strategy"):
        CHECKS.append(many_variables)
    if KIND in ("strategy", "mirrored ops", "alone"):
        CHECKS.append(by_hand)
    seen = {check.__name__: check() for check in CHECKS}
    report({**seen, "rank": RANK, "workers": SIZE})
