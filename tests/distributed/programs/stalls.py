"""Trains in several ways: FOLDER REPLICAS WAY...

In each, worker 1 is late once, until the test has read of it. Each worker has REPLICAS replicas.
"""

import sys
import time
from pathlib import Path

import keras
import tensorflow as tf
from common import Setup, dense_model, digits, say

from tests.ranks import RANK, report
from tf_gradcomp.private import tensorflow as tf_private

FOLDER, REPLICAS, WAYS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
if REPLICAS > 1:
    tf_private.use_logical_cpus(REPLICAS)
setup = Setup("optimizer", "top_k(density=0.1)")
strategy = setup.strategy


def be_late(way):
    if RANK == 1:
        say(f"late: {way}")
        until = time.monotonic() + 120
        while not (FOLDER / way).exists() and time.monotonic() < until:
            time.sleep(0.02)


class Late(keras.callbacks.Callback):
    def __init__(self, way):
        super().__init__()
        self.way = way

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 4:
            be_late(self.way)


def fit(way, wrap=setup.wrap, **settings):
    model = setup.model(dense_model, lambda: wrap(keras.optimizers.Adam(0.01)), **settings)
    model.fit(*digits(128), batch_size=16, verbose=0, callbacks=[Late(way)])


def loop():
    """A custom training loop, whose steps add up something."""
    step = tf.function(lambda: strategy.run(lambda: tf.constant(1.0)))
    total = tf.function(lambda: strategy.reduce("SUM", step(), axis=None))
    for index in range(3):
        if index == 2:
            be_late("loop")
        total()


TRAIN = {
    "start": lambda: be_late("start"),
    "fit": lambda: fit("fit"),
    "executions": lambda: fit("executions", steps_per_execution=2),
    "dense": lambda: fit("dense", lambda optimizer: optimizer),
    "rounds": lambda: fit("rounds", lambda optimizer: setup.wrap(optimizer, local_steps=2)),
    "loop": loop,
}
for way in WAYS:
    TRAIN[way]()
report(strategy.progress.position())
