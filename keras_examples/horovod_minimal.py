"""The shortest program for Horovod: gradcomp run --horovod -n 2 horovod_minimal.py."""

import horovod.tensorflow as hvd
import keras
from sklearn.datasets import load_digits

import tf_gradcomp as gc

hvd.init()
keras.utils.set_random_seed(hvd.rank())
x, y = (part[hvd.rank() : 1792 : hvd.size()] for part in load_digits(return_X_y=True))  # own part
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu")])
model.add(keras.layers.Dense(10))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(gc.CompressedOptimizer(keras.optimizers.Adam(), group="horovod"), loss)
callbacks = [gc.callbacks.BroadcastInitialState()]  # all ranks begin with rank 0's weights
verbose = 2 if hvd.rank() == 0 else 0
model.fit(x / 16, y, batch_size=32, epochs=5, callbacks=callbacks, verbose=verbose)
