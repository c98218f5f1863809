"""Tests `gradcomp run --max-restarts` with a worker that is killed in the middle of a round.

The gradients do not depend on the weights, and are small multiples of powers of two, so NumPy's
sums are exact.
"""

import itertools
import json

import numpy as np
import pytest

from tests.cli.test_run import preloaded_gradcomp, program  # noqa: F401

EPOCHS, STEPS, BATCH, INPUTS, OUTPUTS = 2, 10, 8, 40, 4
TRAINING = """
import json, os, pathlib, signal, sys
import keras, numpy as np
import tf_gradcomp as gc

folder, death, method = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
strategy = gc.MultiWorkerMirroredStrategy()
with strategy.scope():
    dense = keras.layers.Dense(4, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((40,)), dense])
    outer = keras.optimizers.SGD(0.5, momentum=0.5, nesterov=True)
    rounds = gc.LocalSteps(4, outer if method == "no_compression" else None)
    optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0), method, local_steps=rounds)
    model.compile(optimizer, lambda true, predicted: keras.ops.mean(true * predicted, -1))


class Die(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        died = folder / "died"
        if index == 1 and optimizer.iterations == death and not died.exists():
            died.write_text(str(optimizer.rounds.pending))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, logs=None):
        left = [np.asarray(total).tolist() for total in optimizer.exchange.residuals or []]
        weights = [np.asarray(value).tolist() for value in model.get_weights()]
        seen = {"weights": weights, "left": left, "exchanges": optimizer.exchange.exchanges}
        (folder / f"worker{index}").write_text(json.dumps(seen))


data = np.load(folder / "data.npz")
backup = gc.callbacks.BackupAndRestore(folder / "backup", save_freq=6)
settings = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
model.fit(data["x"], data["y"], callbacks=[backup, Die()], **settings)
"""


def train(program, folder, method, death):  # noqa: F811
    """Trains on two workers, of which one is killed after a step; returns what each has."""
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-2, 3, (STEPS * BATCH, size)) for size in (INPUTS, OUTPUTS))
    np.savez(folder / "data.npz", x=x.astype("float32"), y=y.astype("float32"))
    options = ["-n", "2", "--max-restarts", "1"]
    done = preloaded_gradcomp("run", *options, program(TRAINING), str(folder), str(death), method)
    assert done.returncode == 0, done.stderr
    if death:
        assert (folder / "died").read_text() == "True"
        assert "restart 1 of 1.\n" in done.stderr
    return x, y, [json.loads((folder / f"worker{rank}").read_text()) for rank in range(2)]


def moved(x, y, steps):
    """Returns the sums of the mean gradients of some steps: the kernel's, and the bias's."""
    rows = np.concatenate([np.arange(BATCH) + BATCH * (step % STEPS) for step in steps])
    size = BATCH * OUTPUTS
    return x[rows].T @ y[rows] / size, y[rows].sum(0) / size


def steps_that_count(death):
    """Returns the numbers of the steps in the weights at the end.

    The last save before step 15 is after step 12, and Keras resumes at the start of an epoch.
    """
    every = range(EPOCHS * STEPS)
    return [*every[:12], *every[STEPS:]] if death else every


@pytest.mark.parametrize("death", [0, 15])
def test_nothing_is_lost_or_counted_twice(program, tmp_path, death):  # noqa: F811
    x, y, workers = train(program, tmp_path, "top_k(density=0.1)", death)
    every = moved(x, y, steps_that_count(death))
    for worker in workers:
        assert worker["weights"] == workers[0]["weights"]
        assert np.any(worker["left"][0])
        for weights, left, whole in zip(worker["weights"], worker["left"], every, strict=True):
            np.testing.assert_array_equal(np.subtract(weights, left), -whole)


# The saves after steps 6, 12 and 18 end rounds, and so does the end of an epoch.
@pytest.mark.parametrize(
    ("death", "lengths"), [(0, [4, 2, 4, 2, 4, 2, 2]), (15, [4, 2, 4, 2, 4, 2, 4])]
)
def test_outer_momentum_continues(program, tmp_path, death, lengths):  # noqa: F811
    x, y, workers = train(program, tmp_path, "no_compression", death)
    weights, momentum = ([np.zeros((INPUTS, OUTPUTS)), np.zeros(OUTPUTS)] for _ in range(2))
    steps = iter(steps_that_count(death))
    for length in lengths:
        change = moved(x, y, itertools.islice(steps, length))
        momentum = [0.5 * m - 0.5 * one for m, one in zip(momentum, change, strict=True)]
        ahead = [0.5 * m - 0.5 * one for m, one in zip(momentum, change, strict=True)]
        weights = [value + step for value, step in zip(weights, ahead, strict=True)]
    assert next(steps, None) is None
    for worker in workers:
        assert worker["exchanges"] == len(lengths)
        for actual, expected in zip(worker["weights"], weights, strict=True):
            np.testing.assert_array_equal(actual, expected)
