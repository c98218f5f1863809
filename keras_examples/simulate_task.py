"""How accurate is the training with many workers? One process plays all of them.

gradcomp simulate simulate_task.py -n 4 -c no_compression -c adacomp
gradcomp simulate simulate_task.py -n 4 -c no_compression --local-steps 0 --local-steps 16
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_gradcomp as gc

STEPS_PER_EPOCH = 64


def simulation_task(batch_size=64, seed=0):  # the batch of all workers together
    keras.utils.set_random_seed(seed)
    data = load_digits()
    images, labels = (data.images[..., None] / 16).astype("float32"), data.target
    rows = tf.data.Dataset.from_tensor_slices((images, labels))
    rows = rows.shuffle(len(images), seed=seed, reshuffle_each_iteration=False)
    train, test = rows.skip(360), rows.take(360).batch(batch_size)
    train = train.shuffle(len(images), seed=seed).repeat().batch(batch_size)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(  # your own optimizer, without gc.CompressedOptimizer
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return gc.simulation.Task(model, train, STEPS_PER_EPOCH, test)
