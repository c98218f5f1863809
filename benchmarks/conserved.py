"""Trains until a file asks it to stop, and checks after each epoch that no gradient was lost.

The weights begin at zero and the learning rate is 1, so the applied gradients are the negated
weights. Applied plus unsent gradients must equal the sum over all epochs so far, also after a
restart. Float32 holds all of these sums exactly:

- Gradients are whole numbers. In each four epochs, they partly cancel, so sums stay small.
- A restart divides the residuals among the workers, whose number is a power of two. Every fourth
  epoch has no gradients, and sends all that was unsent. So residuals are divided three times at
  most before their fractions become whole again.

The argument is a folder for the backup and for `log.jsonl`, to which the workers append lines. A
file named `stop` in the folder ends the training.
"""

from __future__ import annotations

import gc as garbage
import json
import os
import sys
from pathlib import Path
from typing import Any

LOG, STOP = "log.jsonl", "stop"
STEPS = 20  # of an epoch, enough to send all residuals
_ROWS, _FEATURES, _OUTPUTS = 4, 200, 10  # rows of a worker in a step
_FACTORS = (1, 1, -1, 0)  # of all gradients, by epoch; in the last one, only residuals are sent
_EXACT = 2**24  # float32 holds all whole numbers up to this one


def note(folder: Path, **facts: Any) -> None:
    """Appends a line to the log, which all workers share."""
    with open(folder / LOG, "a") as file:
        file.write(json.dumps(facts) + "\n")


def factors_until(epoch: int) -> int:
    """Returns the sum of the factors of all earlier epochs."""
    cycles, remainder = divmod(epoch, len(_FACTORS))
    return cycles * sum(_FACTORS) + sum(_FACTORS[:remainder])


def main() -> None:
    folder = Path(sys.argv[1])
    task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    note(folder, worker=task, pid=os.getpid())  # first, for it may be killed from now on
    train(folder, task)


def train(folder: Path, task: int) -> None:
    import keras
    import numpy as np

    import tf_gradcomp as gc

    strategy = gc.MultiWorkerMirroredStrategy()
    rows = STEPS * _ROWS * strategy.num_replicas_in_sync
    random = np.random.default_rng(0)
    x, y = (random.integers(-1, 2, (rows, n)).astype("float32") for n in (_FEATURES, _OUTPUTS))
    expected = [x.T @ y, y.sum(0)]  # to the kernel and to the bias, by an epoch whose factor is 1
    finest = strategy.num_replicas_in_sync ** (len(_FACTORS) - 1)  # a fraction's denominator
    with strategy.scope():
        factor = keras.Variable(0.0, trainable=False)

    class Linear(keras.losses.Loss):
        """The sum of the products of outputs and targets, times the factor of the epoch."""

        def call(self, y_true: Any, y_pred: Any) -> Any:
            return factor * keras.ops.sum(y_true * y_pred, axis=-1)

    class Conserved(keras.callbacks.Callback):
        """Compares what was applied and what is unsent with what was given."""

        began = False

        def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            if not self.began:  # Keras may have restored a backup just before
                self.began = True
                self.compare(epoch)
                garbage.freeze()  # what there is by now stays, and need not be looked at again
                if task == 0:
                    note(folder, resumed=epoch)
            factor.assign(_FACTORS[epoch % len(_FACTORS)])

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            self.compare(epoch + 1)
            garbage.collect()  # Python itself would do so once in hundreds of epochs
            note(folder, worker=task, collectives=strategy.progress.position().events // 2)
            if task == 0:
                note(folder, saved=epoch + 1)
            stop = np.array([(folder / STOP).exists()], np.float64)
            self.model.stop_training = bool(strategy.group.processes.broadcast_values(stop)[0])

        def compare(self, epochs: int) -> None:
            optimizer = self.model.optimizer
            unsent = [np.asarray(total) for total in optimizer.exchange.residuals]
            weights = self.model.get_weights()
            times = factors_until(epochs)
            lost = [
                float(np.abs(times * total + weight - residual).max())
                for total, weight, residual in zip(expected, weights, unsent, strict=True)
            ]
            steps = int(optimizer.iterations.numpy())
            largest = max(float(np.abs(weight).max()) for weight in weights)
            is_unsent = epochs % len(_FACTORS) == 0 and any(residual.any() for residual in unsent)
            if any(lost) or is_unsent or steps != epochs * STEPS or largest * finest > _EXACT:
                problem = f"after {epochs} epochs: {lost=}, {is_unsent=}, {steps=}, {largest=}"
                note(folder, problem=problem)
                raise AssertionError(problem)

    with strategy.scope():
        zeros = {"kernel_initializer": "zeros", "bias_initializer": "zeros"}
        model = keras.Sequential([keras.Input((_FEATURES,)), keras.layers.Dense(_OUTPUTS, **zeros)])
        optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0), "top_k(density=0.05)")
        model.compile(optimizer, Linear(reduction="sum"))
        optimizer.build(model.trainable_variables)
    model.fit(
        x,
        y,
        batch_size=rows // STEPS,
        epochs=sys.maxsize,
        shuffle=False,
        verbose=0,
        callbacks=[gc.callbacks.BackupAndRestore(folder / "backup"), Conserved()],
    )


if __name__ == "__main__":
    main()
