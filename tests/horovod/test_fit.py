"""All that `fit` offers works on ranks of Horovod; what cannot work is refused."""

import os
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests import ranks
from tests.delays import assert_cosines, checked
from tests.horovod.common import compiled, fit, state_of
from tests.horovod.jobs import largest_difference, needs_horovod, only, run_ranks
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
from tests.workers import results

pytestmark = needs_horovod
PROGRAM = Path(__file__)  # each rank runs this file


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


# Each rank's gradient is a power of ten, so that the weights show whose are in them.
AROUND = {
    "nothing": lambda optimizer: optimizer,
    "a loss scaler": lambda optimizer: keras.optimizers.LossScaleOptimizer(
        optimizer, initial_scale=1.0
    ),
    "a multi-optimizer": lambda optimizer: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(optimizer, {"of no variable": compressed("sgd")})
    ),
}


def accumulating_model(around="nothing"):
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


def broadcast_amid(around):
    """Ranks are given the state of rank 0."""
    model = accumulating_model(around)
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
    model = accumulating_model()
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
        model = accumulating_model()
        model.fit(batches, epochs=3, verbose=0)
        trained.append(values(model.trainable_variables))
    return trained


def restored_amid(folder):
    """A checkpoint is read before or after the optimizer of the next job is built."""
    path = str(folder / "round")
    model = accumulating_model()
    build(model)
    half_a_round(model)
    model.optimizer.collect_state()
    if RANK == 0:
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
    ranks.hvd.allreduce(tf.zeros([1]))  # it is written
    early, late = accumulating_model(), accumulating_model()
    tf.train.Checkpoint(model=early, optimizer=early.optimizer).read(path)
    build(early)
    build(late)
    tf.train.Checkpoint(model=late, optimizer=late.optimizer).read(path)
    return {"before": half_a_round(early), "after": half_a_round(late)}


def amid_a_round():
    return {
        "broadcast": {around: broadcast_amid(around) for around in AROUND},
        "set_weights": set_weights(),
        "nothing to train": nothing_to_train(),
        "restored": restored_amid(FOLDER),
        "ends_of_data": ends_of_data(),
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fit")


@pytest.fixture(scope="module")
def fitted(folder):
    return results(run_ranks(PROGRAM, 2, [folder]))


@pytest.mark.parametrize(
    "check",
    [
        "planned_and_monitored",
        "mixed_precision",
        "advised",
        "backed_up",
        "two_models",
        "several_steps_per_execution",
    ],
)
def test_ranks_stay_equal_with_all_options_of_fit(fitted, check):
    only([rank[check]["weights"] for rank in fitted])
    only([rank[check]["slots"] for rank in fitted])


def test_two_models_are_distinguished(fitted):
    seen = only([(rank["two_models"]["both"], rank["two_models"]["exchanges"]) for rank in fitted])
    assert seen[1] == [6, 6]


def test_steps_in_one_execution_equal_separate_steps(fitted):
    seen = fitted[0]["several_steps_per_execution"]
    assert seen["weights"] == seen["one by one"]


def test_horovods_own_optimizer_still_does_nothing_under_keras_3(fitted):
    """If this fails, what is said about `hvd.DistributedOptimizer` has to be looked at again."""
    assert fitted[0]["stock"] != fitted[1]["stock"]


def test_plans_and_logs_equal_the_jobs(fitted):
    logs = fitted[0]["planned_and_monitored"]["logs"]
    assert logs["compression_ratio"] > 1
    assert logs["sent_bytes"] > 0
    assert logs["plan_ratio"] >= 1
    only([rank["planned_and_monitored"]["settings"] for rank in fitted])


def test_delays_are_checked_by_each_ranks_own_residuals(fitted):
    for rank in fitted:
        assert_cosines(rank["planned_and_monitored"]["delays"], 2, checks=2)


def test_steps_are_skipped_until_the_loss_scale_fits(fitted):
    seen = fitted[0]["mixed_precision"]
    assert seen["skipped"] > 0
    assert seen["scale"] == 2.0 ** (20 - seen["skipped"])


def test_a_scaler_around_a_multi_optimizer_skips_a_step_on_all_ranks(fitted):
    for rank in fitted:
        assert rank["one_rank_overflows"] == {"values": [-2, -2], "scale": 4}


WHOLE_ROUND = [[[-5.5], [-5.5]]]  # the gradients of both ranks


@pytest.mark.parametrize("around", ["nothing", "a loss scaler", "a multi-optimizer"])
def test_each_rank_keeps_what_it_has_accumulated_when_others_take_over_its_state(fitted, around):
    for rank in fitted:
        assert rank["amid_a_round"]["broadcast"][around] == WHOLE_ROUND


def test_each_rank_has_the_accumulated_gradients_that_it_set(fitted):
    for rank in fitted:
        assert rank["amid_a_round"]["set_weights"] == WHOLE_ROUND


def test_an_optimizer_without_variables_is_built(fitted):
    for rank in fitted:
        assert rank["amid_a_round"]["nothing to train"] == [True, 0]


def test_a_round_continues_after_an_unexpected_end_of_data(fitted):
    known, unknown = only([rank["amid_a_round"]["ends_of_data"] for rank in fitted])
    assert unknown == known


@pytest.mark.parametrize("when", ["before", "after"])
def test_accumulated_gradients_are_shared_out_whenever_they_are_restored(fitted, when):
    for rank in fitted:
        assert rank["amid_a_round"]["restored"][when] == WHOLE_ROUND


def test_advice_and_the_choice_are_the_same_on_all_ranks(fitted):
    only([(rank["advised"]["best"], rank["advised"]["chosen"]) for rank in fitted])


def test_a_backup_holds_the_residuals_of_all(fitted):
    left = [rank["backed_up"]["left"] for rank in fitted]
    sums = [np.add(*np.float32(pair)) for pair in zip(*left, strict=True)]
    found = only([rank["backed_up"]["found"] for rank in fitted])
    assert max(np.abs(total).max() for total in sums) > 0
    assert largest_difference([2 * np.array(one) for one in found], sums) == 0
    assert only([rank["backed_up"]["epochs"] for rank in fitted]) == [1]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("inside", 'does nothing under Keras 3.*group="horovod". alone'),
        ("outside", 'does nothing under Keras 3.*group="horovod". alone'),
        ("compression", "FP16Compressor"),
        ("gossip", "Horovod's ranks cannot take them.*use gc.MultiWorkerMirroredStrategy"),
        ("strategy", "either by Horovod or by a strategy"),
        ("xla", "jit_compile=False"),
        ("elastic", "Elastic Horovod is not supported.*restart it from a checkpoint"),
        ("no group", "one of 2 processes.*group=.horovod."),
    ],
)
def test_impossible_jobs_are_refused_with_an_alternative(fitted, what, message):
    assert re.search(message, only([rank["refused"] for rank in fitted])[what], re.DOTALL)


def test_rank_0_is_chief_and_others_have_their_own_paths(fitted, folder):
    assert [rank["chief"] for rank in fitted] == [True, False]
    assert [rank["path"] for rank in fitted] == [
        str(folder / "file"),
        str(folder / "worker-1" / "file"),
    ]


if __name__ == "__main__":
    FOLDER = Path(argument(1))
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
