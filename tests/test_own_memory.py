"""Data that Python code hands to TensorFlow under our strategy stays as the program has it."""

from multiprocessing import shared_memory

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tf_gradcomp.strategy import strategy as strategy_module
from tf_gradcomp.strategy.input_data import copied

COLUMNS = 16  # of float32: rows, and so all parts, are as aligned as the whole
SPEC = tf.TensorSpec((4, COLUMNS), tf.float32)


@pytest.fixture(scope="module", autouse=True)
def strategy():
    return gc.MultiWorkerMirroredStrategy()


class Subclass(np.ndarray):
    pass


class Foreign:
    """Data of another library: NumPy gets its memory without a copy, as from PyTorch's tensors."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


def aligned(folder=None, shape=(8, COLUMNS)):
    room = np.empty(4 * np.prod(shape) + 64, np.uint8)
    return np.ndarray(shape, "float32", buffer=room, offset=-room.ctypes.data % 64)


def mapped(mode):
    def new(folder):
        np.save(folder / "data.npy", np.zeros((8, COLUMNS), "float32"))
        return np.load(folder / "data.npy", mmap_mode=mode)

    return new


def shared(folder):
    class Shared(np.ndarray):  # can have an attribute
        pass

    block = shared_memory.SharedMemory(create=True, size=4 * 8 * COLUMNS)
    block.unlink()
    array = np.ndarray((8, COLUMNS), "float32", buffer=block.buf).view(Shared)
    array.block = block
    return array


def read_only(array):
    array.flags.writeable = False
    return array


# Where the memory is from, and how a program hands over a part of it.
KINDS = {
    "aligned": (aligned, np.asarray),
    "subclass": (aligned, lambda part: part.view(Subclass)),
    "read-only": (aligned, read_only),
    "copy-on-write map": (mapped("c"), lambda part: part),
    "writable map": (mapped("r+"), lambda part: part),
    "shared memory": (shared, np.asarray),
    "another library": (aligned, Foreign),
    "tensor": (aligned, tf.convert_to_tensor),
    "tensor of another library": (aligned, lambda part: tf.convert_to_tensor(Foreign(part))),
    "DLPack": (aligned, lambda part: tf.experimental.dlpack.from_dlpack(part.__dlpack__())),
}


def from_generator(part):
    return tf.data.Dataset.from_generator(lambda: map(part, range(2)), output_signature=SPEC)


def with_optionals(part):
    """Keras does this where a generator's batches have a None."""
    none = tf.experimental.Optional.empty(None)
    data = tf.data.Dataset.from_generator(
        lambda: ((part(i), none) for i in range(2)),
        output_signature=(SPEC, tf.OptionalSpec(None)),
    )
    return data.map(lambda x, _: x)


def by(function):
    def data(part):
        def shaped(i):
            return tf.ensure_shape(function(lambda i: part(int(i)), [i], SPEC.dtype), SPEC.shape)

        return tf.data.Dataset.range(2).map(shaped)

    return data


ENTRIES = {
    "from_generator": from_generator,
    "with_optionals": with_optionals,
    "numpy_function": by(tf.numpy_function),
    "py_function": by(tf.py_function),
    "from_tensors": lambda part: tf.data.Dataset.from_tensors(part(0)).concatenate(
        tf.data.Dataset.from_tensors(part(1))
    ),
}


COPYING = ["from_generator", "numpy_function", "py_function"]
OTHERS = ["with_optionals", "from_tensors"]  # make tensors of arrays themselves


@pytest.mark.parametrize(
    ("entry", "kind"),
    [(entry, kind) for entry in COPYING for kind in KINDS]
    + [(entry, kind) for entry in OTHERS for kind in ("aligned", "another library")],
)
def test_no_step_of_a_pipeline_writes_into_the_programs_data(tmp_path, entry, kind):
    new, hand_over = KINDS[kind]
    whole = new(tmp_path)
    whole[:] = before = np.arange(8 * COLUMNS, dtype="float32").reshape(8, COLUMNS)
    data = ENTRIES[entry](lambda i: hand_over(whole[4 * i : 4 * i + 4]))
    # TensorFlow takes a slice of a batch for each worker, and computes in its memory.
    seen = [list(data.map(lambda x: x[:2] * 2).as_numpy_iterator()) for _ in range(2)]
    np.testing.assert_array_equal(whole, before)
    np.testing.assert_array_equal(seen, 2 * [[2 * before[:2], 2 * before[4:6]]])
    if isinstance(whole, np.memmap) and whole.mode == "r+":
        np.testing.assert_array_equal(np.load(tmp_path / "data.npy"), before)


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 2)])
@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int64", "float16", "complex128", ml_dtypes.bfloat16, ml_dtypes.int4]
)
def test_values_of_every_type_and_shape_are_kept(dtype, shape):
    array = np.resize(np.arange(15).astype(dtype), shape)
    copy = copied(array)
    assert copy.dtype == array.dtype
    assert copy.shape == array.shape
    assert copy.tobytes() == array.tobytes()
    assert not np.shares_memory(copy, array)
    tensor = tf.py_function(lambda: array, [], array.dtype)
    assert np.asarray(tensor.numpy()).tobytes() == array.tobytes()


def test_strings_pass():
    words = np.array(["ü", "longer"])
    for function in (tf.numpy_function, tf.py_function):
        assert [w.decode() for w in function(lambda: words, [], tf.string).numpy()] == list(words)


def memory_of(tensor):
    return np.asarray(memoryview(tensor))


def returned_in_a_graph(array):
    return tf.function(lambda: tf.numpy_function(lambda: array, [], tf.float32))()


def test_tensorflow_does_not_copy_the_copy(monkeypatch):
    monkeypatch.setattr(strategy_module, "_strategies", ())
    copy = copied(np.zeros((1000, COLUMNS), "float32"))
    assert np.shares_memory(memory_of(returned_in_a_graph(copy)), copy)


def test_gradients_go_through_a_py_function():
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.py_function(lambda x: x**3, [x], tf.float32)
    np.testing.assert_array_equal(tape.gradient(y, x), [3, 12])
    in_graph = tf.function(
        lambda x: tf.gradients(tf.py_function(lambda x: x**3, [x], tf.float32), x)
    )
    np.testing.assert_array_equal(in_graph(x), [[3, 12]])


def test_a_program_without_our_strategy_is_left_alone(monkeypatch):
    array = aligned()
    assert not np.shares_memory(memory_of(returned_in_a_graph(array)), array)
    monkeypatch.setattr(strategy_module, "_strategies", ())
    assert np.shares_memory(memory_of(returned_in_a_graph(array)), array)
