"""Models of other types than float32 do the same on several workers as in one process.

Each check has the results of `alone` in one process, with the initial values of rank 0.
"""

import keras
import numpy as np
import tensorflow as tf
from common import WHOLE, Setup, digits, linear_model

from tests.ranks import RANK, argument, report

WAY = argument(1)
DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16"),
    *("bfloat16", "float32", "float64", "complex64", "complex128", "string"),
)
setup = Setup(WAY, WHOLE)
strategy = setup.strategy


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


report({check: globals()[check]() for check in argument(2).split(",")})
