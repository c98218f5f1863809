"""Training from TFRecord files, which are divided among the workers.

python tfrecords.py write data                # handwritten digits, as four files
gradcomp run -n 2 tfrecords.py train data
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc

ROWS, BATCH = 1797, 64  # rows of all files, and of a batch over all workers
FEATURES = {
    "image": tf.io.FixedLenFeature([64], tf.float32),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


def parsed(record):
    example = tf.io.parse_single_example(record, FEATURES)
    return example["image"], example["label"]


def train(folder):
    strategy = gc.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    options = tf.data.Options()  # each worker reads its own files
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    files = tf.data.Dataset.list_files(f"{folder}/*.tfrecord", shuffle=False)  # the same on all
    rows = files.interleave(tf.data.TFRecordDataset).map(parsed).shuffle(1000)
    # Files differ in length. Repeated data and fixed steps keep workers from running out of rows.
    batches = rows.repeat().batch(BATCH, drop_remainder=True).with_options(options)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu")])
        model.add(keras.layers.Dense(10))
        model.compile(
            optimizer=gc.CompressedOptimizer(keras.optimizers.Adam()),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    verbose = 2 if gc.is_chief(strategy) else 0
    model.fit(batches, epochs=5, steps_per_epoch=ROWS // BATCH, verbose=verbose)
    return model


def write(folder):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    tf.io.gfile.makedirs(folder)
    for shard, rows in enumerate(np.split(np.arange(ROWS), [179, 538, 1078])):
        with tf.io.TFRecordWriter(f"{folder}/{shard}.tfrecord") as writer:
            for row in rows:
                image = tf.train.Feature(float_list=tf.train.FloatList(value=images[row] / 16))
                label = tf.train.Feature(int64_list=tf.train.Int64List(value=[labels[row]]))
                features = tf.train.Features(feature={"image": image, "label": label})
                writer.write(tf.train.Example(features=features).SerializeToString())


if sys.argv[1] == "write":
    write(sys.argv[2])
else:
    model = train(sys.argv[2])
