"""The weights after each step of a job, or of as many learners in one process: WAY LEARNERS."""

import keras
import numpy as np
from common import Setup, digits

import tf_gradcomp as gc
from tests.ranks import argument, report
from tests.replicas import method_names

BATCH, STEPS, EPOCHS = 30, 6, 2
METHODS = {
    **{name: gc.compressors.get(name) for name in method_names()},
    "adacomp": gc.compressors.AdaComp(bin_sizes=20),
    "arc_top_k": gc.compressors.ArcTopK(0.2, rank=2, block=8),
    # The autoencoder itself is trained in neither: that would magnify what rounding differs in.
    "lgc": gc.compressors.LGC(density=0.1, dense_steps=4, overrides={"kernel": 0.1}),
    "lgreco": gc.compressors.LGreCo(gc.compressors.QSGD()),
    "power_sgd": gc.compressors.PowerSGD(2),
    "random_k": gc.compressors.RandomK(0.1),
    "scalecom": gc.compressors.ScaleCom(8, beta=0.5),
    "top_k": gc.compressors.TopK(0.1, momentum=0.5),
    "warmed up": gc.compressors.ScaleCom(8, value_bits=4, warmup_steps=7),
}
FRAGMENTS = {"local steps": 1, "fragments": 3}
METHODS["local steps"] = gc.compressors.TopK(0.1)
METHODS["fragments"] = gc.compressors.ScaleCom(8)
learners = int(argument(2))


def settings_of(name):
    """Rounds of four steps after a warm-up of three, of which each epoch has six."""
    if name not in FRAGMENTS:
        return {"precondition": "auto"}
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    return {"local_steps": gc.LocalSteps(4, outer, 3, fragments=FRAGMENTS[name])}


def build(compressor):
    planned = isinstance(compressor, gc.compressors.LGreCo)  # which takes two large layers
    widths = (128, 32) if planned else (64,)
    hidden = [keras.layers.Dense(width, activation="tanh") for width in widths]
    return keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(3)])


def adam(compressor):
    """With a large epsilon, which keeps rounding small, except where no plan would differ by it."""
    planned = isinstance(compressor, gc.compressors.LGreCo)
    return keras.optimizers.Adam(0.01, epsilon=1e-7 if planned else 0.05)


class Weights(keras.callbacks.Callback):
    """The weights after each step."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append([np.asarray(v) for v in self.model.trainable_variables])


def real(name, compressor, data):
    setup, seen = Setup("optimizer", compressor), Weights()
    model = setup.model(
        lambda: build(compressor),
        lambda: setup.wrap(adam(compressor), **settings_of(name)),
    )
    plans = gc.callbacks.LayerwisePlan(table=False)
    model.fit(
        *data, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[plans, seen]
    )
    return {"steps": seen.steps, "plan": model.optimizer.exchange.plan_in_force()}


def simulated(name, compressor, data):
    model = Setup("alone").model(lambda: build(compressor), lambda: adam(compressor))
    settings = settings_of(name)
    group, seen = gc.simulation.Learners(model, learners, compressor, **settings), Weights()
    seen.set_model(model)
    x, y = data
    for _ in range(EPOCHS):
        for begin in range(0, BATCH * STEPS, BATCH):
            group.train_on_batch(x[begin : begin + BATCH], y[begin : begin + BATCH])
            seen.on_train_batch_end(begin)
        group.synchronize()
        group.exchange.plan_settings()
    return {"steps": seen.steps, "plan": group.exchange.plan_in_force()}


if __name__ == "__main__":
    train = real if argument(1) == "real" else simulated
    data = digits(BATCH * STEPS)
    report({name: train(name, compressor, data) for name, compressor in METHODS.items()})
