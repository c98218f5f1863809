"""Saves or loads in each format: save|load FOLDER."""

import pathlib

import keras
import numpy as np
import tensorflow as tf
from common import Setup, dense_model, digits, residual_sums, scalar, state_digest

import tf_gradcomp as gc
from tests.ranks import argument, exchange_of, report

FOLDER = pathlib.Path(argument(2))
setup = Setup(argument(3))
x, y = digits(96)


def new_model(seed=0, optimizer=None):
    optimizer = optimizer or (lambda: setup.wrap(keras.optimizers.Adam(1e-2)))
    model = setup.model(dense_model, optimizer, seed=seed)
    with setup.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model


def state(model):
    exchange = exchange_of(model)
    return {
        **state_digest(model),
        "residual sums": residual_sums(exchange),
        "waits": bool(exchange.facts.has_residual.numpy().any()),
        "iterations": scalar(model.optimizer.iterations),
    }


def fit(model, rows=96):
    model.fit(x[:rows], y[:rows], batch_size=24, verbose=0, shuffle=False)


def checkpoint_of(model):
    """All there is, by TensorFlow's own means."""
    if setup.way == "strategy":
        return tf.train.Checkpoint(model=model, exchange=exchange_of(model))
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def save():
    model = new_model()
    fit(model)
    checkpoint_of(model).write(gc.worker_path(FOLDER / setup.way / "tf"))
    if setup.way == "optimizer":
        model.save(gc.worker_path(FOLDER / "whole.keras"))
        model.save_weights(gc.worker_path(FOLDER / "only.weights.h5"))
    seen = {"saved": state(model)}
    if setup.way == "optimizer":
        stock = new_model(optimizer=lambda: keras.optimizers.Adam(1e-2))
        fit(stock)
        stock.save_weights(gc.worker_path(FOLDER / "stock.weights.h5"))
        tf.train.Checkpoint(model=stock).write(gc.worker_path(FOLDER / "stock"))
        seen["stock"] = state_digest(stock)
    return seen


def load():
    seen = {}
    model = new_model(seed=1)
    checkpoint_of(model).read(str(FOLDER / setup.way / "tf")).assert_consumed()
    seen["tf"] = loaded(model)
    if setup.way == "strategy":
        return seen
    # Into a model that has trained on: neither its weights nor its residuals may be left.
    model.load_weights(FOLDER / "only.weights.h5")
    seen[".weights.h5"] = loaded(model)
    model.load_weights(FOLDER / "stock.weights.h5")  # which holds no residuals
    seen["stock .weights.h5"] = loaded(model)
    with setup.strategy.scope():
        model = keras.saving.load_model(FOLDER / "whole.keras")
    seen[".keras"] = loaded(model)
    seen["config"] = {
        "optimizer": type(model.optimizer).__name__,
        "inner": type(model.optimizer.inner_optimizer).__name__,
        "compressor": repr(model.optimizer.compressor),
    }
    return seen


def loaded(model):
    """Returns the loaded state, and the results of a step on it."""
    before = state(model)
    fit(model, 24)
    return {
        **before,
        "waits later": bool(exchange_of(model).facts.has_residual.numpy().any()),
        "residual sums later": residual_sums(exchange_of(model)),
        "finite later": bool(np.all([np.isfinite(v).all() for v in model.get_weights()])),
    }


if __name__ == "__main__":
    report({"save": save, "load": load}[argument(1)]())
