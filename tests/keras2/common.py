"""Code that these programs share; each trains under a strategy, or under Horovod."""

import tensorflow as tf

import tf_gradcomp as gc
from tests.ranks import BATCH, BY_HOROVOD, SIZE, digest, inner_of, own_rows, values
from tf_gradcomp.private import keras2 as keras_private

keras = tf.keras
legacy = keras.optimizers.legacy
ALONE = tf.distribute.get_strategy()


def new_strategy(**kwargs):
    """The only strategy of this process; under Horovod there is none."""
    return ALONE if BY_HOROVOD else gc.MultiWorkerMirroredStrategy(**kwargs)


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


def compiled(
    make_optimizer, strategy, seed=0, policy="float32", build=words_model, *, in_step=False
):
    """A compiled model, the same in every process and at every call.

    Creates the optimizer's variables in the first step only if `in_step`, because Keras would trace
    it twice.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    keras.mixed_precision.set_global_policy(policy)
    with strategy.scope():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=make_optimizer(), loss=loss)
        if not in_step:
            keras_private.build(model.optimizer, model.trainable_variables)
    keras.mixed_precision.set_global_policy("float32")
    return model


def fit(model, x, y, **kwargs):
    """Trains on batches; each worker has its part."""
    given = {"verbose": 0, "shuffle": False, **kwargs}
    if BY_HOROVOD:
        return model.fit(own_rows(x), own_rows(y), batch_size=BATCH // SIZE, **given)
    if model.distribute_strategy is ALONE:
        return model.fit(x, y, batch_size=BATCH, **given)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return model.fit(rows.with_options(options), verbose=given.pop("verbose"), **kwargs)


def slots_of(optimizer):
    optimizer = inner_of(optimizer)
    slots = optimizer.weights if hasattr(optimizer, "weights") else optimizer.variables
    return sorted(
        slots, key=lambda slot: slot.name
    )  # variables of a checkpoint are created in any order


def state_of(model):
    return {
        "values": values(model.trainable_variables),
        "weights": digest(model.trainable_variables),
        "slots": digest(slots_of(model.optimizer)),
        "iterations": int(model.optimizer.iterations.numpy()),
    }
