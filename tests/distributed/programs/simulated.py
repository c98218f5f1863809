"""The weights after each step of a job, or of as many learners in one process: WAY LEARNERS."""

import keras
import numpy as np
import tensorflow as tf
from common import Setup, digits

import tf_gradcomp as gc
from tests.ranks import RANK, SIZE, argument, report
from tests.replicas import method_names

BATCH, STEPS, EPOCHS = 30, 6, 2
METHODS = {
    **{name: gc.compressors.get(name) for name in method_names()},
    "adacomp": gc.compressors.AdaComp(bin_sizes=20),
    "arc_top_k": gc.compressors.ArcTopK(0.2, rank=2, block=8),
    # The autoencoder itself is trained in neither: that would magnify what rounding differs in.
    "lgc": gc.compressors.LGC(density=0.1, warmup_steps=4, overrides={"kernel": 0.1}),
    "lgreco": gc.compressors.LGreCo(gc.compressors.QSGD()),
    "power_sgd": gc.compressors.PowerSGD(2),
    "random_k": gc.compressors.RandomK(0.1),
    "scalecom": gc.compressors.ScaleCom(8, beta=0.5),
    "top_k": gc.compressors.TopK(0.1, momentum=0.5),
    "warmed up": gc.compressors.ScaleCom(8, value_bits=4, warmup_steps=7),
}
FRAGMENTS = {"local steps": 1, "fragments": 3, "dropout in local steps": 1}
METHODS["dropout"] = gc.compressors.TopK(0.1)
METHODS["dropout in local steps"] = gc.compressors.TopK(0.1)
METHODS["local steps"] = gc.compressors.TopK(0.1)
METHODS["fragments"] = gc.compressors.ScaleCom(8)
learners = int(argument(2))


def settings_of(name):
    """Rounds of four steps, after a warm-up of three steps, in epochs of six steps."""
    if name not in FRAGMENTS:
        return {"precondition": "auto"}
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    return {"local_steps": gc.LocalSteps(4, outer, 3, fragments=FRAGMENTS[name])}


def build(name, compressor):
    planned = isinstance(compressor, gc.compressors.LGreCo)  # which takes two large layers
    widths = (128, 32) if planned else (64,)
    hidden = [keras.layers.Dense(width, activation="tanh") for width in widths]
    if name.startswith("dropout"):
        hidden += [keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.5)]
    return keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(3)])


def adam(compressor):
    """With a large epsilon, which keeps rounding small, except where no plan would differ by it."""
    planned = isinstance(compressor, gc.compressors.LGreCo)
    return keras.optimizers.Adam(0.01, epsilon=1e-7 if planned else 0.05)


def batches(data):
    """For each epoch, its batches."""
    rows = np.arange(BATCH * STEPS).reshape(STEPS, BATCH)
    return [[[values[row] for values in data] for row in rows]] * EPOCHS


def weights_of(model):
    return [np.asarray(variable) for variable in model.trainable_variables]


def real(name, compressor, data):
    setup, steps = Setup("optimizer", compressor), []
    model = setup.model(
        lambda: build(name, compressor),
        lambda: setup.wrap(adam(compressor), **settings_of(name)),
    )
    with setup.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    step = lambda *batch: setup.strategy.run(model.train_step, [batch])  # noqa: E731
    train = tf.function(step, autograph=False)
    for epoch in batches(data):
        for x, y in epoch:
            train(*(np.split(values, SIZE)[RANK] for values in (x, y)))
            steps.append(weights_of(model))
        if name in FRAGMENTS:
            model.optimizer.synchronize()
        model.optimizer.exchange.plan_settings()
    exchange = model.optimizer.exchange
    sent = exchange.traffic().sent_bytes
    return {"steps": steps, "plan": exchange.hooks.plan_in_force(), "sent": sent}


def simulated(name, compressor, data):
    model = Setup("alone").model(lambda: build(name, compressor), lambda: adam(compressor))
    group = gc.simulation.Learners(model, learners, compressor, **settings_of(name))
    steps, sent = [], 0.0
    for epoch in batches(data):
        for x, y in epoch:
            sent += group.train_on_batch(x, y).sent_bytes
            steps.append(weights_of(model))
        group.synchronize()
        group.exchange.plan_settings()
    return {"steps": steps, "plan": group.exchange.hooks.plan_in_force(), "sent": sent}


if __name__ == "__main__":
    train = real if argument(1) == "real" else simulated
    data = digits(BATCH * STEPS)
    report({name: train(name, compressor, data) for name, compressor in METHODS.items()})
