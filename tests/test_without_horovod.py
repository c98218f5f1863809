"""Tests the errors where Horovod is asked for and cannot be used; needs no Horovod."""

import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc


@pytest.fixture
def horovod(monkeypatch):
    """A Horovod of one process that is not initialized yet."""
    interface = types.ModuleType("horovod.tensorflow")
    interface.is_initialized = lambda: False
    interface.size = lambda: 1
    package = types.ModuleType("horovod")
    package.tensorflow = interface
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", interface)
    return interface


def test_without_horovod_the_message_explains_how_to_build_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    message = "HOROVOD_WITH_TENSORFLOW=1 .*pip install --no-build-isolation horovod==.*docs"
    with pytest.raises(ImportError, match=message):
        gc.CompressedOptimizer("sgd", group="horovod")


def test_horovod_has_to_be_initialized_first(horovod):
    with pytest.raises(ValueError, match=r"call hvd.init\(\) before"):
        gc.CompressedOptimizer("sgd", group="horovod")


@pytest.mark.parametrize("optimizer", ["sgd", gc.CompressedOptimizer])
def test_under_a_strategy_nothing_is_broadcast_or_collected(monkeypatch, optimizer):
    monkeypatch.setitem(sys.modules, "horovod", None)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(optimizer if optimizer == "sgd" else optimizer("sgd"), "mse")
    callbacks = [gc.callbacks.BroadcastInitialState(), gc.callbacks.CollectState()]
    model.fit(tf.ones((4, 2)), tf.ones((4, 1)), callbacks=callbacks, verbose=0)


def test_state_is_not_collected_before_there_is_any():
    with pytest.raises(ValueError, match=r"optimizer.build\(model.trainable_variables\) first"):
        gc.CompressedOptimizer("sgd").collect_state()


@pytest.mark.parametrize("every", ["epoch", 3])
def test_state_is_collected_whenever_keras_saves(monkeypatch, tmp_path, every):
    done = []
    monkeypatch.setattr(gc.CompressedOptimizer, "collect_state", lambda _: done.append("collects"))
    monkeypatch.setattr(keras.Model, "save_weights", lambda *_, **__: done.append("saves"))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(gc.CompressedOptimizer("sgd"), "mse", steps_per_execution=2)
    path = tmp_path / "saved.weights.h5"
    save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=every)
    callbacks = [gc.callbacks.CollectState(every), save]
    x, y = tf.ones((10, 2)), tf.ones((10, 1))
    model.fit(x, y, batch_size=1, epochs=2, callbacks=callbacks, verbose=0)
    assert done
    assert done == ["collects", "saves"] * (len(done) // 2)


def test_a_callback_that_saves_comes_behind(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(gc.CompressedOptimizer("sgd"), "mse")
    late = [keras.callbacks.ModelCheckpoint(tmp_path / "m.keras"), gc.callbacks.CollectState()]
    with pytest.warns(UserWarning, match="CollectState comes after ModelCheckpoint"):
        model.fit(np.zeros((2, 2)), np.zeros((2, 1)), verbose=0, callbacks=late)
