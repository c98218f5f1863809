"""Trains with `DelayCheck`, by a method that is slow to send and by one that sends at once."""

import keras
from common import Setup, dense_model, digits

from tests.delays import checked
from tests.ranks import exchange_of, report

BATCH, BATCHES, EVERY = 16, 10, 3


def train(compressor):
    setup = Setup("optimizer", compressor)
    model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.SGD(0.01)))
    x, y = digits(BATCH * BATCHES)
    callbacks, found = checked(EVERY, exchange_of)
    model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=callbacks)
    return found()


report({method: train(method) for method in ("random_k", "cast")})
