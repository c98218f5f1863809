"""Tests that two workers equal one process, for other dtypes than float32 and eager functions."""

import functools
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.distributed.common import WHOLE, Setup, digits, linear_model
from tests.ranks import RANK, argument, report
from tests.workers import result, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16"),
    *("bfloat16", "float32", "float64", "complex64", "complex128", "string"),
)


def plain(array):
    """All bits of an array."""
    array = np.asarray(array)
    bits = repr(array.tolist()) if array.dtype == object else array.tobytes().hex()
    return [str(array.dtype), list(array.shape), bits]


def initial_value(dtype, rank=RANK):
    """Differs among the workers, and uses all bits of the dtype."""
    values = np.array([[0, 1, 253 + rank], [2**15 - rank, 2**31 - 2, 2**63 - 9]], "uint64")
    if dtype == "string":
        return tf.constant([[b"", b"\x00\xff"], [b"of %d" % rank, "ä".encode()]])
    if dtype == "bool":
        return tf.constant([[True, False], [rank == 0, True]])
    if dtype.startswith("complex"):
        return tf.constant([1.5 - 2j, rank + 1j, 1e-30 + 3e30j], dtype)
    if tf.as_dtype(dtype).is_floating:
        return tf.constant([1.5, -0.0, 6e-5 + rank, float("inf")], dtype)
    return tf.constant(values.astype(dtype))


class Keeping(keras.layers.Layer):
    """Has state of each dtype, from the first call on."""

    def build(self, _):
        self.kept = {dtype: tf.Variable(initial_value(dtype)) for dtype in DTYPES}
        self.count = self.add_weight(
            shape=(), dtype="int16", initializer="ones", trainable=False, name="count"
        )

    def call(self, x):
        return x * tf.cast(self.kept["uint8"][0, 1], x.dtype)


def state():
    """Returns variables created in the scope, and by the first step of a function."""
    with strategy.scope():
        eager, traced = Keeping(), Keeping()
        eager.build(None)
        text = tf.Variable(f"of {RANK}")

    @tf.function
    def step():
        strategy.run(traced, [tf.ones([2])])

    step()
    kept = [
        {dtype: plain(variable.numpy()) for dtype, variable in layer.kept.items()}
        for layer in (eager, traced)
    ]
    return [*kept, plain(text.numpy()), int(eager.count.numpy())]


class Casts(keras.Model):
    """Returns its input as each dtype."""

    def call(self, x):
        values = tf.cast(x, tf.int32)
        strings = tf.where(values > 50, tf.strings.as_string(values), "")
        return {**{dtype: tf.cast(values, dtype) for dtype in DTYPES[:-1]}, "string": strings}


def predictions():
    """Predicts 21 rows in batches of 8: of the last five rows, the workers have 4 and 1."""
    x = np.arange(-7 * 5, 7 * 16, dtype="float32").reshape(21, 7)
    with strategy.scope():
        model = Casts()
    predicted = model.predict(x, batch_size=8, verbose=0)
    return {dtype: plain(array) for dtype, array in predicted.items()}


class Unused(keras.layers.Layer):
    """Has trainable variables that no loss depends on."""

    def build(self, _):
        for dtype in ("int32", "float64", "float32"):
            self.add_weight(shape=(3,), dtype=dtype, initializer="ones", name=dtype)

    def call(self, x):
        return x


def trained(policy="float32", **kwargs):
    x, y = digits(128)
    build = lambda: keras.Sequential([*linear_model().layers, Unused()])  # noqa: E731
    optimizer = lambda: setup.wrap(keras.optimizers.SGD(0.1, momentum=0.9, **kwargs))  # noqa: E731
    model = setup.model(build, optimizer, policy=policy)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    return [weight.tolist() for weight in model.get_weights()]


def unused():
    return trained()


def unused_with_bfloat16():
    return trained("bfloat16")


def unused_accumulating():
    return trained(gradient_accumulation_steps=2)


def functions_run_eagerly():
    """A whole training program where `tf.function` does nothing."""
    x, y = digits(32)
    tf.config.run_functions_eagerly(True)
    model = setup.model(
        linear_model, lambda: setup.wrap(keras.optimizers.SGD(0.5)), metrics=["accuracy"]
    )
    history = model.fit(
        x, y, batch_size=16, epochs=2, shuffle=False, validation_data=(x, y), verbose=0
    )
    evaluated = model.evaluate(x, y, batch_size=16, verbose=0)
    predicted = model.predict(x, batch_size=16, verbose=0)
    tf.config.run_functions_eagerly(False)
    return {
        "history": history.history,
        "evaluated": evaluated,
        "predicted": predicted,
        "weights": [weight.tolist() for weight in model.get_weights()],
    }


CHECKS = {
    "unwrapped": ("state", "predictions", "functions_run_eagerly"),
    "optimizer": (
        "unused_accumulating",
        "unused_with_bfloat16",
        "functions_run_eagerly",
    ),
    "strategy": ("unused", "functions_run_eagerly"),
}
ALL = sorted({check for some in CHECKS.values() for check in some})
# A sum over the 16 rows of a batch and 8 features may round in each term, and does so in 8 steps.
ROUNDING = 8 * 16 * 8 * 2.0**-24


@functools.cache
def seen(way):
    checks = ALL if way == "alone" else CHECKS[way]
    return [
        result(worker)
        for worker in run_workers(PROGRAM, 1 if way == "alone" else 2, [way, ",".join(checks)])
    ]


@pytest.mark.parametrize("check", ["state", "predictions"])
def test_all_bits_equal_one_process_in(check):
    first, second = (worker[check] for worker in seen("unwrapped"))
    assert first == second
    assert first == seen("alone")[0][check]


@pytest.mark.parametrize(
    ("way", "check"), [(way, check) for way in CHECKS for check in CHECKS[way] if "unused" in check]
)
def test_variables_without_gradients_do_no_harm(way, check):
    first, second = (worker[check] for worker in seen(way))
    assert first == second
    # With bfloat16, each of 8 steps rounds the gradients' two halves, their sum, and the weights.
    rounding = 8 * 4 * 2.0**-8 if "bfloat16" in check else ROUNDING
    assert_close(first, seen("alone")[0][check], rounding)


@pytest.mark.parametrize("way", CHECKS)
def test_programs_whose_functions_run_eagerly_train_as_one_process(way):
    first, second = (worker["functions_run_eagerly"] for worker in seen(way))
    assert first == second
    (single,) = seen("alone")
    expected = single["functions_run_eagerly"]
    for name, values in expected["history"].items():
        assert_close(first["history"][name], values)
    for name in ("evaluated", "predicted", "weights"):
        assert_close(first[name], expected[name])


def assert_close(values, expected, rounding=ROUNDING):
    assert len(values) == len(expected)
    for value, like in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, like, atol=rounding * np.abs(like).max())


if __name__ == "__main__":
    WAY = argument(1)
    setup = Setup(WAY, WHOLE)
    strategy = setup.strategy
    report({check: globals()[check]() for check in argument(2).split(",")})
