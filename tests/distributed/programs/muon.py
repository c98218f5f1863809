"""Muon in rounds, on given gradients and in `fit`: FOLDER."""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf
from common import Setup, local_residuals, scalar

import tf_gradcomp as gc
from tests.distributed import muon_cases as cases
from tests.ranks import RANK, argument, digest, exchange_of, inner_of, report, values

FOLDER = argument(1)
BATCH, LENGTH, WORDS = 8, 6, 12
strategy = Setup("optimizer").strategy


class Rounds:
    """Variables that Muon trains in rounds, on given gradients."""

    def __init__(self, compressor, outer=None, steps=cases.STEPS, scaler=None, **settings):
        with strategy.scope():
            self.variables = [
                keras.Variable(value, aggregation="mean", name=path)
                for path, value in zip(cases.PATHS, cases.initial(), strict=True)
            ]
            inner = keras.optimizers.Muon(**{**cases.SETTINGS, **settings})
            rounds = gc.LocalSteps(steps, outer and keras.optimizers.SGD(**outer, nesterov=True))
            self.optimizer = gc.CompressedOptimizer(inner, compressor, local_steps=rounds)
            self.applies = scaler(self.optimizer) if scaler else self.optimizer
            self.applies.build(self.variables)
        values = [variable.value for variable in self.variables]
        self.checkpoint = tf.train.Checkpoint(optimizer=self.optimizer, variables=values)

    @functools.cached_property
    def step(self):
        def step(grads):
            scale = self.applies.scale_loss(tf.constant(1.0))
            local = [None if gradient is None else scale * gradient for gradient in grads]
            strategy.run(lambda: self.applies.apply(local, self.variables))

        return tf.function(step, autograph=False)

    def on(self, steps):
        """Takes a step on each list of gradients; returns what is then seen."""
        for step_gradients in steps:
            self.step([None if g is None else tf.constant(g) for g in step_gradients[RANK]])
        return self.seen()

    def seen(self):
        exchange = self.optimizer.exchange
        return {
            "values": [variable.numpy() for variable in self.variables],
            "residuals": local_residuals(exchange) if exchange.residuals else None,
            "iterations": scalar(self.optimizer.iterations),
            "exchanges": exchange.exchanges,
            "skipped": scalar(exchange.skipped_steps),
        }


def rounds():
    """Two rounds, two steps and a save; then a round of another job that resumes from it."""
    steps, seen = cases.gradients(11), {}
    for name, compressor in cases.METHODS.items():
        first = Rounds(compressor, cases.OUTER)
        seen[name] = [first.seen(), first.on(steps[:3]), first.on(steps[3:6])]
        first.on(steps[6:8])
        first.checkpoint.write(f"{FOLDER}/{name}_{RANK}")
        second = Rounds(compressor, cases.OUTER)
        second.checkpoint.read(f"{FOLDER}/{name}_0").assert_existing_objects_matched()
        seen[name] += [first.seen(), second.seen(), second.on(steps[8:])]
    return seen


def clipped():
    steps = cases.of_different_sizes(cases.gradients(4))
    return {
        name: Rounds("no_compression", steps=4, **{name: limit}).on(steps)
        for name, limit in cases.CLIPS.items()
    }


def missing():
    return Rounds("no_compression").on(cases.with_missing(cases.gradients(6)))


def scaled():
    """In the first round, worker 1 skips a step and halves its loss scale."""
    steps = cases.gradients(3)
    steps[1][1][0][0, 0] = np.inf
    scaler = lambda inner: keras.optimizers.LossScaleOptimizer(inner, 8.0)  # noqa: E731
    trained = Rounds("no_compression", scaler=scaler)
    return {**trained.on(steps), "scale": scalar(trained.applies.dynamic_scale)}


def within():
    """Each worker's weights within a round."""
    trained = Rounds("no_compression")
    seen = trained.on(cases.gradients(2))
    trained.optimizer.synchronize()
    return seen


def synchronous():
    """Steps with an exchange each: nothing divides the gradients of AdamW's variables."""
    trained = Rounds("no_compression", steps=1)
    with strategy.scope():
        inner = keras.optimizers.Muon(**cases.SETTINGS)
        trained.optimizer = gc.CompressedOptimizer(inner, "adacomp")
        trained.applies = trained.optimizer
        trained.optimizer.build(trained.variables)
    seen = trained.on(cases.gradients(3))
    divides = trained.optimizer.exchange.setup.preconditioner is not None
    return {**seen, "divides": divides, "collectives": collectives(trained)}


def collectives(trained):
    """Returns the number of collectives in a step."""
    specs = [tf.TensorSpec(shape) for shape in cases.SHAPES]
    graph = trained.step.get_concrete_function(specs).graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    return sum(node.op.startswith("Collective") for node in nodes)


class EndError(Exception):
    """Ends a job within an epoch."""


class Watch(keras.callbacks.Callback):
    """The state at the start of `fit` and after a step, which may be the last."""

    def __init__(self, step=None, ends=False):
        super().__init__()
        self.step, self.ends, self.seen = step, ends, {}

    def state(self):
        optimizer = self.model.optimizer
        return {
            "weights": digest(self.model.trainable_variables),
            "slots": digest(inner_of(optimizer).variables),
            "residuals": digest(exchange_of(self.model).residuals),
            "iterations": scalar(inner_of(optimizer).iterations),
        }

    def on_train_begin(self, logs=None):
        self.seen["begin"] = self.state()

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.step:
            self.seen["saved"] = self.state()
            if self.ends:
                raise EndError


def network():
    return keras.Sequential(
        [
            keras.layers.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(WORDS, 8),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3, dtype="float32", name="last"),
        ]
    )


def compiled():
    setup = Setup("optimizer", "top_k(density=0.25)")

    def optimizer():
        outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        inner = keras.optimizers.Muon(0.02, exclude_layers=["last"], clipnorm=1.0)
        return setup.wrap(inner, precondition="auto", local_steps=gc.LocalSteps(3, outer))

    return setup.model(network, optimizer)


def fitted(model, folder, step, batches=8, *, ends=False):
    """Trains with a backup after `step` steps; both workers have the same rows."""
    rng = np.random.default_rng(5)
    x = rng.integers(0, WORDS, (8, BATCH // 2, LENGTH)).astype("int32")
    x = np.concatenate([x, x], 1)[:batches].reshape(-1, LENGTH)
    y = x.sum(1) % 3
    watch = Watch(step, ends)
    backup = keras.callbacks.BackupAndRestore(f"{FOLDER}/{folder}", save_freq=step)
    with contextlib.suppress(EndError):
        callbacks = [backup, watch]
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    return {**watch.seen, "end": watch.state()}


def resumed():
    """By the step of the backup, which is within a round or ends one.

    A job ends after this step, and another one resumes and repeats the epoch; or one job goes on.
    """
    seen = {}
    for step in (5, 6):
        ended = fitted(compiled(), f"ended_{step}", step, ends=True)
        resumed = fitted(compiled(), f"ended_{step}", step)
        model = compiled()
        fitted(model, f"first_{step}", step, step)
        whole = fitted(model, f"second_{step}", step)
        seen[step] = {"ended": ended, "resumed": resumed, "whole": whole}
    return seen


def in_float16():
    """`fit` with the loss scaler that Keras adds; worker 1 has a batch that overflows."""
    setup = Setup("optimizer", "top_k(density=0.25)")
    inner = lambda: keras.optimizers.Muon(0.02, global_clipnorm=1.0)  # noqa: E731
    build = lambda: keras.Sequential(  # noqa: E731
        [keras.Input((6,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
    )
    optimizer = lambda: setup.wrap(inner(), local_steps=3)  # noqa: E731
    model = setup.model(build, optimizer, policy="mixed_float16", loss="mse")
    rng = np.random.default_rng(5)
    x = rng.normal(size=(9 * BATCH, 6)).astype("float32")
    y = x.sum(1, keepdims=True) / 8
    before = model.evaluate(x, y, verbose=0)
    y_bad = y.copy()
    y_bad[BATCH + BATCH // 2] = 1e6  # worker 1's first row of the second batch
    model.fit(x, y_bad, batch_size=BATCH, shuffle=False, verbose=0)
    return {
        "values": values(model.trainable_variables),
        "losses": [before, model.evaluate(x, y, verbose=0)],
        "scale": scalar(model.optimizer.dynamic_scale),
        "skipped": scalar(exchange_of(model).skipped_steps),
    }


if __name__ == "__main__":
    checks = rounds, clipped, missing, scaled, within, synchronous, resumed, in_float16
    report({check.__name__: check() for check in checks})
