"""Starts jobs of Keras 2 under a strategy or under Horovod, and compares what workers report."""

import contextlib
import functools
import importlib.util

import numpy as np
import pytest

from tests.bounds import rounding, training
from tests.workers import results, run_workers
from tf_gradcomp.launch import horovod_ranks

# Adam moves a weight by up to 0.01 / 0.05 of its gradient. Sums are over 24 rows, 20 words, and 16
# and 3 units.
SUMS = 24 + 20 + 16 + 3
TRAINED = training(gain=0.2, terms=SUMS, steps=8)
# A third of each residual, three times, and a sum over at most 20 * 16 of them.
RESTORED = rounding(1, terms=3 + 1 + 20 * 16)
HAS_HOROVOD = importlib.util.find_spec("horovod") is not None
HAS_ADDONS = importlib.util.find_spec("tensorflow_addons") is not None

needs_horovod = pytest.mark.skipif(
    not HAS_HOROVOD,
    reason="Horovod is not installed; `python3 dev.py test --keras2` builds it",
)
# Some are run with the newest TensorFlow and tf_keras, too.
tf_keras = pytest.mark.tf_keras
quick = pytest.mark.quick("tf_keras")


def by_strategy(program, *args):
    return results(run_workers(program, 2, args))


@contextlib.contextmanager
def horovod_workers(n):
    """Returns a function that runs a program on so many ranks."""
    with horovod_ranks(n) as each:
        yield functools.partial(run_workers, n=n, per_worker_env=each)


def by_horovod(program, *args, n=2):
    with horovod_workers(n) as run:
        return results(run(program, args=args))


def largest_difference(left, right):
    return max(np.abs(np.array(a) - np.array(b)).max() for a, b in zip(left, right, strict=True))
