"""Training by Ray Train, which starts all workers again from the last checkpoint when one is lost.

pip install "tf-gradcomp[ray]"
python ray_train.py        # and again with other WORKERS or EPOCHS: it resumes
"""

import tempfile
from pathlib import Path

import keras
import numpy as np
import ray.train
from ray.train.tensorflow import TensorflowTrainer

import tf_gradcomp as gc

WORKERS, EPOCHS = 2, 10  # epochs in total, over all runs
BATCH, STEPS = 64, 64  # rows of a batch over all workers, steps per epoch


def load_data():  # replace this by your data
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH * STEPS, 64)).astype("float32")
    return x, np.argmax(x @ random.normal(size=(64, 10)), axis=1)


def build_model():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, activation="relu")])
    model.add(keras.layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = gc.CompressedOptimizer(keras.optimizers.Adam())
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


class Report(keras.callbacks.Callback):
    """Reports metrics on all workers, and a checkpoint on the chief."""

    def on_epoch_end(self, epoch, logs=None):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if gc.is_chief(self.model.distribute_strategy):
                self.model.save(Path(folder, "model.keras"))  # with the residuals of all workers
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, **(logs or {})}, checkpoint=checkpoint)  # waits


def train(config):  # on each worker, whose TF_CONFIG Ray has set
    strategy = gc.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    checkpoint = ray.train.get_checkpoint()
    with strategy.scope():
        if checkpoint is None:
            model = build_model()
        else:
            with checkpoint.as_directory() as folder:
                model = keras.models.load_model(Path(folder, "model.keras"))
    done, epochs = int(model.optimizer.iterations.numpy()) // STEPS, config["epochs"]
    callbacks = [Report()]
    model.fit(*load_data(), BATCH, epochs, initial_epoch=done, callbacks=callbacks, verbose=0)


def trainer(storage, workers, epochs, failures=10):
    return TensorflowTrainer(
        train,
        train_loop_config={"epochs": epochs},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name="train",  # a run with an earlier run's name resumes it
            storage_path=str(Path(storage).absolute()),  # which all workers see
            failure_config=ray.train.FailureConfig(max_failures=failures),
        ),
    )


if __name__ == "__main__":
    print(trainer("ray_results", WORKERS, EPOCHS).fit().metrics)
