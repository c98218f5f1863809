"""Training leaves the program's own data as they are, in memory and on disk."""

import functools
import hashlib
import tempfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.ranks import RANK, argument, report
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
BATCHES, SIZE = 4, 16  # a row has 64 bytes, so that each part is as aligned as the whole
SPEC = tuple(tf.TensorSpec((SIZE, columns), tf.float32) for columns in (SIZE, 1))
Y = np.tile(np.arange(1, SIZE + 1, dtype="float32"), BATCHES)[:, np.newaxis]


def saved():
    """A file with one identity matrix for each batch."""
    path = FOLDER / "data.npy"
    np.save(path, np.tile(np.eye(SIZE, dtype="float32"), (BATCHES, 1)))
    return path


def rows(i):
    return slice(SIZE * i, SIZE * (i + 1))


class Batches(keras.utils.PyDataset):
    def __init__(self, x):
        super().__init__()
        self.x = x

    def __len__(self):
        return BATCHES

    def __getitem__(self, i):
        return self.x[rows(i)], Y[rows(i)]


def generator(x):
    def endless():
        while True:
            yield from Batches(x)

    return endless()


def from_generator(x):
    return tf.data.Dataset.from_generator(lambda: iter(Batches(x)), output_signature=SPEC)


class Foreign:
    """Data of another library: NumPy gets its memory without a copy, as from PyTorch's tensors."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


def by(function, hand_over):
    def data(x):
        def batch(i):
            types = [spec.dtype for spec in SPEC]
            parts = function(lambda i: [hand_over(part) for part in Batches(x)[i]], [i], types)
            return tuple(
                tf.ensure_shape(part, spec.shape) for part, spec in zip(parts, SPEC, strict=True)
            )

        return tf.data.Dataset.range(BATCHES).map(batch)

    return data


WAYS = {
    "PyDataset": Batches,
    "generator": generator,
    "from_generator": from_generator,
    "numpy_function": by(tf.numpy_function, np.asarray),
    "py_function": by(tf.py_function, Foreign),
}


def trained(data, steps=None):
    """Returns the losses of two epochs, the loss of `evaluate`, and the result of `predict`."""
    known = {"steps": BATCHES, "verbose": 0} if steps else {"verbose": 0}
    history = model.fit(data(), epochs=2, steps_per_epoch=steps, shuffle=False, verbose=0)
    evaluated = model.evaluate(data(), **known)
    return [*history.history["loss"], evaluated], model.predict(data(), **known)


def by_batches(x):
    local = [slice(SIZE * i + 8 * RANK, SIZE * i + 8 * RANK + 8) for i in range(BATCHES)]
    losses = [
        float(np.mean([model.train_on_batch(x[part], Y[part]) for part in local])) for _ in range(2)
    ]
    evaluated = float(np.mean([model.test_on_batch(x[part], Y[part]) for part in local]))
    return [*losses, evaluated], np.concatenate([model.predict_on_batch(x[part]) for part in local])


def by_arrays(x):
    arguments = {"batch_size": SIZE, "verbose": 0}
    history = model.fit(x, Y, epochs=2, shuffle=False, **arguments)
    evaluated = model.evaluate(x, Y, **arguments)
    return [*history.history["loss"], evaluated], model.predict(x, **arguments)


def checked(x, path, train):
    """Returns the losses, and whether training changed the data in memory and in the file."""
    before = digest_of(path)
    dense.set_weights([np.zeros((SIZE, 1))])
    losses, predicted = train(x)
    changed = int(np.sum(np.asarray(x) != np.tile(np.eye(SIZE), (BATCHES, 1))))
    return {
        "losses": losses,
        "predicted": predicted[:, 0],
        "changed in memory": changed,
        "file is as it was": digest_of(path) == before,
    }


def digest_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_way(way):
    steps = BATCHES if way == "generator" else None
    return lambda x: trained(lambda: WAYS[way](x), steps)


FORMS = [
    *("PyDataset", "generator", "from_generator", "numpy_function", "py_function"),
    *("on_batch", "arrays"),
    *("mode c", "mode r", "h5py"),
]


@functools.cache
def seen():
    """Returns the batches that each of two workers saw, by the way it read them."""
    with tempfile.TemporaryDirectory() as folder:
        return results(run_workers(PROGRAM, 2, [folder]))


@pytest.mark.parametrize("form", FORMS)
def test_data_are_not_changed(form):
    for worker in seen():
        assert worker[form]["changed in memory"] == 0
        assert worker[form]["file is as it was"]


@pytest.mark.parametrize("form", FORMS)
def test_all_workers_train_as_one_process(form):
    # Each of the 16 weights has one row of each batch, whose error each step halves. All numbers
    # are exact in float32, on any number of workers.
    y = np.arange(1.0, 17)
    losses = np.mean(y**2) / 4.0 ** np.arange(9)
    expected = [np.mean(losses[:4]), np.mean(losses[4:8]), losses[8]]
    for worker in seen():
        assert worker[form]["losses"] == expected
        for rows in np.reshape(worker[form]["predicted"], (4, 16)):
            np.testing.assert_array_equal(np.sort(rows), y * (1 - 2.0**-8))


if __name__ == "__main__":
    FOLDER, checks = Path(argument(1)) / str(RANK), {}
    strategy = gc.MultiWorkerMirroredStrategy()
    with strategy.scope():
        first = keras.layers.Rescaling(2.0)  # TensorFlow can compute it in place
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.layers.Input((SIZE,)), first, dense])
        model.compile(keras.optimizers.SGD(1.0), "mse")
    FOLDER.mkdir()
    for way in WAYS:
        path = saved()
        checks[way] = checked(np.load(path, mmap_mode="r+"), path, run_way(way))
    for name, train in {"on_batch": by_batches, "arrays": by_arrays}.items():
        path = saved()
        checks[name] = checked(np.load(path, mmap_mode="r+"), path, train)
    for mode in ("c", "r"):
        path = saved()
        checks[f"mode {mode}"] = checked(np.load(path, mmap_mode=mode), path, run_way("PyDataset"))
    path = FOLDER / "data.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.load(saved())
    with h5py.File(path, "r") as file:
        checks["h5py"] = checked(file["x"], path, run_way("PyDataset"))
    report(checks)
