"""Training from TFRecord files, which are divided among the workers.

    python tfrecords.py write data                # handwritten digits, as four files
    gradcomp run -n 2 tfrecords.py train data

The files have unequal lengths. The program therefore repeats the data and sets the steps per epoch.
No worker then runs out of data while the others wait.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc

BATCH_SIZE = 64  # over all workers
FEATURES = {
    "image": tf.io.FixedLenFeature([64], tf.float32),
    "label": tf.io.FixedLenFeature([1], tf.int64),
}


def train(folder: str) -> None:
    """Trains on this worker, with its own files."""
    strategy = gc.MultiWorkerMirroredStrategy()  # (1) before any other use of TensorFlow

    # All workers list the same files in the same order; the strategy gives each worker its part.
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    batches = (
        tf.data.Dataset.list_files(f"{folder}/*.tfrecord", shuffle=False)
        .interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE)
        .map(parsed)
        .shuffle(1000)
        .repeat()
        .batch(BATCH_SIZE, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
        .with_options(options)
    )

    with strategy.scope():  # (2) create the model and everything that belongs to it in here
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=gc.CompressedOptimizer(keras.optimizers.Adam()),  # (3)
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    verbose = 2 if gc.is_chief(strategy) else 0
    model.fit(batches, epochs=5, steps_per_epoch=1797 // BATCH_SIZE, verbose=verbose)


def parsed(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """An image, float32 [64], and its label, int64 [1]."""
    example = tf.io.parse_single_example(record, FEATURES)
    return example["image"], example["label"]


def write(folder: str) -> None:
    """Writes scikit-learn's digits as four files, of 179 to 719 images."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    tf.io.gfile.makedirs(folder)
    for shard, rows in enumerate(np.split(np.arange(len(images)), [179, 538, 1078])):
        with tf.io.TFRecordWriter(f"{folder}/{shard}.tfrecord") as writer:
            for row in rows:
                image = tf.train.FloatList(value=images[row] / 16)
                label = tf.train.Int64List(value=[labels[row]])
                features = {
                    "image": tf.train.Feature(float_list=image),
                    "label": tf.train.Feature(int64_list=label),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())


if __name__ == "__main__":
    {"train": train, "write": write}[sys.argv[1]](sys.argv[2])
