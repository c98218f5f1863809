"""A network of keras.applications, trained from scratch on a folder of images.

python image_folder.py write images                # digits, as images in a folder for each class
gradcomp run -n 2 image_folder.py train images     # or with your own folder
"""

import sys
from pathlib import Path

import keras
import tensorflow as tf

import tf_gradcomp as gc

SIZE, BATCH, EPOCHS = 32, 64, 5  # pixels squared, images of a batch over all workers


def train(folder):
    strategy = gc.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    rows, test = keras.utils.image_dataset_from_directory(
        folder,
        validation_split=0.2,
        subset="both",
        seed=0,  # the same order on all workers; each takes its part of every batch
        image_size=(SIZE, SIZE),
        batch_size=None,
    )
    batches = rows.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    classes = len(rows.class_names)
    with strategy.scope():
        inputs = keras.Input((SIZE, SIZE, 3))
        scaled = keras.layers.Rescaling(1 / 127.5, offset=-1)(inputs)
        network = keras.applications.MobileNet(
            weights=None, input_shape=(SIZE, SIZE, 3), classes=classes, classifier_activation=None
        )
        for layer in network.layers:  # by default the means would need thousands of steps
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.momentum = 0.9
        model = keras.Model(inputs, network(scaled))
        model.compile(
            optimizer=gc.CompressedOptimizer(keras.optimizers.Adam()),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    verbose = 2 if gc.is_chief(strategy) else 0
    model.fit(batches, epochs=EPOCHS, validation_data=test.batch(BATCH), verbose=verbose)
    return model


def write(folder):
    from sklearn.datasets import load_digits

    for index, (pixels, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
        Path(folder, str(label)).mkdir(parents=True, exist_ok=True)
        image = tf.io.encode_png((15 * pixels).astype("uint8").reshape(8, 8, 1))
        Path(folder, str(label), f"{index}.png").write_bytes(image.numpy())


if sys.argv[1] == "write":
    write(sys.argv[2])
else:
    model = train(sys.argv[2])
