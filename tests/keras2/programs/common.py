"""What the programs of these tests share; each trains under a strategy, or under Horovod."""

import hashlib
import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc

keras = tf.keras
legacy = keras.optimizers.legacy
CLUSTER = json.loads(os.environ["TF_CONFIG"])
BY_HOROVOD = "HOROVOD_SIZE" in os.environ
if BY_HOROVOD:
    del os.environ["TF_CONFIG"]  # which the tests give all workers

    import horovod.tensorflow as hvd

    hvd.init()
    RANK, SIZE = hvd.rank(), hvd.size()
else:
    RANK, SIZE = CLUSTER["task"]["index"], len(CLUSTER["cluster"]["worker"])

ALONE = tf.distribute.get_strategy()
BATCH = 24  # rows of all workers together


def new_strategy(**kwargs):
    """The only strategy of this process; under Horovod there is none."""
    return ALONE if BY_HOROVOD else gc.MultiWorkerMirroredStrategy(**kwargs)


def compressed(inner, *args, **kwargs):
    """The optimizer of this job."""
    group = "horovod" if BY_HOROVOD else None
    return gc.CompressedOptimizer(inner, *args, group=group, **kwargs)


def data(steps, seed=1):
    """Separable points, equal on all ranks: word numbers and their class."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 20, size=(BATCH * steps, 4))
    return x.astype("int32"), (x.sum(1) % 3).astype("int32")


def own_rows(values):
    """This worker's part of each batch."""
    parts = values.reshape(-1, SIZE, BATCH // SIZE, *values.shape[1:])[:, RANK]
    return parts.reshape(-1, *values.shape[1:])


def words_model():
    return keras.Sequential(
        [
            keras.layers.Input((4,), dtype="int32"),
            keras.layers.Embedding(20, 5),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3, dtype="float32"),
        ]
    )


def compiled(make_optimizer, strategy, seed=0, policy="float32", build=words_model):
    """A compiled model, the same in every process and at every call."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    keras.mixed_precision.set_global_policy(policy)
    with strategy.scope():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=make_optimizer(), loss=loss)
    keras.mixed_precision.set_global_policy("float32")
    return model


def fit(model, x, y, **kwargs):
    """Trains on the batches, of which each worker has its part."""
    given = {"verbose": 0, "shuffle": False, **kwargs}
    if BY_HOROVOD:
        return model.fit(own_rows(x), own_rows(y), batch_size=BATCH // SIZE, **given)
    if model.distribute_strategy is ALONE:
        return model.fit(x, y, batch_size=BATCH, **given)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return model.fit(rows.with_options(options), verbose=given.pop("verbose"), **kwargs)


def values(variables):
    return [variable.numpy().tolist() for variable in variables]


def digest(variables):
    """Differs where a bit of the variables does."""
    hasher = hashlib.sha256()
    for variable in variables:
        hasher.update(np.ascontiguousarray(variable.numpy()).tobytes())
    return hasher.hexdigest()


def slots_of(optimizer):
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    slots = optimizer.weights if hasattr(optimizer, "weights") else optimizer.variables
    return sorted(slots, key=lambda slot: slot.name)  # those of a checkpoint are made in any order


def state_of(model):
    return {
        "values": values(model.trainable_variables),
        "weights": digest(model.trainable_variables),
        "slots": digest(slots_of(model.optimizer)),
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def argument(number):
    return sys.argv[number]


def report(seen):
    """Hands a JSON-serializable value to the test."""
    with open(os.environ["RESULT_PATH"] + ".json", "w") as file:
        json.dump(seen, file)
