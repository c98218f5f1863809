"""Collects the warnings about data in different orders and about empty batches."""

import logging
import pathlib

import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc
from tests.ranks import RANK, argument, report
from tf_gradcomp.groups import messages

ROWS = 65  # in batches of 16, the last has one row
x = np.arange(ROWS * 2, dtype="float32").reshape(ROWS, 2) / 100
y = np.arange(ROWS, dtype="float32")
policies = tf.data.experimental.AutoShardPolicy


class Heard(logging.Handler):
    def emit(self, record):
        heard.append(record.getMessage())


def told(run):
    """Returns the messages logged while `run` is called."""
    heard.clear()
    messages.forget()
    run()
    return [*heard]


def fit(data, y=None, **kwargs):
    return told(lambda: model.fit(data, y, verbose=0, **kwargs))


def dataset(seed=None, policy=None, rows=None, parts=None):
    data = tf.data.Dataset.from_tensor_slices((x[:64], y[:64]) if rows is None else rows)
    data = data.shuffle(64, seed=seed, reshuffle_each_iteration=parts).batch(16)
    if policy is None:
        return data
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return data.with_options(options)


def file_dataset(names):
    parsed = lambda line: (tf.strings.to_number(tf.strings.split([line], ",").values), 1.0)  # noqa: E731
    names = (
        names if isinstance(names, tf.data.Dataset) else tf.data.Dataset.from_tensor_slices(names)
    )
    lines = names.interleave(tf.data.TextLineDataset, cycle_length=2)
    return lines.map(parsed).map(lambda a, b: (tf.ensure_shape(a, [2]), b)).shuffle(64).batch(4)


def seen_by_the_chief(each):
    """A dataset whose first order is the same on all workers, and which the chief has used."""
    data = dataset(seed=3, parts=each)
    if RANK == 0:
        next(iter(data))
    return data


def augmented():
    data = tf.data.Dataset.from_tensor_slices((x[:64], y[:64]))
    return data.map(lambda a, b: (a + tf.random.uniform([2]), b)).batch(16)


def made_by_the_chief():
    """A dataset without a seed, after the chief has made one that other workers have not."""
    if RANK == 0:
        dataset()
    return dataset()


def shuffled_within():
    """A dataset with a function that shuffles, which no seed of the strategy reaches."""
    data = tf.data.Dataset.from_tensors((x[:64], y[:64]))
    rows = lambda a, b: tf.data.Dataset.from_tensor_slices((a, b)).shuffle(64)  # noqa: E731
    return data.flat_map(rows).batch(16)


def kept_whole():
    return dataset(policy=policies.OFF)


def orders():
    folder = pathlib.Path(argument(1))
    names = [str(folder / f"{i}.csv") for i in range(int(argument(2)))]
    rotated = names[RANK:] + names[:RANK]
    unseeded = {
        "no seed": fit(dataset(), epochs=2),
        "no seed, DATA": fit(dataset(policy=policies.DATA)),
        "no seed, equal weights": fit(dataset().map(lambda a, b: (a, b, tf.ones_like(b)))),
        "no seed, shuffled once": fit(dataset(parts=False)),
        "arrays, no seed": fit(x[:64], y[:64]),
        "evaluated": told(lambda: model.evaluate(dataset(), verbose=0)),
        "files shuffled": fit(file_dataset(tf.data.Dataset.list_files(names))),
        "kept whole, evaluated": told(lambda: model.evaluate(kept_whole(), verbose=0)),
        "seed, shuffled once, seen by the chief": fit(seen_by_the_chief(each=False), epochs=2),
        "files": fit(file_dataset(names)),
        "files shuffled alike": fit(file_dataset(tf.data.Dataset.list_files(names, seed=1))),
        "augmented": fit(augmented()),
        "own data": fit(strategy.distribute_datasets_from_function(lambda _: dataset())),
        "arrays": fit(x[:64], y[:64], shuffle=False),
        "seed": fit(dataset(seed=3), epochs=2),
    }
    return {
        "seen by the chief": fit(seen_by_the_chief(each=True)),
        "other rows": fit(dataset(0, rows=(x[RANK : RANK + 64], y[RANK : RANK + 64]))),
        "shuffled within": fit(shuffled_within()),
        "files in other orders": fit(file_dataset(rotated)),
        "kept whole": fit(kept_whole()),
        "made by the chief": fit(made_by_the_chief()),
    }, unseeded


def one_row(data, labels=None, **kwargs):
    """Returns the state after training that ends with a batch of one row."""
    with strategy.scope():
        layers = [
            keras.Input((2,)),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(1),
        ]
        normalized = keras.Sequential(layers)
        normalized.compile(keras.optimizers.SGD(1e-3), "mse")
    args = {"verbose": 0, "shuffle": False, "validation_data": (x[:64], y[:64]), "epochs": 2}
    said = told(lambda: normalized.fit(data, labels, **args, **kwargs))
    return {
        "told": said,
        "history": normalized.history.history,
        "statistics": [
            np.asarray(v).tolist() for v in normalized.layers[0].non_trainable_variables
        ],
    }


heard = []
strategy = gc.MultiWorkerMirroredStrategy()
logging.getLogger("tf_gradcomp").addHandler(Heard())
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
report(
    {
        "orders": orders(),
        "arrays": one_row(x, y, batch_size=16),
        "dataset": one_row(batches),
    }
)
