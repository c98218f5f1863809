"""Rounds of accumulation with something between their two steps.

Each rank's gradient is a power of ten, so that the weights show whose are in them.
"""

import keras
import tensorflow as tf

import tf_gradcomp as gc
from tests.ranks import RANK, compressed, hvd, values

AROUND = {
    "nothing": lambda optimizer: optimizer,
    "a loss scaler": lambda optimizer: keras.optimizers.LossScaleOptimizer(
        optimizer, initial_scale=1.0
    ),
    "a multi-optimizer": lambda optimizer: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(optimizer, {"of no variable": compressed("sgd")})
    ),
}


def new_model(around="nothing"):
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((2,)), layer])
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    model.compile(optimizer=AROUND[around](compressed(inner, "no_compression")), loss="mse")
    return model


def build(model):
    model.optimizer.build(model.trainable_variables)


def half_a_round(model):
    model.optimizer.apply([tf.fill((2, 1), 10.0**RANK)], model.trainable_variables)
    return values(model.trainable_variables)


def broadcast(around):
    """Ranks are given the state of rank 0."""
    model = new_model(around)
    build(model)
    half_a_round(model)
    gc.broadcast_initial_state(model)
    return half_a_round(model)


def nothing_to_train():
    """An optimizer is built without variables."""
    optimizer = compressed("adam")
    optimizer.build([])
    optimizer.collect_state()
    return [optimizer.exchange.built, optimizer.exchange.exchanges]


def set_weights():
    """Sets each rank's own values."""
    model = new_model()
    build(model)
    half_a_round(model)
    model.optimizer.set_weights([v.numpy() for v in model.optimizer.variables])
    return half_a_round(model)


def ends_of_data():
    """The weights after three epochs of an odd number of batches, known beforehand and not."""
    rows = tf.fill((5, 2), 0.1 * (RANK + 1))
    data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(1)
    trained = []
    for batches in (data, data.filter(lambda *_: True)):
        model = new_model()
        model.fit(batches, epochs=3, verbose=0)
        trained.append(values(model.trainable_variables))
    return trained


def restored(folder):
    """A checkpoint is read before or after the optimizer of the next job is built."""
    path = str(folder / "round")
    model = new_model()
    build(model)
    half_a_round(model)
    model.optimizer.collect_state()
    if RANK == 0:
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
    hvd.allreduce(tf.zeros([1]))  # it is written
    early, late = new_model(), new_model()
    tf.train.Checkpoint(model=early, optimizer=early.optimizer).read(path)
    build(early)
    build(late)
    tf.train.Checkpoint(model=late, optimizer=late.optimizer).read(path)
    return {"before": half_a_round(early), "after": half_a_round(late)}
