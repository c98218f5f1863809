"""Shared code of test programs that train on several workers, by a strategy or Horovod.

This module does not depend on Keras, because programs use both versions.
"""

import hashlib
import json
import os
import sys

import numpy as np

import tf_gradcomp as gc
from tf_gradcomp.keras.common.wrappers import compressed_optimizer

# Tests have none: they import this module with the program that is in the same file.
ALONE = '{"cluster": {"worker": ["localhost:0"]}, "task": {"index": 0}}'
CLUSTER = json.loads(os.environ.get("TF_CONFIG", ALONE))
BY_HOROVOD = "HOROVOD_SIZE" in os.environ
if BY_HOROVOD:
    del os.environ["TF_CONFIG"]  # which the tests give all workers

    import horovod.tensorflow as hvd

    hvd.init()
    RANK, SIZE = hvd.rank(), hvd.size()
else:
    RANK, SIZE = CLUSTER["task"]["index"], len(CLUSTER["cluster"]["worker"])

BATCH = 24  # rows of all workers together


def compressed(inner, *args, **kwargs):
    """The optimizer of this job."""
    group = "horovod" if BY_HOROVOD else None
    return gc.CompressedOptimizer(inner, *args, group=group, **kwargs)


def data(steps, seed=1):
    """Separable points, equal on all workers: word numbers and their class."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 20, size=(BATCH * steps, 4))
    return x.astype("int32"), (x.sum(1) % 3).astype("int32")


def own_rows(values):
    """This worker's part of each batch."""
    parts = values.reshape(-1, SIZE, BATCH // SIZE, *values.shape[1:])[:, RANK]
    return parts.reshape(-1, *values.shape[1:])


def values(variables):
    return [np.asarray(variable).tolist() for variable in variables]


def digest(variables):
    """Differs where a bit of the variables does."""
    hasher = hashlib.sha256()
    for variable in variables:
        hasher.update(np.asarray(variable).tobytes())
    return hasher.hexdigest()


def inner_of(optimizer):
    """Without all that is around it."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def exchange_of(model):
    """The exchange that a model's gradients go through, by its optimizer or by its strategy."""
    optimizer = compressed_optimizer(model)
    if optimizer is not None:
        return optimizer.exchange
    return model.distribute_strategy.gradient_exchange(model.trainable_variables)


def argument(index=1, default=None):
    return sys.argv[index] if len(sys.argv) > index else default


def report(seen):
    """Hands a JSON-serializable value to the test."""
    with open(os.environ["RESULT_PATH"] + ".json", "w") as file:
        file.write(json.dumps(seen, default=_plain))  # `dump` takes twice as long


def _plain(value):
    return value.tolist() if hasattr(value, "tolist") else str(value)
