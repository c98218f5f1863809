"""Tests `LayerwisePlan`: the times of plans, logs, output, and the order of callbacks."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.replicas import collective
from tf_gradcomp.compressors import LGreCo, TopK
from tf_gradcomp.compressors.lgreco import LayerPlanner

LOGS = ["plan_ratio", "plan_budget_used", "plan_at_bound"]
STEPS = 6  # of an epoch


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(16 * STEPS, 30)) * np.geomspace(1, 1e-3, 30)  # few inputs count
    return x.astype("float32"), generator.normal(size=(16 * STEPS, 40)).astype("float32")


def two_layers():
    return keras.Sequential([keras.Input((30,)), keras.layers.Dense(50), keras.layers.Dense(40)])


def build(compressor="lgreco(method='top_k')", inner=None, strategy=None):
    with (strategy or collective()).scope():
        model = keras.Sequential(
            [keras.Input((30,)), keras.layers.Dense(50), keras.layers.Dense(40)]
        )
        inner = inner() if inner else keras.optimizers.SGD(0.1)
        model.compile(gc.CompressedOptimizer(inner, compressor), loss="mse")
    return model


def fit(model, *callbacks, epochs=2, **kwargs):
    return model.fit(
        *data(),
        batch_size=16,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        **kwargs,
    ).history


class Watch(keras.callbacks.Callback):
    """The settings in force after each step; and the logs of the first."""

    def __init__(self):
        super().__init__()
        self.settings, self.first = [], None

    def on_train_batch_end(self, batch, logs=None):
        self.settings.append(self.model.optimizer.exchange.hooks.plan_in_force().settings)
        self.first = self.first or dict(logs)


def changes(settings):
    """After which steps the settings are others than before them."""
    pairs = itertools.pairwise(settings)
    return [step for step, (before, after) in enumerate(pairs, 2) if before != after]


def test_it_plans_after_each_epoch_and_logs_and_prints_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    watch, model = Watch(), build()
    history = fit(model, gc.callbacks.LayerwisePlan(), watch)
    plan = model.optimizer.exchange.hooks.plan_in_force()
    defaults = TopK().settings(model.optimizer.exchange.specs)
    assert watch.settings[:STEPS] == [defaults] * STEPS
    assert len(changes(watch.settings)) == 1
    assert {name: watch.first[name] for name in LOGS} == dict(zip(LOGS, [1, 1, 0], strict=True))
    assert [history[name][-1] for name in LOGS] == list(plan[1:])
    assert history["plan_ratio"][0] > 1
    output = capsys.readouterr().out
    assert "after 2 plans in" in output
    assert f"{plan.ratio:.2f} times fewer bytes" in output
    for number in (0, 2):  # the kernels
        path = model.optimizer.exchange.specs[number].path
        (row,) = [line for line in output.splitlines() if path in line]
        assert f"│ {defaults[number]} │" in " ".join(row.split())
        assert row.rstrip("│ ").endswith(f" {plan.settings[number]}")
    assert "bias" not in output


def test_it_plans_after_some_steps_also_over_epochs_and_traces_once(monkeypatch):
    traced, proposed = [], []
    exchange, propose = LGreCo.reduce, LayerPlanner.propose
    monkeypatch.setattr(
        LGreCo, "reduce", lambda self, inputs: traced.append(1) or exchange(self, inputs)
    )

    def noting(self, *args):
        proposed.append(steps[-1] if steps else None)
        return propose(self, *args)

    steps = []
    monkeypatch.setattr(LayerPlanner, "propose", noting)
    model, watch = build(), Watch()
    count = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: steps.append(len(steps) + 1)
    )
    fit(model, count, gc.callbacks.LayerwisePlan(every=4, table=False), watch, epochs=4)
    assert proposed == [4, 8, 12, 16, 20, 24]
    assert set(changes(watch.settings)) <= {4, 8, 12, 16, 20, 24}
    assert len(changes(watch.settings)) >= 4
    assert len(traced) == 2  # once for each replica


def test_batches_that_are_accumulated_are_no_steps():
    model = build(inner=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
    watch = Watch()
    fit(model, gc.callbacks.LayerwisePlan(every=2, table=False), watch, epochs=1)
    assert changes(watch.settings) == [6]


def test_it_does_nothing_where_nothing_is_planned(capsys):
    plans = gc.callbacks.LayerwisePlan
    assert not set(LOGS) & set(fit(build("top_k"), plans(), plans(every=1), epochs=1))
    single = build(strategy=tf.distribute.get_strategy())
    assert not set(LOGS) & set(fit(single, plans(), epochs=1))
    plain = keras.Sequential([keras.Input((30,)), keras.layers.Dense(40)])
    plain.compile("sgd", "mse")
    assert not set(LOGS) & set(fit(plain, plans(every=2), epochs=1))
    assert "L-GreCo" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "misses"),
    [
        (lambda folder: keras.callbacks.ProgbarLogger(), "see its logs"),
        (keras.callbacks.BackupAndRestore, "save the plan"),
        (lambda folder: gc.callbacks.CollectState(), "collect"),
    ],
    ids=["a reader", "a saver", "a collector"],
)
def test_it_warns_behind_a_callback_that_would_miss_something(before, misses, tmp_path):
    model = build("top_k", strategy=tf.distribute.get_strategy())
    with pytest.warns(UserWarning, match=f"LayerwisePlan comes after .* will not {misses}"):
        fit(model, before(tmp_path), gc.callbacks.LayerwisePlan(), epochs=1)


def test_learners_plan_after_each_epoch():
    model = two_layers()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    learners = gc.simulation.Learners(model, 2, LGreCo("top_k"))
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(16)
    history = learners.fit(batches, epochs=2)
    assert history["plan_ratio"] == [plan.ratio for plan in learners.plans]
    assert history["payload_bytes"][1] < history["payload_bytes"][0]
    assert learners.exchange.hooks.plan_in_force() == learners.plans[1]
    assert learners.plans[0].settings != TopK().settings(learners.exchange.specs)
    single = gc.simulation.Learners(model, 1, LGreCo("top_k"))
    assert "plan_ratio" not in single.fit(batches)
