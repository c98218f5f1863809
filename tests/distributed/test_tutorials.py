"""The training loops of TensorFlow's guides on two workers, changed only in the strategy.

A worker's arguments: what to run (a way to train, a guide, and whether its first step is eager), a
folder, and an optional file of images such as Keras' `mnist.npz`. The default images are
scikit-learn's digits. Models and optimizers are created in the scope and built by the first step.
"""

import functools
import os
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import training
from tests.distributed.common import WHOLE, Setup, scalar
from tests.ranks import RANK, argument, digest, report
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
ROWS, TEST_ROWS, BATCH, EPOCHS = 500, 100, 64, 2  # the last batch has 52 rows


def images():
    if len(sys.argv) > 3:
        with np.load(sys.argv[3]) as file:
            x, y = file["x_train"] / 255, file["y_train"]
    else:
        import sklearn.datasets

        digits = sklearn.datasets.load_digits()
        x, y = digits.images / 16, digits.target
    x, y = x[..., np.newaxis].astype("float32"), y.astype("int64")
    both = ROWS + TEST_ROWS
    return (x[:ROWS], y[:ROWS]), (x[ROWS:both], y[ROWS:both])


def create_model(regularizer=None):
    return keras.Sequential(
        [
            keras.layers.Conv2D(8, 3, activation="relu", kernel_regularizer=regularizer),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def state(run):
    return {
        "weights": [weight.tolist() for weight in run.model.get_weights()],
        "digest": digest([*run.model.variables, *run.optimizer.variables]),
        "iterations": scalar(run.optimizer.iterations),
    }


class CustomTraining:
    """The guide "Custom training with tf.distribute.Strategy"."""

    def __init__(self, setup):
        self.strategy = strategy = setup.strategy
        keras.utils.set_random_seed(0)
        self.train, self.test = (
            strategy.experimental_distribute_dataset(
                tf.data.Dataset.from_tensor_slices(data).batch(BATCH)
            )
            for data in (train, test)
        )
        with strategy.scope():
            self.loss_object = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="none"
            )
            self.test_loss = keras.metrics.Mean(name="test_loss")
            self.train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
            self.test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
            self.model = create_model()
            self.optimizer = setup.wrap(keras.optimizers.Adam(learning_rate=0.001, epsilon=0.05))
            self.checkpoint = tf.train.Checkpoint(optimizer=self.optimizer, model=self.model)

    def compute_loss(self, labels, predictions):
        per_example_loss = self.loss_object(labels, predictions)
        return tf.nn.compute_average_loss(per_example_loss, global_batch_size=BATCH)

    def train_step(self, inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            predictions = self.model(x, training=True)
            loss = self.compute_loss(y, predictions)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.train_accuracy.update_state(y, predictions)
        return loss

    def test_step(self, inputs):
        x, y = inputs
        predictions = self.model(x, training=False)
        self.test_loss.update_state(self.loss_object(y, predictions))
        self.test_accuracy.update_state(y, predictions)

    def eager_train_step(self, inputs):
        losses = self.strategy.run(self.train_step, args=(inputs,))
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    @tf.function
    def distributed_train_step(self, inputs):
        return self.eager_train_step(inputs)

    @tf.function
    def distributed_test_step(self, inputs):
        self.strategy.run(self.test_step, args=(inputs,))

    @tf.function
    def distributed_train_epoch(self, dataset):
        total_loss, batches = 0.0, 0
        for x in dataset:
            total_loss += self.eager_train_step(x)
            batches += 1
        return total_loss / tf.cast(batches, tf.float32)

    def evaluate(self):
        for x in self.test:
            self.distributed_test_step(x)
        metrics = (self.train_accuracy, self.test_loss, self.test_accuracy)
        values = [float(metric.result()) for metric in metrics]
        for metric in metrics:
            metric.reset_state()
        return values

    def go(self, folder, eager):
        measured, step = [], self.distributed_train_step
        for _ in range(EPOCHS):
            total_loss, batches = 0.0, 0
            for x in self.train:
                first = not measured and not batches
                total_loss += self.eager_train_step(x) if eager and first else step(x)
                batches += 1
            measured += [float(total_loss / batches), *self.evaluate()]
        path = self.checkpoint.save(str(folder / f"worker{RANK}" / "ckpt"))
        saved = self.model.get_weights()
        # "Iterating using an iterator"
        iterator = iter(self.train)
        losses = [float(step(next(iterator))) for _ in range(3)]
        # "Iterating inside a tf.function"
        measured += [*losses, float(self.distributed_train_epoch(self.train)), *self.evaluate()]
        trained = state(self)
        self.checkpoint.restore(path).assert_existing_objects_matched()
        restored = self.model.get_weights()
        assert all(np.array_equal(a, b) for a, b in zip(saved, restored, strict=True))
        return {"measured": measured, **trained}


class LoopWithCheckpoints:
    """The guide "Custom training loop with Keras and MultiWorkerMirroredStrategy"."""

    def __init__(self, setup):
        self.strategy = strategy = setup.strategy
        keras.utils.set_random_seed(0)
        with strategy.scope():
            self.dataset = strategy.distribute_datasets_from_function(self.dataset_fn)
            self.model = create_model(keras.regularizers.L2(1e-4))
            self.optimizer = setup.wrap(keras.optimizers.SGD(0.05, momentum=0.9))
            self.train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        self.epoch = tf.Variable(tf.constant(0, tf.int64), name="epoch")
        self.step_in_epoch = tf.Variable(tf.constant(0, tf.int64), name="step_in_epoch")

    def dataset_fn(self, input_context):
        dataset = tf.data.Dataset.from_tensor_slices(train)
        dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        batch_size = input_context.get_per_replica_batch_size(BATCH)
        return dataset.batch(batch_size, drop_remainder=True).repeat().prefetch(2)

    def eager_train_step(self, iterator):
        def step_fn(inputs):
            x, y = inputs
            with tf.GradientTape() as tape:
                predictions = self.model(x, training=True)
                loss = keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True, reduction="none"
                )(y, predictions)
                loss = tf.nn.compute_average_loss(loss)
                loss += tf.nn.scale_regularization_loss(tf.add_n(self.model.losses))
            variables = self.model.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            self.train_accuracy.update_state(y, predictions)
            return loss

        losses = self.strategy.run(step_fn, args=(next(iterator),))
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    @tf.function
    def train_step(self, iterator):
        return self.eager_train_step(iterator)

    def go(self, folder, eager):
        checkpoint = tf.train.Checkpoint(
            model=self.model, epoch=self.epoch, step_in_epoch=self.step_in_epoch
        )
        path = folder / "ckpt" if RANK == 0 else folder / f"workertemp_{RANK}" / "ckpt"
        manager = tf.train.CheckpointManager(checkpoint, directory=str(path), max_to_keep=1)
        steps, measured = ROWS // BATCH, []
        while self.epoch.numpy() < EPOCHS:
            iterator, total_loss = iter(self.dataset), 0.0
            while self.step_in_epoch.numpy() < steps:
                first = not measured and not self.step_in_epoch.numpy()
                step = self.eager_train_step if eager and first else self.train_step
                total_loss += step(iterator)
                self.step_in_epoch.assign_add(1)
            measured += [float(total_loss) / steps, float(self.train_accuracy.result())]
            self.train_accuracy.reset_state()
            manager.save()
            self.epoch.assign_add(1)
            self.step_in_epoch.assign(0)
        trained = state(self)
        checkpoint.restore(tf.train.latest_checkpoint(str(path)))
        assert self.epoch.numpy() == EPOCHS - 1
        return {"measured": measured, **trained}


class StepsInAFunction(CustomTraining):
    """The guide "Distributed input": several steps of an iterator in one function."""

    @tf.function
    def train_steps(self, iterator, steps):
        for _ in tf.range(steps):
            self.strategy.run(self.train_step, args=(next(iterator),))

    @tf.function
    def train_while_there_is_data(self, iterator):
        batches = 0
        for _ in tf.range(100):
            optional = iterator.get_next_as_optional()
            if not optional.has_value():
                break
            self.strategy.run(self.train_step, args=(optional.get_value(),))
            batches += 1
        return batches

    def go(self, folder, eager):
        iterator = iter(self.train)
        if eager:
            self.eager_train_step(next(iterator))
        else:
            self.distributed_train_step(next(iterator))
        self.train_steps(iterator, tf.constant(3))
        batches = int(self.train_while_there_is_data(iterator))
        return {"measured": [batches, *self.evaluate()], **state(self)}


def run(name):
    way, tutorial, first_step = name.split()
    setup = Setup(way, WHOLE)
    folder = FOLDER / name
    os.makedirs(folder, exist_ok=True)
    return globals()[tutorial](setup).go(folder, eager=first_step == "eager")


# Tracing takes seconds, so not each guide is run in each way.
RUNS = {
    "unwrapped": ("CustomTraining eager", "StepsInAFunction graph"),
    "optimizer": ("CustomTraining eager", "LoopWithCheckpoints graph"),
    "strategy": ("CustomTraining graph", "LoopWithCheckpoints eager"),
    "alone": ("CustomTraining graph", "LoopWithCheckpoints graph", "StepsInAFunction graph"),
}
quick = pytest.mark.quick("compressor on the strategy", "custom training loop")
# Adam(0.001) has an epsilon of 0.05. A filter's gradient is a sum over 64 rows and 36 places; the
# model's sums are over 9 places of a filter, 72 inputs and 32 units.
SUMS = 9 + 72 + 32
TRAINED = training(gain=0.001 / 0.05, terms=64 * 36 + SUMS, steps=2 * 8)


@functools.cache
def seen(ways, workers=2):
    runs = [f"{way} {run}" for way in ways for run in RUNS[way]]
    with tempfile.TemporaryDirectory() as folder:
        jobs = run_workers(PROGRAM, workers, [",".join(runs), folder])
    return results(jobs)


@pytest.mark.parametrize(
    ("way", "run"),
    [
        *((way, run) for way in ("unwrapped", "optimizer") for run in RUNS[way]),
        *(pytest.param("strategy", run, marks=quick) for run in RUNS["strategy"]),
    ],
)
def test_two_workers_train_as_one_process_does(way, run):
    # A job runs both ways of a strategy without a compressor.
    ways = ("strategy",) if way == "strategy" else ("unwrapped", "optimizer")
    first, second = (worker[f"{way} {run}"] for worker in seen(ways))
    assert first == second
    (one,) = seen(("alone",), 1)
    expected = one[f"alone {run.split()[0]} graph"]
    assert first["iterations"] == expected["iterations"]
    # Metrics follow from outputs, and each output differs by its sums of weights.
    np.testing.assert_allclose(first["measured"], expected["measured"], rtol=SUMS * TRAINED)
    for weight, like in zip(first["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(weight, like, rtol=0, atol=TRAINED)


if __name__ == "__main__":
    RUNS, FOLDER = argument(1).split(","), Path(argument(2))
    train, test = images()
    report({name: run(name) for name in RUNS})
