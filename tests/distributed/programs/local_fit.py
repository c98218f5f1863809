"""Local steps in `fit`, with all that looks at a model: FOLDER."""

import keras
import numpy as np
from common import Setup, digits, linear_model, scalar, state_digest

import tf_gradcomp as gc
from tests.ranks import RANK, argument, digest, exchange_of, report

BATCH, STEPS = 32, 5
FOLDER = argument(1)
setup = Setup("optimizer", "top_k(density=0.2)")
x, y = digits(BATCH * STEPS)


def build():
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(3),
        ]
    )


def optimizer(steps=3):
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    local = gc.LocalSteps(steps, outer, warmup_steps=1)
    return setup.wrap(keras.optimizers.Adam(0.01), precondition="auto", local_steps=local)


class Seen(keras.callbacks.Callback):
    """All variables, after each step and each epoch."""

    def __init__(self):
        super().__init__()
        self.steps, self.epochs, self.validated, self.losses = [], [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(digest(self.model.trainable_variables))
        self.losses.append(float(logs["loss"]))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(digest(self.model.variables))
        self.validated.append(logs["val_loss"])


def values(model):
    return [np.asarray(variable) for variable in model.variables]


def residuals(model):
    return [np.asarray(residual) for residual in exchange_of(model).residuals]


def train(name, **settings):
    model = setup.model(build, optimizer, metrics=["accuracy"], **settings)
    seen = Seen()
    path = f"{FOLDER}/{name}.weights.h5"
    callbacks = [
        gc.callbacks.CompressionMonitor(table=False),
        keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=7),
        keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
        seen,
    ]
    history = model.fit(
        x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks,
        validation_data=(x, y),
    )  # fmt: skip
    return model, seen, history.history


def in_fit():
    model, seen, logs = train("model")
    before = values(model)
    single = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    return {
        "steps": seen.steps,
        "epochs": seen.epochs,
        "validated": seen.validated,
        "losses": seen.losses,
        "logs": {name: logs[name] for name in ("loss", "rounds", "drift", "compression_ratio")},
        "exchanges": exchange_of(model).exchanges,
        "iterations": scalar(model.optimizer.iterations),
        "values": before,
        "evaluated": single,
        "weights": [np.asarray(w) for w in model.get_weights()],
    }


def resumed():
    """From the checkpoint that was written after the seventh step, in the middle of a round."""
    model = setup.model(build, optimizer)
    with setup.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    model.load_weights(f"{FOLDER}/model.weights.h5")
    seen = {
        "values": values(model),
        "residuals": residuals(model),
        "momentum": [np.asarray(v) for v in model.optimizer.outer_optimizer.variables],
        "iterations": scalar(model.optimizer.iterations),
    }
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return {**seen, "continued": state_digest(model)["weights"]}


def with_steps_per_execution(steps):
    model = setup.model(linear_model, optimizer, steps_per_execution=steps)
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {"values": values(model), "exchanges": exchange_of(model).exchanges}


def on_batches():
    """Returns the losses of batches; worker 1 has a short batch within a round."""
    model = setup.model(linear_model, optimizer)
    rows = [BATCH // 2 if step == 2 and RANK == 1 else BATCH for step in range(8)]
    return [float(model.train_on_batch(x[:row], y[:row])) for row in rows]


class Saves(keras.callbacks.Callback):
    """Saves after the second step, which ends a round, and within the next round."""

    def __init__(self):
        super().__init__()
        self.statistics = []

    def on_train_batch_end(self, batch, logs=None):
        if batch in (1, 2):
            self.model.save_weights(f"{FOLDER}/after_{batch}.weights.h5")
            self.statistics.append(digest(self.model.non_trainable_variables))

    def on_train_end(self, logs=None):
        self.statistics.append(digest(self.model.variables))


def statistics():
    """Saves in the first epoch without residuals; then loads the first weights, and repeats."""
    uncompressed = Setup("optimizer", "no_compression")
    sgd = lambda: uncompressed.wrap(keras.optimizers.SGD(0.1), local_steps=2)  # noqa: E731
    model = uncompressed.model(build, sgd)
    with setup.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    model.save_weights(f"{FOLDER}/first.weights.h5")
    seen = []
    for _ in range(2):
        model.load_weights(f"{FOLDER}/first.weights.h5")
        saves = Saves()
        rows = 4 * BATCH
        model.fit(x[:rows], y[:rows], batch_size=BATCH, shuffle=False, verbose=0, callbacks=[saves])
        seen.append(saves.statistics)
    return seen


report(
    {
        "statistics": statistics(),
        "on_batches": on_batches(),
        "in_fit": in_fit(),
        "resumed": resumed(),
        "per_execution": [with_steps_per_execution(steps) for steps in (1, 4)],
    }
)
