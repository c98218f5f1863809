"""Local steps in NumPy and plain Keras, for tests to compare workers with."""

import keras
import numpy as np

from tf_gradcomp.compressors import TopK
from tf_gradcomp.compressors.base import JobStateSpec

WORKERS = 2
SHAPES = [(40, 8), (8,)]
RATE = 2.0**-5


class KeepsNorms(TopK, registered=False):
    """Keeps a state of the job in units of the gradients."""

    name = "keeps_norms"

    def job_state(self, specs):
        return {"norms": JobStateSpec((len(specs),), in_gradient_units=True)}


def gradients(steps, seed=3, workers=WORKERS):
    rng = np.random.default_rng(seed)
    return [
        [[rng.integers(-8, 9, shape).astype("float32") for shape in SHAPES] for _ in range(workers)]
        for _ in range(steps)
    ]


class Learners:
    """Learners in NumPy and plain Keras, each with its own weights and inner optimizer."""

    def __init__(self, inner, outer=None):
        self.common = [keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES]
        self.own = [[keras.Variable(v) for v in self.common] for _ in range(WORKERS)]
        self.inner = [inner() for _ in range(WORKERS)]
        # Each variable's own outer optimizer counts the updates of this variable.
        self.outer = [outer() for _ in SHAPES] if outer else None

    def round(self, steps):
        """Takes local steps on the learners' gradients, and averages how far they have moved."""
        return self.take(steps).exchange(*range(len(SHAPES)))

    def take(self, steps):
        """Takes local steps on the learners' gradients."""
        for step_gradients in steps:
            for i, shares in enumerate(step_gradients):
                if shares is None:  # a step that this worker skips
                    continue
                # A worker's gradient is its share of the sum.
                self.inner[i].apply([WORKERS * share for share in shares], self.own[i])
        return self

    def exchange(self, *indices):
        """Averages how far some variables of the learners have moved."""
        for index in indices:
            common, each = self.common[index], [local[index] for local in self.own]
            mean = np.mean([np.asarray(common) - np.asarray(local) for local in each], 0)
            if self.outer:
                self.outer[index].apply([mean], [common])
            else:
                common.assign(common - mean)
            for local in each:
                local.assign(common)
        return self

    @property
    def values(self):
        return [np.asarray(variable) for variable in self.common]


def sgd():
    return keras.optimizers.SGD(RATE)


def assert_equal(actual, expected):
    for first, second in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(first, np.float32), second)
