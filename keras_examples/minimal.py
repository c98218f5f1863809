"""The shortest program that trains on several workers with compressed gradients.

gradcomp run -n 2 minimal.py     # two workers on this machine; `python minimal.py` is one
"""

import keras
import numpy as np

import tf_gradcomp as gc

strategy = gc.MultiWorkerMirroredStrategy()  # (1) finds the other workers; comes first

random = np.random.default_rng(0)  # replace this by your data
x = random.normal(size=(4096, 64)).astype("float32")
y = np.argmax(x @ random.normal(size=(64, 10)), axis=1)

with strategy.scope():  # (2) create the model and everything that belongs to it in here
    model = keras.Sequential([keras.Input((64,))])
    model.add(keras.layers.Dense(256, activation="relu"))
    model.add(keras.layers.Dense(10))
    model.compile(
        optimizer=gc.CompressedOptimizer(keras.optimizers.Adam()),  # (3) around your optimizer
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

monitor = gc.callbacks.CompressionMonitor()  # logs the sent bytes
verbose = 2 if gc.is_chief(strategy) else 0  # one worker prints
model.fit(x, y, batch_size=64, epochs=5, callbacks=[monitor], verbose=verbose)
