"""Trains an optimizer of tensorflow-addons by Horovod's own wrapper, which drifts in silence."""

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow_addons as tfa
from common import compiled, fit, legacy, new_strategy

from tests.ranks import data, report, values


def reduced():
    return hvd.DistributedOptimizer(legacy.SGD(0.1))


if __name__ == "__main__":
    orders = {"inside": lambda: tfa.optimizers.MovingAverage(reduced()), "alone": reduced}
    seen = {}
    for name, make in orders.items():
        model = compiled(make, new_strategy())
        fit(model, *data(8))
        seen[name] = np.concatenate(list(map(np.ravel, values(model.trainable_variables)))).tolist()
    report(seen)
