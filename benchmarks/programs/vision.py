"""A vision model of `keras.applications`, trained from scratch on one worker or on many.

    gradcomp run -n 2 vision.py --images FOLDER                      # with your images
    gradcomp run -n 2 vision.py --images FOLDER --model ResNet50 --image-size 224
    gradcomp run -n 2 vision.py                                      # with enlarged digits
    horovodrun -np 2 python vision.py --horovod

FOLDER has a folder for each class, with its images. All workers read the same images in the same
order, and each trains on its part of every batch. The batch size is the global one, over all
workers.
"""

from __future__ import annotations

from typing import Any

import click
import common
import keras
import tensorflow as tf

import tf_gradcomp as gc

MODELS = {
    name: getattr(keras.applications, name) for name in ("MobileNet", "MobileNetV2", "ResNet50")
}


def load_folder(
    folder: str, image_size: int, seed: int
) -> tuple[tf.data.Dataset, tf.data.Dataset, int]:
    """Images with pixels from 0 to 255 and their labels, shuffled in the same order on all workers.

    Returns:
        The training images, a fifth as test images, and the number of classes.
    """
    train, test = keras.utils.image_dataset_from_directory(
        folder,
        validation_split=0.2,
        subset="both",
        seed=seed,
        image_size=(image_size, image_size),
        batch_size=None,
    )
    return train, test, len(train.class_names)


def load_digits(image_size: int, seed: int) -> tuple[tf.data.Dataset, tf.data.Dataset, int]:
    """The same from scikit-learn's digits, enlarged and converted to colour images."""

    def enlarged(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        pixels = tf.image.resize(255 * image, (image_size, image_size))
        return tf.image.grayscale_to_rgb(pixels), label

    train, test = (
        tf.data.Dataset.from_tensor_slices(arrays) for arrays in common.load_images("digits", seed)
    )
    train = train.shuffle(len(train), seed=seed)
    return train.map(enlarged), test.map(enlarged), 10


def build_model(name: str, image_size: int, classes: int) -> keras.Model:
    network = MODELS[name](
        weights=None,
        input_shape=(image_size, image_size, 3),
        classes=classes,
        classifier_activation=None,
    )
    for layer in network.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.9  # by default its means would need thousands of steps
    inputs = keras.Input((image_size, image_size, 3))
    return keras.Model(inputs, network(keras.layers.Rescaling(1 / 127.5, offset=-1)(inputs)))


def train(
    *,
    images: str | None,
    model: str,
    image_size: int,
    compressor: str,
    precondition: str | None,
    horovod: bool,
    epochs: int,
    steps_per_epoch: int | None,
    batch_size: int,
    learning_rate: float,
    seed: int,
    history: str | None,
) -> None:
    """Trains on this worker, and reports if it is the chief."""
    job = common.start_job(horovod)  # (1) gc.MultiWorkerMirroredStrategy(); comes first
    keras.utils.set_random_seed(seed)
    if images is None:
        rows, test, classes = load_digits(image_size, seed)
    else:
        rows, test, classes = load_folder(images, image_size, seed)
    steps_per_epoch = steps_per_epoch or len(rows) // batch_size
    batches = (
        rows.batch(batch_size, drop_remainder=True)
        .apply(lambda batches: job.local_part(batches, batch_size))
        .repeat()
        .prefetch(tf.data.AUTOTUNE)
    )

    with job.strategy.scope():  # (2) create the model and everything that belongs to it in here
        network = common.compiled(
            build_model(model, image_size, classes),
            gc.CompressedOptimizer(  # (3) around your optimizer
                keras.optimizers.Adam(learning_rate),
                compressor,
                precondition=precondition,
                group=job.group,
            ),
        )
    fitted = common.fit(
        job,
        network,
        batches,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        validation_data=test.batch(batch_size),
    )
    if gc.is_chief(job.strategy):
        print(f"Test accuracy {fitted.history['val_accuracy'][-1]:.2%}")
        common.write_fitted(history, job, network, fitted, steps_per_epoch)


@click.command(context_settings={"show_default": True})
@click.option(
    "--images",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False),
    help="With a folder of images for each class. Without, scikit-learn's digits are enlarged.",
)
@click.option("--model", type=click.Choice(list(MODELS)), default="MobileNet")
@click.option("--image-size", default=64, help="Images are scaled to that many pixels squared.")
@common.compressor_option
@common.precondition_option
@common.horovod_option
@click.option("--epochs", default=10)
@click.option("--steps-per-epoch", type=int, help="By default, as many as see each image once.")
@click.option("--batch-size", default=32, help="Images of a batch over all workers.")
@click.option("--learning-rate", default=1e-3)
@click.option("--seed", default=0, help="Seed of the split, the weights and the order of images.")
@common.history_option
def main(**settings: Any) -> None:
    """Train a vision model on images, from scratch."""
    train(**settings)


if __name__ == "__main__":
    main()
