"""Saving and loading `CompressedOptimizer`, with the same, more or fewer replicas."""

from __future__ import annotations

import contextlib
import functools
import types

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close
from tests.replicas import copies, mirrored, stepper
from tf_gradcomp.groups import messages


def build(optimizer=None, **settings):
    """A small compiled model; call it in a scope."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.Input((30,)), keras.layers.Dense(20, name="a"), keras.layers.Dense(3, name="b")],
        name="model",
    )
    inner = keras.optimizers.Adam(0.01, **settings)
    model.compile(optimizer or gc.CompressedOptimizer(inner), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def trained(strategy, steps=3, **settings):
    """A model after some steps on random gradients."""
    with strategy.scope():
        model = build(**settings)
    variables = model.trainable_variables
    step = stepper(strategy, lambda grads: model.optimizer.apply(grads, variables))
    generator = np.random.default_rng(0)
    for _ in range(steps):
        step(
            [
                [generator.normal(size=v.shape).astype("float32") for v in variables]
                for _ in range(strategy.num_replicas_in_sync)
            ]
        )
    return model


def mirrored_or_alone(replicas):
    """Keras cannot accumulate under a `MirroredStrategy`, even of one replica."""
    return mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()


@functools.cache
def trained_on(replicas, **settings):
    """A model to be saved, and nothing else."""
    return trained(mirrored_or_alone(replicas), steps=4, **settings)


def without_scaler(model):
    """Returns the state to compare of a model whose wrapper is in a loss scaler."""
    return types.SimpleNamespace(
        optimizer=model.optimizer.inner_optimizer,
        variables=model.variables,
        distribute_strategy=model.distribute_strategy,
    )


def residual_sums(model):
    strategy = model.distribute_strategy
    return [sum(copies(strategy, r)) for r in model.optimizer.exchange.residuals]


def state(model):
    variables = [*model.variables, *model.optimizer.inner_optimizer.variables]
    return [(variable.name, variable.numpy()) for variable in variables]


def assert_same_inner_state(actual, expected):
    for (name, value), (other, wanted) in zip(state(actual), state(expected), strict=True):
        assert name.split("_")[-1] == other.split("_")[-1]
        np.testing.assert_array_equal(value, wanted, name)


def assert_same_state(actual, expected):
    assert_same_inner_state(actual, expected)
    for a, b in zip(residual_sums(actual), residual_sums(expected), strict=True):
        assert_close(a, b, terms=8)
    ours, theirs = actual.optimizer.exchange, expected.optimizer.exchange
    assert ours.step.numpy() == theirs.step.numpy()
    assert ours.skipped_steps.numpy() == theirs.skipped_steps.numpy()
    assert ours.facts.has_residual.numpy().any() == theirs.facts.has_residual.numpy().any()


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("saved_by", [2, 1])
@pytest.mark.parametrize("form", ["whole model", "weights", "tf.train.Checkpoint"])
def test_all_state_is_loaded_into_any_number_of_replicas(tmp_path, form, saved_by, replicas):
    before = trained_on(saved_by)
    assert any(residual.any() for residual in residual_sums(before)) == (saved_by > 1)
    if form == "whole model":
        before.save(tmp_path / "model.keras")
        with mirrored(replicas).scope():
            after = keras.models.load_model(tmp_path / "model.keras")
    else:
        with mirrored(replicas).scope():
            after = build()
        if form == "weights":
            before.save_weights(tmp_path / "model.weights.h5")
            after.load_weights(tmp_path / "model.weights.h5")
        else:
            saved = tf.train.Checkpoint(model=before, optimizer=before.optimizer)
            path = saved.save(tmp_path / "checkpoint")
            restored = tf.train.Checkpoint(model=after, optimizer=after.optimizer)
            restored.restore(path).assert_consumed()
    assert type(after.optimizer) is gc.CompressedOptimizer
    assert_same_state(after, before)
    shares = copies(after.distribute_strategy, after.optimizer.exchange.residuals[0])
    assert len(shares) == replicas
    for share in shares:
        np.testing.assert_array_equal(share, shares[0])


def test_a_restored_residual_is_not_summed_over_the_replicas(tmp_path, monkeypatch):
    trained_on(2).save_weights(tmp_path / "m.weights.h5")
    strategy = mirrored(2)
    with strategy.scope():
        model = build()
    sums = []
    reduce = strategy.reduce
    monkeypatch.setattr(
        strategy, "reduce", lambda *args, **kw: sums.append(1) or reduce(*args, **kw)
    )
    model.load_weights(tmp_path / "m.weights.h5")
    assert not sums  # each would be a collective
    assert np.any(residual_sums(model)[0])
    assert np.any(model.optimizer.exchange.residuals[0].numpy())
    assert sums


@pytest.mark.parametrize("compressor", ["adacomp", "lgreco(method='top_k')"])
def test_a_job_with_a_loss_scale_resumes_from_a_job_without_one(tmp_path, compressor):
    """As under `mixed_float16`, where `compile` puts the loss scaler around the wrapper."""

    def wrapped():
        return gc.CompressedOptimizer(keras.optimizers.Adam(0.01), compressor)

    strategy = mirrored(2)
    with strategy.scope():
        before = trained(strategy, optimizer=wrapped())
    before.save_weights(tmp_path / "model.weights.h5")
    path = tmp_path / "model.weights.h5"
    for initial_scale in (64.0, 1.0):  # the second resumes from the first
        with mirrored(2).scope():
            scaler = keras.optimizers.LossScaleOptimizer(wrapped(), initial_scale=initial_scale)
            after = build(scaler)
        for _ in range(2):
            after.load_weights(path)
            assert_same_state(without_scaler(after), before)
        assert scaler.dynamic_scale.numpy() == 64
        path = tmp_path / "scaled.weights.h5"
        after.save_weights(path)


class Dies(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_job_that_fails_again_resumes_from_its_latest_epoch(tmp_path):
    """Keras takes the first epoch of a resumed job for epoch 0."""
    x, y = np.ones((12, 30)), np.ones((12, 3))
    updates = []
    for steps in (10, 3, 1000):
        model = build()
        backup = gc.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=2)
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[backup, Dies(steps)])
        updates.append(int(model.optimizer.iterations))
    # 10 updates, 4 of them in epoch 1; after resuming 3 more, and whole epochs 1 and 2 of 6
    # updates.
    assert updates == [10, 13, 12 + 12]


@pytest.mark.parametrize("backup_of", [keras.callbacks, gc.callbacks], ids=["keras", "gc"])
def test_a_restarted_job_without_its_backup_says_that_it_begins_from_zero(
    tmp_path, monkeypatch, caplog, backup_of
):
    monkeypatch.setenv("GRADCOMP_RESTARTS", "1")
    message = f"begins from zero, because there is no backup in {str(tmp_path / 'backup')!r}"
    for logged, steps in ((True, 10), (False, 1000)):  # the second job finds the first one's
        messages.forget()
        caplog.clear()
        backup = backup_of.BackupAndRestore(tmp_path / "backup")
        with contextlib.suppress(KeyboardInterrupt):
            data = np.ones((12, 30)), np.ones((12, 3))
            build().fit(*data, batch_size=2, epochs=3, verbose=0, callbacks=[backup, Dies(steps)])
        assert (message in caplog.text) == logged


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"use_ema": True}])
@pytest.mark.parametrize("saved_by", [2, 1])
@pytest.mark.parametrize("replicas", [1, 2])
def test_inner_state_is_loaded_with_all_settings(tmp_path, settings, saved_by, replicas):
    before = trained_on(saved_by, **settings)
    before.save_weights(tmp_path / "model.weights.h5")
    with mirrored_or_alone(replicas).scope():
        after = build(**settings)
    after.load_weights(tmp_path / "model.weights.h5")
    assert_same_inner_state(after, before)


def test_training_continues_as_if_uninterrupted(tmp_path):
    straight = trained(mirrored(2), steps=2)
    straight.save(tmp_path / "model.keras")
    with mirrored(2).scope():
        resumed = keras.models.load_model(tmp_path / "model.keras")
    # Each replica got the same share of the state; so give it to the other one as well.
    for name, variables in straight.optimizer.exchange.state.items():
        shares = resumed.optimizer.exchange.state[name]
        for variable, share in zip(variables, shares, strict=True):
            variable.assign(sum(copies(resumed.distribute_strategy, share)))
    generator = np.random.default_rng(9)
    gradients = [
        [generator.normal(size=v.shape).astype("float32") for v in straight.trainable_variables]
        for _ in range(2)
    ]
    for model in (straight, resumed):
        variables = model.trainable_variables
        step = stepper(
            model.distribute_strategy,
            lambda g, model=model, variables=variables: model.optimizer.apply(g, variables),
        )
        step(gradients)
    assert_same_state(resumed, straight)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_checkpoint_of_the_plain_optimizer_is_taken(tmp_path, replicas):
    plain = build(keras.optimizers.Adam(0.01))
    generator = np.random.default_rng(0)
    plain.fit(
        generator.normal(size=(16, 30)), generator.normal(size=(16, 3)), verbose=0, batch_size=4
    )
    plain.save_weights(tmp_path / "plain.weights.h5")
    with mirrored(replicas).scope():
        model = build()
    model.load_weights(tmp_path / "plain.weights.h5")
    inner = model.optimizer.inner_optimizer
    for expected, actual in zip(plain.optimizer.variables, inner.variables, strict=True):
        np.testing.assert_array_equal(expected.numpy(), actual.numpy(), expected.path)
    for expected, actual in zip(plain.variables, model.variables, strict=True):
        np.testing.assert_array_equal(expected.numpy(), actual.numpy(), expected.path)
    assert not any(residual.any() for residual in residual_sums(model))


def test_state_missing_in_a_checkpoint_starts_at_zero():
    model = trained(mirrored(2))
    model.optimizer.load_own_variables({})
    assert not any(residual.any() for residual in residual_sums(model))
    assert model.optimizer.exchange.step.numpy() == 0


@pytest.mark.parametrize(
    ("compressor", "lost"),
    [
        ("no_compression", "residual"),
        ("qsgd", None),
        ("adacomp", None),
    ],
)
def test_state_that_a_compressor_cannot_load_is_reported(monkeypatch, compressor, lost):
    said = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *args: said.append(text % args))
    saved = {}
    trained(mirrored(2)).optimizer.save_own_variables(saved)
    with mirrored(2).scope():
        optimizer = gc.CompressedOptimizer(keras.optimizers.Adam(0.01), compressor)
        build(optimizer).optimizer.load_own_variables(saved)
    assert [f": {lost}. It" in text for text in said] == [True] * bool(lost)
    assert any(np.any(r.numpy()) for r in optimizer.exchange.residuals) == (lost is None)


def test_an_optimizer_loaded_before_it_was_built_is_reported(monkeypatch):
    said = []
    monkeypatch.setattr(tf.get_logger(), "warning", said.append)
    variable = keras.Variable(np.zeros(3, "float32"), name="kernel")
    optimizer = gc.CompressedOptimizer("sgd")
    optimizer.load_own_variables({})
    assert not said
    optimizer.load_own_variables({"residual_0": np.ones(3), "has_residual": [True]})
    assert ["is not built yet" in text for text in said] == [True]
    optimizer.build([variable])
    optimizer.load_own_variables({"residual_0": np.ones(3), "has_residual": [True]})
    assert len(said) == 1
    assert optimizer.exchange.residuals[0].numpy().all()


FLUSHED_BY = {
    "sgd": lambda: keras.optimizers.SGD(1.0),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=8.0
    ),
    "accumulation": lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2),
    "accumulation, loss scaling": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), initial_scale=8.0
    ),
}


@pytest.mark.parametrize("inner", FLUSHED_BY.values(), ids=FLUSHED_BY)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_one_replica_applies_a_restored_residual_with_its_first_step(inner, graph):
    residual = np.random.default_rng(0).normal(size=(20, 30)).astype("float32")
    variable = keras.Variable(np.zeros((20, 30), "float32"), name="kernel")
    optimizer = gc.CompressedOptimizer(inner())
    optimizer.build([variable])
    optimizer.load_own_variables({"residual_0": residual, "has_residual": [True]})

    def apply():
        optimizer.apply([tf.zeros((20, 30))], [variable])

    step = tf.function(apply, autograph=False) if graph else apply
    for _ in range(4):
        step()
    assert_close(variable.numpy(), -residual, terms=2, steps=4)
    assert not optimizer.exchange.residuals[0].numpy().any()
    assert not optimizer.exchange.facts.has_residual.numpy().any()


def test_a_residual_waits_for_a_step_that_is_not_skipped():
    variable = keras.Variable(np.zeros(5, "float32"), name="kernel")
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    optimizer = gc.CompressedOptimizer(inner)
    optimizer.build([variable])
    optimizer.load_own_variables({"residual_0": np.ones(5), "has_residual": [True]})
    optimizer.apply([tf.fill([5], np.inf)], [variable])
    assert not variable.numpy().any()
    optimizer.apply([tf.zeros(5)], [variable])
    np.testing.assert_array_equal(variable.numpy(), -np.ones(5))


def test_one_replica_applies_a_restored_residual_to_an_embedding():
    table = keras.Variable(np.zeros((6, 2), "float32"), name="embeddings")
    optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([table])
    residual = np.arange(12, dtype="float32").reshape(6, 2)
    optimizer.load_own_variables({"residual_0": residual, "has_residual": [True]})

    @tf.function(autograph=False)
    def step():
        slices = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([1, 1]), tf.constant([6, 2]))
        optimizer.apply([slices], [table])

    step()
    expected = -residual
    expected[1] -= 2
    np.testing.assert_array_equal(table.numpy(), expected)


HALVES = {
    "dense": lambda: tf.zeros((2, 3), tf.float16),
    "slices": lambda: tf.IndexedSlices(
        tf.zeros((1, 3), tf.float16), tf.constant([1]), tf.constant([2, 3])
    ),
}


# Keras cannot divide slices by a static factor.
@pytest.mark.parametrize(
    ("gradient", "scaled"), [("dense", "static"), ("dense", "dynamic"), ("slices", "dynamic")]
)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_one_replica_applies_a_residual_that_float16_cannot_hold_step_by_step(
    gradient, scaled, graph
):
    variable = keras.Variable(np.zeros((2, 3), "float16"), dtype="float16", name="kernel")
    inner = keras.optimizers.SGD(1.0, loss_scale_factor=2.0**15 if scaled == "static" else None)
    if scaled == "dynamic":
        inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**15)
    optimizer = gc.CompressedOptimizer(inner)
    optimizer.build([variable])
    residual = np.array([[1, 3, -2], [0, 5, 0.5]], "float32")  # times 2^15
    optimizer.load_own_variables({"residual_0": residual, "has_residual": [True]})

    def apply():
        optimizer.apply([HALVES[gradient]()], [variable])

    step = tf.function(apply, autograph=False) if graph else apply
    for _ in range(7):
        step()
        left = optimizer.exchange.residuals[0].numpy()
        assert_close(variable.numpy() - left, -residual, steps=7, dtype="float16")
    assert not left.any()
    assert not optimizer.exchange.facts.has_residual.numpy().any()


def test_a_damaged_inner_optimizer_is_an_error(tmp_path):
    path = tmp_path / "m.weights.h5"
    build().save_weights(path)
    with h5py.File(path, "a") as file:
        slots = file["optimizer/inner_optimizer/vars"]
        del slots["2"]
        slots["2"] = np.zeros(7)
    with pytest.raises(ValueError, match="could not be loaded"):
        build().load_weights(path)
