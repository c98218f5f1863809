"""Fine-tuning: a pretrained network is first frozen and then trained with the rest.

gradcomp run -n 2 finetune.py
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

import tf_gradcomp as gc

strategy = gc.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
chief = gc.is_chief(strategy)
x, y = load_digits(return_X_y=True)
x = (x / 16).reshape(-1, 8, 8, 1).astype("float32")


def rows(classes):  # in whole batches of 64, so that no worker gets an empty one
    chosen = np.flatnonzero(np.isin(y, classes))
    chosen = chosen[: len(chosen) // 64 * 64]
    return x[chosen], y[chosen] - min(classes)


def compile_again(model, rate):  # always with a new optimizer
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = gc.CompressedOptimizer(keras.optimizers.Adam(rate))
    model.compile(optimizer, loss, metrics=["accuracy"])


# Stands for a pretrained network: it learns the digits 0 to 4 here. With weights from elsewhere:
# backbone = keras.applications.MobileNetV2(include_top=False, pooling="avg")
with strategy.scope():
    backbone = keras.Sequential([keras.Input((8, 8, 1))], name="backbone")
    backbone.add(keras.layers.Conv2D(32, 3, activation="relu"))
    backbone.add(keras.layers.Conv2D(64, 3, activation="relu"))
    backbone.add(keras.layers.Flatten())
    earlier = keras.Sequential([backbone, keras.layers.Dense(5)])
    compile_again(earlier, 1e-3)
earlier.fit(*rows(range(5)), batch_size=64, epochs=5, verbose=2 if chief else 0)

with strategy.scope():
    backbone.trainable = False
    inputs = keras.Input((8, 8, 1))
    features = backbone(inputs, training=False)  # also keeps statistics of BatchNormalization
    model = keras.Model(inputs, keras.layers.Dense(5, name="head")(features))
    compile_again(model, 1e-3)
model.fit(*rows(range(5, 10)), batch_size=64, epochs=5, verbose=2 if chief else 0)

with strategy.scope():
    backbone.trainable = True
    compile_again(model, 1e-4)  # a new rate, and the gradients of all layers are exchanged
model.fit(*rows(range(5, 10)), batch_size=64, epochs=5, verbose=2 if chief else 0)
