"""Runs `DelayCheck` in jobs of each kind, and computes its logs from the residuals."""

import itertools

import numpy as np

import tf_gradcomp as gc
from tests.bounds import assert_close
from tf_gradcomp.keras_version import keras


class Noting(keras.callbacks.Callback):
    """Records the logs of each batch, and this worker's residuals."""

    def __init__(self, exchange_of):
        super().__init__()
        self.exchange_of = exchange_of
        self.logged, self.kept = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.logged.append(logs.get("residual_cosine"))
        exchange = self.exchange_of(self.model)
        local = [exchange.group.local(residual, 0) for residual in exchange.residuals]
        self.kept.append(np.concatenate([np.ravel(one) for one in local] or [np.zeros(0)]))


def checked(every, exchange_of):
    """Returns callbacks for `fit`, and a function that returns the findings after it."""
    noting = Noting(exchange_of)

    def found():
        at = [one.astype("float64") for one in noting.kept[::every]]
        expected = [
            float(old @ new) / float(np.linalg.norm(old) * np.linalg.norm(new))
            for old, new in itertools.pairwise(at)
            if old.any()
        ]
        return {"logged": noting.logged, "expected": expected, "elements": noting.kept[0].size}

    return [gc.callbacks.DelayCheck(every=every), noting], found


def assert_cosines(found, every, checks):
    """Compares the logs; the first check has nothing to compare with."""
    assert found["logged"][:every] == [None] * every
    assert len(found["expected"]) == checks
    # Three sums of products of all residuals, in float64.
    terms = 3 * found["elements"]
    assert_close(found["logged"][every::every], found["expected"], terms, scale=1, dtype="float64")
