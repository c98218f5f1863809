"""Records the batches that each step gets of a `PyDataset` and of a Python generator."""

import time

import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc
from tests.ranks import RANK, SIZE, report

BATCHES = 12


class Numbered(keras.utils.PyDataset):
    """Batches of one row for each worker; its numbers rise by 100 each time an epoch ends."""

    def __init__(self, seconds, *args):
        super().__init__(*args)
        self.seconds, self.epochs = seconds, 0

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        time.sleep(self.seconds * (index % 3))  # so that they end in another order
        x = np.full((SIZE, 1), index + 100 * self.epochs, "float32")
        return x, x.copy()

    def on_epoch_end(self):
        self.epochs += 1


class Endless(Numbered):
    num_batches = None


class Spy(keras.layers.Layer):
    """Notes the numbers that it is given in steps."""

    def call(self, x):
        tf.numpy_function(lambda rows: numbers.extend(rows[:, 0].tolist()), [x], [])
        return x


numbers = []


def seen(run):
    numbers.clear()
    returned = run()
    return {"numbers": [*numbers], "returned": returned}


def py_datasets():
    """Each way to read, in training and validation, and one of them in all that Keras offers."""
    found = {"ways": []}
    for way in WAYS:
        train, valid = Numbered(*way), Numbered(*way)
        fit = {"verbose": 0, "epochs": 2, "validation_data": valid}
        found["ways"].append(seen(lambda train=train, fit=fit: model.fit(train, **fit) and None))
    parts = {"verbose": 0, "shuffle": False, "epochs": 3, "steps_per_epoch": 4}
    found["parts"] = seen(lambda: model.fit(Numbered(*way), **parts) and None)
    found["evaluate"] = seen(lambda: model.evaluate(Numbered(*way), verbose=0))
    found["predict"] = seen(lambda: model.predict(Numbered(*way), verbose=0)[:, 0])
    found["endless"] = seen(lambda: model.fit(Endless(*way), **parts) and None)
    return found


# Seconds, threads or processes, which of them, and the size of the queue.
WAYS = [(0.001, 1, True, 10), (0.001, 3, True, 1), (0, 1), (0.002 * RANK, 4, False, 2), (0, 2)]


def generators():
    """Uses a generator in several calls; in the second call, one process is a little slower."""

    def batches(count=1000, seconds=0.0):
        for i in range(count):
            time.sleep(seconds)
            x = np.full((SIZE, 1), i, "float32")
            yield x, x

    train, valid, tested = batches(seconds=0.01 * RANK), batches(), batches(seconds=0.005)
    fit = {"verbose": 0, "steps_per_epoch": 3}
    found = {
        "fits": [
            seen(lambda kwargs=kwargs: model.fit(train, **fit, **kwargs) and None)
            for kwargs in ({}, {"epochs": 2}, {})
        ],
        "single steps": [
            seen(lambda: model.fit(train, verbose=0, steps_per_epoch=1) and None) for _ in range(3)
        ],
        "evaluations": [seen(lambda: model.evaluate(tested, steps=3, verbose=0)) for _ in range(3)],
    }
    validated = {"validation_data": valid, "validation_steps": 3, "epochs": 3}
    found["validation"] = seen(lambda: model.fit(batches(), **fit, **validated) and None)
    finite = {"validation_data": batches(5), "epochs": 2}
    found["finite"] = seen(lambda: model.fit(batches(), **fit, **finite) and None)
    return found


strategy = gc.MultiWorkerMirroredStrategy()
with strategy.scope():
    layers = [
        keras.Input((1,)),
        Spy(),
        keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(2)),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.0), "mae")
report({"py_datasets": py_datasets(), "generators": generators()})
