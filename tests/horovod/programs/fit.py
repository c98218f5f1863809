"""Uses `fit` in all other ways: FOLDER is where backups go."""

import os
import pathlib

import keras
import numpy as np
import rounds
import tensorflow as tf
from common import compiled, fit, state_of

import tf_gradcomp as gc
from tests.delays import checked
from tests.ranks import (
    BATCH,
    RANK,
    SIZE,
    argument,
    compressed,
    data,
    digest,
    exchange_of,
    own_rows,
    report,
    values,
)

FOLDER = pathlib.Path(argument(1))


def planned_and_monitored():
    """L-GreCo plans, a step is skipped, and the logs say what was exchanged."""
    method = gc.compressors.LGreCo("qsgd")
    model = compiled(lambda: compressed(keras.optimizers.SGD(0.1), method))
    monitor = gc.callbacks.CompressionMonitor()
    check, delays = checked(2, exchange_of)
    callbacks = [monitor, gc.callbacks.LayerwisePlan(), *check]
    history = fit(model, *data(3), epochs=2, callbacks=callbacks).history
    settings = model.optimizer.exchange.hooks.plan_in_force().settings
    logs = {k: v[-1] for k, v in history.items()}
    return {**state_of(model), "settings": settings, "logs": logs, "delays": delays()}


def mixed_precision():
    """A loss scaler is around the optimizer, and its scale too large for the first steps."""
    model = compiled(
        lambda: keras.optimizers.LossScaleOptimizer(
            compressed(keras.optimizers.SGD(0.1), "top_k"), initial_scale=2.0**20
        ),
        policy="mixed_float16",
    )
    fit(model, *data(4))
    scaler = model.optimizer
    return {
        **state_of(model),
        "scale": float(scaler.dynamic_scale.numpy()),
        "skipped": int(scaler.inner_optimizer.exchange.skipped_steps.numpy()),
    }


def one_rank_overflows():
    """A loss scaler around a `MultiOptimizer`: Keras has each rank decide for itself to skip."""
    variable = keras.Variable(np.zeros(2, "float32"), name="kernel")
    inside = compressed(keras.optimizers.SGD(1.0), "no_compression")
    multi = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(inside, {}))
    scaler = keras.optimizers.LossScaleOptimizer(multi, initial_scale=8.0)
    scaler.build([variable])
    step = tf.function(lambda gradient: scaler.apply([gradient], [variable]))
    for index in range(3):
        gradient = float(scaler.scale_loss(1.0)) * np.ones(2, "float32")
        if RANK == 1 and index == 0:
            gradient[0] = np.inf
        step(tf.constant(gradient))
    return {"values": variable.numpy().tolist(), "scale": float(scaler.dynamic_scale.numpy())}


def amid_a_round():
    return {
        "broadcast": {around: rounds.broadcast(around) for around in rounds.AROUND},
        "set_weights": rounds.set_weights(),
        "nothing to train": rounds.nothing_to_train(),
        "restored": rounds.restored(FOLDER),
        "ends_of_data": rounds.ends_of_data(),
    }


def advised():
    model = compiled(lambda: compressed(keras.optimizers.Adam(1e-2), "auto"))
    advice = gc.advise(model, ["top_k"], compute_seconds=0.1)
    fit(model, *data(2))
    return {
        **state_of(model),
        "best": advice.best,
        "chosen": model.optimizer.exchange.compressor.name,
    }


def backed_up():
    """All ranks save and restore together; the residuals are divided among them again."""

    def new_model():
        model = compiled(lambda: compressed(keras.optimizers.SGD(0.1), "adacomp"))
        model.optimizer.build(model.trainable_variables)
        return model

    def backup():
        return gc.callbacks.BackupAndRestore(FOLDER / "backup", delete_checkpoint=False)

    model = new_model()
    fit(model, *data(2), epochs=1, callbacks=[backup()])
    left = values(model.optimizer.exchange.residuals)
    again, found = new_model(), {}

    def note(logs):
        found["left"] = values(again.optimizer.exchange.residuals)

    watch = keras.callbacks.LambdaCallback(on_train_begin=note)
    trained = fit(again, *data(2), epochs=2, callbacks=[backup(), watch])
    return {**state_of(again), "left": left, "found": found["left"], "epochs": trained.epoch}


def two_models():
    """Two models with variables of the same names, trained in one step, several in a call.

    The last batch of rank 1 is smaller, so that it alone traces its step once more.
    """
    models = [compiled(lambda: compressed(keras.optimizers.SGD(0.1), "top_k")) for _ in range(2)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x, y):
        for _ in tf.range(2):
            for model in models:
                with tf.GradientTape() as tape:
                    value = loss(y, model(x))
                weights = [v.value for v in model.trainable_variables]
                model.optimizer.apply(tape.gradient(value, weights), model.trainable_variables)

    x, y = (own_rows(values) for values in data(3))
    rows = BATCH // SIZE
    for start in range(0, len(x), rows):
        end = start + rows - (RANK == 1 and start + rows == len(x))
        step(tf.constant(x[start:end]), tf.constant(y[start:end]))
    states = [state_of(model) for model in models]
    exchanges = [model.optimizer.exchange.exchanges for model in models]
    return {**states[0], "both": [state["weights"] for state in states], "exchanges": exchanges}


def several_steps_per_execution():
    def trained(steps):
        model = compiled(lambda: compressed(keras.optimizers.SGD(0.1), "adacomp"))
        model.compile(model.optimizer, model.loss, steps_per_execution=steps)
        fit(model, *data(4))
        return state_of(model)

    return {**trained(2), "one by one": trained(1)["weights"]}


def stock():
    """Horovod's own optimizer, which Keras 3 does not ask for its gradients."""
    import horovod.tensorflow.keras as hvd_keras

    model = compiled(lambda: hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    fit(model, *data(4))
    return digest(model.trainable_variables)


def elastic():
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        compressed("sgd")
    finally:
        del os.environ["HOROVOD_ELASTIC"]


def refused():
    import horovod.tensorflow.keras as stock

    seen = {}

    def note(name, action):
        try:
            action()
        except Exception as error:
            seen[name] = f"{type(error).__name__}: {error}"

    note("no group", lambda: fit(compiled(lambda: gc.CompressedOptimizer("sgd")), *data(1)))

    def jit():
        model = compiled(lambda: compressed("sgd"))
        model.compile(model.optimizer, model.loss, jit_compile=True)
        fit(model, *data(1))

    note("inside", lambda: compressed(stock.DistributedOptimizer(keras.optimizers.SGD(0.1))))
    note("outside", lambda: stock.DistributedOptimizer(compressed(keras.optimizers.SGD(0.1))))
    note("compression", lambda: compressed("sgd", stock.Compression.fp16))
    note("gossip", lambda: compressed("sgd", local_steps=gc.Gossip()))
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        note("strategy", lambda: compressed("sgd"))
    note("xla", jit)
    note("elastic", elastic)
    return seen


if __name__ == "__main__":
    seen = {
        check.__name__: check()
        # What would train alone is refused in a program that has not trained with others before.
        for check in (
            refused,
            stock,
            planned_and_monitored,
            mixed_precision,
            one_rank_overflows,
            amid_a_round,
            advised,
            backed_up,
            two_models,
            several_steps_per_execution,
        )
    }
    report({**seen, "chief": gc.is_chief(), "path": gc.worker_path(FOLDER / "file")})
