"""Code that these programs share; each trains under Horovod or, to compare, a strategy."""

import functools

import keras
import tensorflow as tf

import tf_gradcomp as gc
from tests.ranks import BATCH, BY_HOROVOD, SIZE, digest, inner_of, own_rows, values


@functools.cache
def strategy():
    return tf.distribute.get_strategy() if BY_HOROVOD else gc.MultiWorkerMirroredStrategy()


def words_model():
    return keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Embedding(20, 5),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3, dtype="float32"),
        ]
    )


def compiled(make_optimizer, seed=0, policy="float32", build=words_model):
    """A compiled model, the same in every process and at every call."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    keras.mixed_precision.set_global_policy(policy)
    with strategy().scope():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=make_optimizer(), loss=loss)
    keras.mixed_precision.set_global_policy("float32")
    return model


def fit(model, x, y, **kwargs):
    """Trains on batches; each rank has its part."""
    given = {"verbose": 0, "shuffle": False, **kwargs}
    if BY_HOROVOD:
        return model.fit(own_rows(x), own_rows(y), batch_size=BATCH // SIZE, **given)
    return model.fit(x, y, batch_size=BATCH, **given)


def state_of(model):
    return {
        "values": values(model.trainable_variables),
        "weights": digest(model.trainable_variables),
        "slots": digest(inner_of(model.optimizer).variables),
    }


def told(action):
    """The error that this rank gets, as text; nothing where there is none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
