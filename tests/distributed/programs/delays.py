"""Trains with `DelayCheck`, by a method that is slow to send and by one that sends at once."""

import itertools

import keras
import numpy as np
from common import Setup, dense_model, digits, local_residuals

import tf_gradcomp as gc
from tests.ranks import exchange_of, report

BATCH, BATCHES, EVERY = 16, 10, 3


def train(compressor, **fit_args):
    """The cosines in the logs of each batch, and those computed from the residuals themselves."""
    setup = Setup("optimizer", compressor)
    model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.SGD(0.01)))
    logged, kept = [], []

    def note(_batch, logs):
        logged.append(logs.get("residual_cosine"))
        own = local_residuals(exchange_of(model))
        kept.append(np.concatenate([one.ravel() for one in own] or [np.zeros(0)]))

    noting = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    x, y = digits(BATCH * BATCHES)
    check = gc.callbacks.DelayCheck(every=EVERY)
    model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[check, noting])
    at = kept[::EVERY]
    pairs = itertools.pairwise(one.astype("float64") for one in at)
    expected = [
        float(old @ new) / float(np.linalg.norm(old) * np.linalg.norm(new))
        for old, new in pairs
        if old.any()
    ]
    return {"logged": logged, "expected": expected}


report({method: train(method) for method in ("random_k", "cast")})
