"""Trains ResNet-20 on scikit-learn's digits, enlarged to the size of ResNet-20's images.

gradcomp simulate benchmarks/resnet_digits.py -n 2 -n 8 --epochs 15 --batch-size 64 -c adacomp
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import models
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc

sys.path.append(str(Path(__file__).resolve().parents[1] / "keras_examples"))

import common

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.002),
}
ENLARGED = np.ones((1, 4, 4, 3), np.float32)  # each pixel becomes four by four, in three colours


def simulation_task(
    batch_size: int = 64, seed: int = 0, optimizer: str = "sgd"
) -> gc.simulation.Task:
    """Returns the task that `gradcomp simulate` trains, with 22 steps an epoch."""
    keras.utils.set_random_seed(seed)
    (train_x, train_y), (test_x, test_y) = common.load_images("digits", seed)
    train_x, test_x = np.kron(train_x, ENLARGED), np.kron(test_x, ENLARGED)
    model = models.resnet()
    model.compile(
        OPTIMIZERS[optimizer](),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    batches = (
        tf.data.Dataset.from_tensor_slices((train_x, train_y))
        .shuffle(len(train_x), seed=seed)
        .batch(batch_size, drop_remainder=True)
    )
    return gc.simulation.Task(model, batches, len(train_x) // batch_size, (test_x, test_y))
