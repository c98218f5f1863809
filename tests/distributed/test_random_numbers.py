"""Each replica draws its own random numbers, from seeds that all workers share.

A worker's first argument is `strategy`, or `plain` for a process without a strategy.
"""

import functools
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import training
from tests.ranks import SIZE, argument, digest, report
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
STEPS, ROWS, KEEP = 40, 8, 0.75  # the rows of all workers
FEATURES = 512
IMAGES = np.random.RandomState(0).normal(size=(2, 4, 4, 1)).astype("float32")


@tf.function
def nested():
    return tf.random.normal((4,))


KINDS = {
    "Dropout": lambda: dropout(tf.ones((2, 16)), training=True),
    "layer from outside": lambda: outside(tf.ones((2, 16)), training=True),
    "GaussianNoise": lambda: noise(tf.zeros((2, 4)), training=True),
    "LSTM": lambda: recurrent(tf.ones((2, 3, 16)), training=True),
    "RandomFlip": lambda: tf.concat([flip(IMAGES, training=True) for _ in range(4)], -1),
    "RandomRotation": lambda: turn(IMAGES, training=True),
    "SeedGenerator": lambda: keras.random.normal((4,), seed=generator),
    "keras.random without a seed": lambda: keras.random.normal((4,)),
    "tf.random.normal": lambda: tf.random.normal((4,)),
    "tf.random.uniform with a seed": lambda: tf.random.uniform((4,), seed=3),
    "a nested tf.function": nested,
    "tf.nn.dropout": lambda: tf.nn.dropout(tf.ones((2, 16)), 0.5),
    "tf.image": lambda: tf.image.random_brightness(IMAGES, 0.5),
}


def own(value):
    return strategy.experimental_local_results(value)[0].numpy()


def drawn():
    """Returns two draws of each kind in this worker's replica, in a graph and eagerly."""
    draws = {}
    for name, draw in KINDS.items():
        in_graph = tf.function(lambda draw=draw: strategy.run(draw))
        draws[name] = [own(in_graph()) for _ in range(2)]
        draws[name] += [own(strategy.run(draw))]
    return draws


def augmented():
    """Returns a function for data with its own generators: iterators draw ahead."""
    with strategy.scope():
        layer, drawn_from = keras.layers.RandomFlip(seed=1), keras.random.SeedGenerator(2)

    def draw(image, row):
        uniform = keras.random.uniform((), seed=drawn_from)
        return layer(image, training=True), uniform, row, tf.random.uniform(())

    return draw


def data():
    images = np.tile(IMAGES[:1], (ROWS, 1, 1, 1))
    return tf.data.Dataset.from_tensor_slices((images, np.arange(ROWS))).shuffle(ROWS, seed=1)


def batches():
    """Returns the first batch of data that all workers share, and of each worker's own."""
    shared = strategy.experimental_distribute_dataset(data().map(augmented()).batch(ROWS))

    def build(context):
        part = data().shard(context.num_input_pipelines, context.input_pipeline_id)
        return part.map(augmented()).batch(ROWS // context.num_input_pipelines)

    distributed = {
        "shared": shared,
        "by function": strategy.distribute_datasets_from_function(build),
    }
    return {name: [own(part) for part in next(iter(data))] for name, data in distributed.items()}


def gradients_of_dropout():
    """Returns the mean gradients of a network of `Dropout`, one row for each step."""
    with strategy.scope():
        drop = keras.layers.Dropout(1 - KEEP)
        weights = keras.Variable(np.zeros(FEATURES, "float32"), name="weights")
        optimizer = keras.optimizers.SGD(1.0)
        if WAY != "plain":
            optimizer = gc.CompressedOptimizer(optimizer, "no_compression")
        optimizer.build([weights])

    def step():
        rows = ROWS // strategy.num_replicas_in_sync
        with tf.GradientTape() as tape:
            output = tf.reduce_sum(drop(tf.ones((rows, FEATURES)), training=True) * weights, 1)
            loss = tf.reduce_sum(output) / ROWS
        optimizer.apply(tape.gradient(loss, [weights.value]), [weights])

    run = tf.function(lambda: strategy.run(step) and None)
    values = [np.zeros(FEATURES)]
    for _ in range(STEPS):
        run()
        values.append(weights.numpy().astype(float))
    return -np.diff(values, axis=0)


def masks_of_local_steps():
    """Returns the mask of this worker's replica in each step of a round."""
    with strategy.scope():
        drop = keras.layers.Dropout(0.5)
        weights = keras.Variable(np.zeros(16, "float32"), name="weights")
        optimizer = gc.CompressedOptimizer(
            keras.optimizers.SGD(1.0), "no_compression", local_steps=3
        )
        optimizer.build([weights])

    def step():
        mask = drop(tf.ones(16), training=True)
        optimizer.apply([mask], [weights])
        return mask

    run = tf.function(lambda: strategy.run(step))
    masks = [own(run()) for _ in range(3)]
    return masks, weights.numpy()


class Noisy(keras.Model):
    """Draws by layers, by a generator and without any."""

    def __init__(self):
        super().__init__()
        self.dense, self.drop = keras.layers.Dense(3), keras.layers.Dropout(0.5)
        self.generator = keras.random.SeedGenerator(4)

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x, training=False):
        return self.dense(self.drop(x, training=training))

    def train_step(self, batch):
        x, y = batch
        x = x + keras.random.normal(keras.ops.shape(x), stddev=0.1)
        x = x + keras.random.normal(keras.ops.shape(x), stddev=0.1, seed=self.generator)
        return super().train_step((x, y))


def trained(epochs, callbacks=(), seed=11):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = Noisy()
        model.build((None, 8))
        optimizer = keras.optimizers.Adam(0.01)
        if WAY != "plain":
            optimizer = gc.CompressedOptimizer(optimizer, "no_compression")
        model.compile(optimizer, "mse")
    initial = digest(model.weights)
    x = np.random.RandomState(1).normal(size=(32, 8)).astype("float32")
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model.fit(x, x[:, :3], epochs=epochs, callbacks=list(callbacks), **arguments)
    return {"initial": initial, "trained": digest(model.weights)}


def trained_on_augmented_data():
    """Returns the weights of a linear model after `fit` on data whose function draws."""
    keras.utils.set_random_seed(3)
    images = np.random.RandomState(2).normal(size=(32, 4, 4, 1)).astype("float32")
    layer = keras.layers.RandomFlip(seed=1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.SGD(0.1)
        if WAY != "plain":
            optimizer = gc.CompressedOptimizer(optimizer, "no_compression")
        model.compile(optimizer, "mse")
    rows = tf.data.Dataset.from_tensor_slices((images, images[:, 0, 0]))
    rows = rows.map(lambda image, y: (layer(image, training=True), y))
    model.fit(rows.batch(8).prefetch(2), epochs=3, verbose=0)
    return model.get_weights()[0]


def resumed():
    """Returns the weights after two epochs and after two more from the backup of the first two."""
    backup = gc.callbacks.BackupAndRestore(FOLDER, delete_checkpoint=False)
    trained(2, [backup])
    return trained(4, [gc.callbacks.BackupAndRestore(FOLDER, delete_checkpoint=False)], seed=12)


@functools.cache
def job(workers, way="strategy", run=0):
    """Returns what each worker drew, the same in each `run`."""
    with tempfile.TemporaryDirectory() as folder:
        return results(run_workers(PROGRAM, workers, [way, folder]))


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_draw_their_own_numbers(kind):
    first, second = (worker["drawn"][kind] for worker in job(2))
    for one, other in zip(first, second, strict=True):
        assert one != other
    assert first[0] != first[1]  # from step to step


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_replica_draws_what_one_process_draws(kind):
    (plain,) = job(1, "plain")
    assert job(2)[0]["drawn"][kind] == plain["drawn"][kind]


def test_one_worker_draws_and_trains_as_a_process_without_a_strategy():
    (worker,), (plain,) = job(1), job(1, "plain")
    assert worker["drawn"] == plain["drawn"]
    assert worker["batches"] == plain["batches"]
    assert worker["fit"] == plain["fit"]


def test_workers_share_the_states_of_generators_and_all_weights():
    first, second = job(2)
    assert first["states"] == second["states"]
    assert first["fit"] == second["fit"]
    (plain,) = job(1, "plain")
    assert first["fit"]["initial"] == plain["fit"]["initial"]


def test_the_same_seed_repeats_a_job():
    assert job(2, run=1) == job(2)


def test_a_resumed_job_continues_the_sequence():
    for worker in job(2):
        assert worker["resumed"]["trained"] == worker["fit"]["trained"]


def test_data_that_workers_share_are_augmented_as_in_one_process():
    (plain,) = job(1, "plain")
    workers = [worker["batches"]["shared"] for worker in job(2)]
    for parts in zip(*workers, plain["batches"]["shared"], strict=True):
        np.testing.assert_array_equal(np.concatenate(parts[:2]), parts[2])


def test_fit_on_augmented_data_is_as_in_one_process():
    (worker,), (plain,) = job(1), job(1, "plain")
    assert worker["fit on augmented data"] == plain["fit on augmented data"]
    # Sums are over 8 rows and 16 inputs, below 4; each of 12 steps moves weights by a tenth.
    bound = training(gain=0.1, terms=8 + 16, steps=12, gradients=4 * 4 * 8)
    for other in job(2):
        weights = other["fit on augmented data"]
        np.testing.assert_allclose(weights, plain["fit on augmented data"], rtol=0, atol=bound)


def test_data_that_each_worker_builds_are_augmented_in_its_own_way():
    first, second = (worker["batches"]["by function"] for worker in job(2))
    for part in (0, 1, 3):  # RandomFlip, a SeedGenerator, tf.random
        assert first[part] != second[part]
    assert sorted(first[2] + second[2]) == list(range(ROWS))  # rows are shuffled alike


def test_replicas_draw_their_own_numbers_in_local_steps():
    first, second = job(2)
    for one, other in zip(first["local steps"], second["local steps"], strict=True):
        assert one != other
    assert first["weights of local steps"] == second["weights of local steps"]


def test_the_mean_gradient_of_dropout_varies_as_in_one_process():
    gradients = np.array(job(2)[0]["gradients"])
    # A row's gradient is 1 / KEEP with probability KEEP, else 0: its variance is this. The fourth
    # moment of a mean of 8 rows is below the normal distribution's 3, as a Bernoulli variable's
    # with KEEP = 3/4 is 7/3. So the variance of n draws deviates by sqrt(2 / n) of itself.
    expected = (1 - KEEP) / KEEP / ROWS
    deviation = expected * np.sqrt(2 / gradients.size)
    assert abs(np.var(gradients) - expected) < 6 * deviation  # equal masks: 2 times `expected`


if __name__ == "__main__":
    WAY, FOLDER = argument(1), argument(2)
    strategy = tf.distribute.get_strategy() if WAY == "plain" else gc.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        dropout, noise = keras.layers.Dropout(0.5), keras.layers.GaussianNoise(1.0)
        flip, turn = keras.layers.RandomFlip(seed=1), keras.layers.RandomRotation(0.3, seed=2)
        recurrent = keras.layers.LSTM(8, dropout=0.5)
        recurrent.build((None, 3, 16))
        generator = keras.random.SeedGenerator(3)
    outside = keras.layers.Dropout(0.5)
    seen = {
        "drawn": drawn(),
        "batches": batches(),
        "fit": trained(4),
        "fit on augmented data": trained_on_augmented_data(),
        "states": [own(state.value).tolist() for state in (dropout.seed_generator.state,)],
    }
    if WAY == "strategy" and SIZE > 1:
        seen["gradients"] = gradients_of_dropout()
        seen["local steps"], seen["weights of local steps"] = masks_of_local_steps()
        seen["resumed"] = resumed()
    report(seen)
