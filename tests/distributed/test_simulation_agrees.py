"""Learners in one process train as real workers do, step by step."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close, training
from tests.distributed.common import Setup, digits
from tests.ranks import RANK, SIZE, argument, report
from tests.replicas import method_names
from tests.workers import result, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
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
    "local steps": gc.compressors.TopK(0.1),
    "fragments": gc.compressors.ScaleCom(8),
    "dropout": gc.compressors.TopK(0.1),  # random numbers, too, are those of the workers
    "dropout in local steps": gc.compressors.TopK(0.1),
}
FRAGMENTS = {"local steps": 1, "fragments": 3, "dropout in local steps": 1}


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


WORKERS = 3  # no power of two
# Adam(0.01) has an epsilon of 0.05. Sums are over 10 rows of each of 3 workers, 8 and 64 inputs.
APART = training(gain=0.2, terms=3 * 10 + 8 + 64, steps=12)
# Workers may sum three 16-bit numbers in another order.
APART_IN_FLOAT16 = training(gain=0.2, terms=3, steps=12, dtype="float16")


@pytest.fixture(scope="module")
def jobs():
    """By way: the weights after each step, and the last plan of settings, by method."""
    real = run_workers(PROGRAM, WORKERS, ["real", WORKERS])
    simulated = run_workers(PROGRAM, 1, ["simulated", WORKERS])
    return result(real[0]), result(simulated[0])


@pytest.mark.parametrize("method", METHODS)
def test_simulation_and_job_agree_step_by_step(jobs, method):
    real, simulated = (job[method]["steps"] for job in jobs)
    assert len(real) == len(simulated) == 12
    # QSGD's payloads, which L-GreCo sends, are decoded and summed in one order.
    bound = {"cast": APART_IN_FLOAT16, "lgreco": 0}.get(method, APART)
    for step, (job, learners) in enumerate(zip(real, simulated, strict=True)):
        for expected, actual in zip(job, learners, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=bound, err_msg=f"{step}")


@pytest.mark.parametrize("method", ["no_compression", "cast", "top_k", "power_sgd", "random_k"])
def test_a_simulation_counts_the_bytes_that_a_job_sends(jobs, method):
    """The payloads of these methods have the same length whatever the gradients are."""
    real, simulated = (job[method]["sent"] for job in jobs)
    assert real == simulated > 0


def test_simulation_and_job_make_the_same_plan(jobs):
    real, simulated = (job["lgreco"]["plan"] for job in jobs)
    settings, ratio, *_ = simulated
    assert real[0] == settings
    for first, second in zip(real[1:], simulated[1:], strict=True):
        assert_close(first, second, terms=128 * 32)  # the elements of the largest gradient
    assert settings != [4, 0, 4, 0, 4, 0]  # the own ones of its method
    assert ratio > 1
    assert all(job["top_k"]["plan"] is None for job in jobs)


if __name__ == "__main__":
    learners = int(argument(2))
    train = real if argument(1) == "real" else simulated
    data = digits(BATCH * STEPS)
    report({name: train(name, compressor, data) for name, compressor in METHODS.items()})
