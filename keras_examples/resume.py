"""A job that goes on after a crash: all workers start again from the last complete epoch.

gradcomp run -n 2 --max-restarts 3 resume.py     # kill a worker, and see
"""

import keras
from sklearn.datasets import load_digits

import tf_gradcomp as gc

BACKUP = "backup"  # a folder that all workers see, with the gradients that were not sent yet

strategy = gc.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
train, test = (x[:1408], y[:1408]), (x[1408:], y[1408:])  # 22 whole batches, so none is smaller

with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu")])
    model.add(keras.layers.Dense(10))
    model.compile(
        optimizer=gc.CompressedOptimizer(keras.optimizers.Adam()),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

callbacks = [gc.callbacks.BackupAndRestore(BACKUP)]  # save_freq=100: also every 100 batches
model.fit(
    *train,
    batch_size=64,
    epochs=10,  # in total, over all starts
    validation_data=test,
    callbacks=callbacks,
    verbose=2 if gc.is_chief(strategy) else 0,
)
model.save("model.keras")  # on all workers with one path; the chief writes
