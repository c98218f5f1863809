"""Fragments of variables that learners exchange in turn, compared with exact arithmetic."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tf_gradcomp.keras.local.fragments import flatten, split, unflatten

RATE, LEARNERS, ROWS, STEPS = 2.0**-5, 2, 2, 11
INPUTS, OUTPUTS = 4, (8, 2, 4)


@pytest.mark.parametrize(
    ("elements", "count", "expected"),
    [
        ([100, 50, 60], 2, [[0], [1, 2]]),
        ([1, 1, 1, 1, 1], 2, [[0, 2, 4], [1, 3]]),
        ([3, 2], 5, [[0], [1]]),
        ([0, 0, 7], 3, [[0], [1], [2]]),
        ([4, 5], 1, [[0, 1]]),
        ([], 4, [[]]),
    ],
)
def test_variables_are_divided_into_fragments_of_about_equal_size(elements, count, expected):
    assert split(elements, count) == expected


def test_a_vector_holds_the_values_of_all_dtypes_exactly():
    bits = np.arange(2**16, dtype=np.uint16)
    halves = [tf.bitcast(bits.reshape(2, -1), dtype) for dtype in (tf.float16, tf.bfloat16)]
    finite = [tf.where(tf.math.is_finite(half), half, tf.zeros_like(half)) for half in halves]
    values = [tf.constant(np.float32(1 / 3)), *finite, tf.zeros([0, 3]), tf.constant([-0.0, 1e-45])]
    kept = tf.function(lambda *values: unflatten(flatten(values), values))
    variables = list(map(tf.Variable, values))
    for result in (kept(*values), unflatten(flatten(variables), variables)):
        for value, one in zip(values, result, strict=True):
            assert (one.dtype, one.shape) == (value.dtype, value.shape)
            assert one.numpy().tobytes() == value.numpy().tobytes()


def linear_model():
    """Returns a model whose gradients are small integers, halved, for any weights."""
    inputs = keras.Input((INPUTS,))
    parts = [keras.layers.Dense(n, kernel_initializer="zeros")(inputs) for n in OUTPUTS]
    model = keras.Model(inputs, keras.layers.Concatenate()(parts))
    model.compile(keras.optimizers.SGD(RATE), lambda y, output: tf.reduce_sum(y * output, -1))
    return model


def batches():
    rng = np.random.default_rng(0)
    rows = ROWS * LEARNERS
    shapes = (rows, INPUTS), (rows, sum(OUTPUTS))
    return [[rng.integers(-4, 5, s).astype("float32") for s in shapes] for _ in range(STEPS)]


def gradients(x, y):
    """Returns the gradients of a learner's own mean loss."""
    columns = np.split(y, np.cumsum(OUTPUTS)[:-1], axis=1)
    return [g for part in columns for g in (x.T @ part / ROWS, part.sum(0) / ROWS)]


class Streaming:
    """Streaming local SGD in NumPy, with `SGD(0.5)` outside."""

    def __init__(self, values, fragments):
        self.fragments = fragments
        self.common = [value.copy() for value in values]
        self.own = [[value.copy() for value in values] for _ in range(LEARNERS)]
        self.position = self.exchanges = self.elements = 0

    def step(self, x, y, length):
        """Takes a step of a cycle of so many steps."""
        for learner, local in enumerate(self.own):
            rows = slice(learner * ROWS, (learner + 1) * ROWS)
            for weight, gradient in zip(local, gradients(x[rows], y[rows]), strict=True):
                weight -= RATE * gradient
        self.position += 1
        for index, fragment in enumerate(self.fragments, 1):
            if self.position == math.ceil(index * length / len(self.fragments)):
                self.exchange(fragment)
        self.position %= length

    def exchange(self, fragment):
        self.exchanges += 1
        for index in fragment:
            self.elements += self.common[index].size
            mean = np.mean([self.common[index] - local[index] for local in self.own], 0)
            self.common[index] -= mean / 2
            for local in self.own:
                local[index][...] = self.common[index]


@pytest.mark.parametrize(
    ("schedule", "count"),
    [(4, 1), (4, 2), (5, 3), (2, 4), (1, 3), (3, 99), ([(0, 1), (2, 4), (8, 2)], 3)],
)
def test_each_fragment_is_exchanged_at_its_own_steps(schedule, count):
    model = linear_model()
    settings = gc.LocalSteps(schedule, keras.optimizers.SGD(0.5), fragments=count)
    learners = gc.simulation.Learners(model, LEARNERS, "no_compression", local_steps=settings)
    fragments = split([spec.elements for spec in learners.exchange.specs], count)
    expected = Streaming(model.get_weights(), fragments)
    length = schedule if isinstance(schedule, int) else None
    for step, (x, y) in enumerate(batches()):
        if not isinstance(schedule, int) and expected.position == 0:
            length = next(n for begin, n in reversed(schedule) if begin <= step)
        report = learners.train_on_batch(x, y)
        before = expected.exchanges, expected.elements
        expected.step(x, y, length)
        assert_equal(model.get_weights(), expected.own[0])
        # Each exchange also has a flag and a tag, of a word each.
        exchanges, elements = expected.exchanges - before[0], expected.elements - before[1]
        assert 0 <= report.payload_bytes - 4 * elements <= 4 * 2 * exchanges
        assert report.dense_bytes == 4 * sum(v.size for v in expected.common)
    learners.synchronize()
    for fragment in fragments:
        begun = any(
            np.any(local[index] != expected.common[index])
            for local in expected.own
            for index in fragment
        )
        if begun:
            expected.exchange(fragment)
    assert_equal(model.get_weights(), expected.common)
    assert learners.exchange.exchanges == expected.exchanges


def assert_equal(values, expected):
    for value, one in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, one)


@pytest.mark.parametrize(
    "method",
    ["power_sgd", "lgreco(method='qsgd')", "adacomp(warmup_steps=3)", "top_k(momentum=0.5)"],
)
def test_methods_train_in_fragments(method):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), *map(keras.layers.Dense, (64, 32, 2))])
    model.compile(keras.optimizers.SGD(0.002), loss="mse")
    settings = gc.LocalSteps(4, fragments=3, warmup_steps=1, residual_decay=0.9)
    learners = gc.simulation.Learners(model, 2, method, local_steps=settings)
    data = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")
    batches = [(data[i : i + 4], data[i : i + 4, :2]) for i in range(0, 32, 4)]
    history = learners.fit(batches, epochs=2)
    assert history["loss"][1] < history["loss"][0]
    # After a synchronous step, fragments are due in steps 2, 3 and 4 of each cycle. The first epoch
    # ends within the second cycle, and its end exchanges two fragments. So does the second's.
    assert learners.exchange.exchanges == (1 + 3 + 2 + 2) + (3 + 3 + 2)
    if method.startswith("lgreco"):
        assert learners.plans
        assert history["payload_bytes"][1] < history["dense_bytes"][1] / 2


@pytest.mark.parametrize("settings", [2, gc.LocalSteps(4, fragments=2)])
def test_values_that_the_program_sets_hold_for_all_learners(settings):
    model, rate = linear_model(), RATE
    learners = gc.simulation.Learners(model, LEARNERS, "no_compression", local_steps=settings)
    mean = model.get_weights()  # of all learners
    for index, (x, y) in enumerate(batches()):
        if index in (3, 6):  # within a round of two steps, and between two
            rate /= 2
            mean = [value + index for value in mean]
            model.set_weights(mean)
            model.optimizer.learning_rate = rate
        learners.train_on_batch(x, y)
        mean = [w - rate * g / LEARNERS for w, g in zip(mean, gradients(x, y), strict=True)]
    learners.synchronize()
    assert_equal(model.get_weights(), mean)
