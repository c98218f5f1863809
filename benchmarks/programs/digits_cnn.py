"""A small convolutional network for handwritten digits, trained on one worker or on many.

    python digits_cnn.py
    gradcomp run -n 2 digits_cnn.py --compressor adacomp
    gradcomp run -n 2 digits_cnn.py --compressor no_compression
    horovodrun -np 2 python digits_cnn.py --horovod --compressor adacomp

Three lines make this program distributed and compressed: the strategy, its scope, and
`gc.CompressedOptimizer` around the optimizer. Under Horovod, the lines are `hvd.init()`, this
process's part of each batch, and `group="horovod"`. The batch size is the global one, over all
workers.
"""

from __future__ import annotations

from typing import Any

import click
import common
import keras
import tensorflow as tf

import tf_gradcomp as gc

LEARNING_RATES = {"adam": 1e-3, "sgd": 0.05}


def build_model(image_shape: tuple[int, ...], classes: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(classes, name="logits"),
        ]
    )


def make_optimizer(name: str, learning_rate: float | None = None) -> keras.optimizers.Optimizer:
    learning_rate = learning_rate or LEARNING_RATES[name]
    if name == "adam":
        return keras.optimizers.Adam(learning_rate)
    return keras.optimizers.SGD(learning_rate, momentum=0.9)


def train(
    *,
    compressor: str,
    precondition: str | None,
    local_steps: int | None,
    horovod: bool,
    epochs: int,
    steps_per_epoch: int | None,
    batch_size: int,
    optimizer: str,
    learning_rate: float | None,
    seed: int,
    dataset: str,
    checkpoints: str | None,
    history: str | None,
) -> None:
    """Trains on this worker, and reports if it is the chief."""
    job = common.start_job(horovod)  # (1) gc.MultiWorkerMirroredStrategy(); comes first
    # All workers shuffle in the same order, and each takes its own part of every batch.
    keras.utils.set_random_seed(seed)
    (train_x, train_y), test = common.load_images(dataset, seed)
    train = (
        tf.data.Dataset.from_tensor_slices((train_x, train_y))
        .shuffle(len(train_x), seed=seed)
        .batch(batch_size, drop_remainder=True)
        .apply(lambda batches: job.local_part(batches, batch_size))
        .repeat()  # makes an epoch start faster on several workers
    )
    steps_per_epoch = steps_per_epoch or len(train_x) // batch_size
    validation = tf.data.Dataset.from_tensor_slices(test).batch(batch_size)

    with job.strategy.scope():  # (2) create the model and everything that belongs to it in here
        model = compiled_model(
            train_x.shape[1:],
            gc.CompressedOptimizer(  # (3) around your optimizer
                make_optimizer(optimizer, learning_rate),
                compressor,
                precondition=precondition,
                local_steps=local_steps,
                group=job.group,
            ),
            classes=int(train_y.max()) + 1,
        )
    fitted = common.fit(
        job,
        model,
        train,
        make_callbacks(job, checkpoints),
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        validation_data=validation,
    )

    loss, accuracy = model.evaluate(validation, verbose=0)
    if gc.is_chief(job.strategy):
        print(f"Test accuracy {accuracy:.2%}, loss {loss:.4f}")
        common.write_fitted(history, job, model, fitted, steps_per_epoch)


def compiled_model(
    image_shape: tuple[int, ...], optimizer: keras.optimizers.Optimizer, classes: int = 10
) -> keras.Model:
    return common.compiled(build_model(image_shape, classes), optimizer)


def simulation_task(
    batch_size: int = 64, seed: int = 0, optimizer: str = "adam"
) -> gc.simulation.Task:
    """For `gradcomp simulate digits_cnn.py`: the same training, by learners in one process."""
    keras.utils.set_random_seed(seed)
    train, test = common.load_images("digits", seed)
    model = compiled_model(train[0].shape[1:], make_optimizer(optimizer))
    batches = (
        tf.data.Dataset.from_tensor_slices(train)
        .shuffle(len(train[0]), seed=seed)
        .batch(batch_size, drop_remainder=True)
    )
    return gc.simulation.Task(model, batches, len(train[0]) // batch_size, test)


def simulation_task_sgd(batch_size: int = 64, seed: int = 0) -> gc.simulation.Task:
    """The same with momentum: `gradcomp simulate digits_cnn.py:simulation_task_sgd`."""
    return simulation_task(batch_size, seed, "sgd")


def make_callbacks(job: common.Job, checkpoints: str | None) -> list[keras.callbacks.Callback]:
    callbacks = common.make_callbacks(job)
    if checkpoints is not None:
        # Under Horovod, only rank 0 has this callback.
        best = f"{checkpoints}/best.keras"
        if job.group is None or job.rank == 0:
            callbacks.append(
                keras.callbacks.ModelCheckpoint(best, monitor="val_accuracy", save_best_only=True)
            )
        # If the program is restarted after an interruption, it continues with the next epoch.
        callbacks.append(gc.callbacks.BackupAndRestore(f"{checkpoints}/backup", job.strategy))
    return callbacks


@click.command(context_settings={"show_default": True})
@common.compressor_option
@common.precondition_option
@common.local_steps_option
@common.horovod_option
@click.option("--epochs", default=30)
@click.option("--steps-per-epoch", type=int, help="By default, as many as see each image once.")
@click.option("--batch-size", default=64, help="Rows of a batch over all workers.")
@click.option("--optimizer", type=click.Choice(list(LEARNING_RATES)), default="adam")
@click.option("--learning-rate", type=float, help="By default 0.001 for Adam, 0.05 for SGD.")
@click.option(
    "--seed", default=0, help="Seed of the split, the weights and the order of the images."
)
@click.option(
    "--dataset",
    type=click.Choice(common.IMAGES),
    default="digits",
    help="Keras downloads all but digits, unless GRADCOMP_DATA names a folder that has them.",
)
@click.option("--checkpoints", metavar="FOLDER", help="Save the best model and a backup there.")
@common.history_option
def main(**settings: Any) -> None:
    """Train a convolutional network on images."""
    train(**settings)


if __name__ == "__main__":
    main()
