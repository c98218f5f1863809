"""Each method does by Horovod what it does by TensorFlow's collectives."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.horovod.common import strategy
from tests.horovod.jobs import needs_horovod, only, run_ranks
from tests.ranks import RANK, SIZE, compressed, digest, report, values
from tests.workers import ONE_THREAD, results, run_workers
from tf_gradcomp import compressors
from tf_gradcomp.keras.callbacks.autoencoder_training import autoencoder_of

pytestmark = needs_horovod
PROGRAM = Path(__file__)  # each rank runs this file
STEPS, BAD_STEP, PLANNED, ROWS = 30, 12, 18, 12
PAIRS = {  # an autoencoder that keeps the mean of two
    "encoder": [[1, 2, 2]],
    "decoder": [[1, 2, 2]],
    "slope": 1.0,
    "weights": [0.5, 0.5, 0, 1, 1, 0, 0.5, 0],
}
COMPRESSORS = {
    **{name: name for name in compressors.names()},
    "lgc": compressors.LGC(
        density=0.1, warmup_steps=10, training_steps=6, guard=0.9, autoencoder=PAIRS
    ),
    "lgreco": compressors.LGreCo("top_k"),
    "bfloat16": compressors.Cast("bfloat16"),
    "warmed up": compressors.ScaleCom(20, warmup_steps=BAD_STEP + 2),
}


def batches():
    """Other rows on each rank, and the targets of one linear model."""
    rng = np.random.default_rng(3)
    kernel = rng.normal(size=(40, 32))
    for step in range(STEPS):
        x = rng.normal(size=(SIZE * ROWS, 40)).astype("float32")
        y = (x @ kernel).astype("float32")
        if step == BAD_STEP:
            x[-1] = np.nan
        yield x, y


def train(method):
    keras.utils.set_random_seed(0)
    with strategy().scope():
        variables = [keras.Variable("glorot_uniform", shape=(40, 32)), keras.Variable([0.0] * 32)]
        optimizer = compressed(keras.optimizers.SGD(0.05), COMPRESSORS[method], precondition=None)
        optimizer.build(variables)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ variables[0] + variables[1] - y))
            if optimizer.group.by_strategy:
                loss /= SIZE
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)

    step = tf.function(lambda x, y: strategy().run(replica_step, [x, y]), autograph=False)
    autoencoder = gc.callbacks.AutoencoderTraining()
    for index, (x, y) in enumerate(batches()):
        if index == PLANNED:
            optimizer.exchange.plan_settings()
        local = slice(RANK * ROWS, (RANK + 1) * ROWS)
        step(tf.constant(x[local]), tf.constant(y[local]))
        autoencoder.train(optimizer.exchange)
    own_residuals = digest(optimizer.group.local(r, 0) for r in optimizer.exchange.residuals)
    with optimizer.exchange.saving.saving_on_all():
        sums = {
            name: values(map(optimizer.exchange.saving.read, kept))
            for name, kept in optimizer.exchange.state.items()
        }
    traffic = optimizer.exchange.traffic()
    return {
        "weights": digest(variables),
        "values": values(variables),
        "sums": sums,
        "own residuals": own_residuals,
        "skipped": int(optimizer.exchange.skipped_steps.numpy()),
        "payload": traffic.payload_bytes,
        "sent": traffic.sent_bytes,
        "exchanges": traffic.exchanges,
        "phase": method == "lgc" and autoencoder_of(optimizer.exchange).stage,
        "plan": method == "lgreco" and optimizer.exchange.hooks.plan_in_force().settings,
    }


quick = pytest.mark.quick("Horovod", "custom training loop")
# Horovod carries requests, whatever method makes them. These make one of each kind: payloads of
# different lengths and of one length, sums of each dtype, and the payload of one rank. "auto" times
# them, "warmed up" changes them, and the ranks plan and learn from them.
METHODS = [
    *("adacomp", "qsgd", "power_sgd", "cast", "bfloat16", "max_norm", "scalecom"),
    *("auto", "warmed up", "lgreco", "lgc"),
]
METHODS_OF_THREE = ["adacomp", "max_norm", "scalecom"]


@pytest.fixture(scope="module")
def methods():
    return results(run_ranks(PROGRAM, 2, METHODS))


@pytest.fixture(scope="module")
def methods_of_three():
    return results(run_ranks(PROGRAM, 3, METHODS_OF_THREE, env=ONE_THREAD))


@pytest.fixture(scope="module")
def methods_by_strategy():
    return results(run_workers(PROGRAM, 2, METHODS))


@pytest.mark.parametrize(
    ("ranks", "method"),
    [
        *(pytest.param("methods", method, marks=quick) for method in METHODS),
        *(("methods_of_three", method) for method in METHODS_OF_THREE),
    ],
)
def test_ranks_stay_equal_and_skip_a_step_together(request, ranks, method):
    seen = [rank[method] for rank in request.getfixturevalue(ranks)]
    only([rank["weights"] for rank in seen])
    only([rank["sums"].get("residual") for rank in seen])
    assert only([rank["skipped"] for rank in seen]) == 1
    assert np.isfinite(np.concatenate(list(map(np.ravel, seen[0]["values"])))).all()
    if method != "auto":  # which may choose any
        has_none = method in ("cast", "bfloat16")
        assert len({rank["own residuals"] for rank in seen}) == (1 if has_none else len(seen))


@quick
def test_ranks_learn_an_autoencoder_and_plan_together(methods):
    assert only([rank["lgc"]["phase"] for rank in methods]) == 3
    assert only([rank["lgreco"]["plan"] for rank in methods])


@quick
@pytest.mark.parametrize("method", [method for method in METHODS if method != "auto"])
def test_a_method_does_what_it_does_by_the_collectives_of_tensorflow(
    methods, methods_by_strategy, method
):
    by_horovod, by_strategy = methods[0][method], methods_by_strategy[0][method]
    assert by_horovod["values"] == by_strategy["values"]
    for name, sums in by_strategy["sums"].items():
        assert by_horovod["sums"][name] == sums
    as_float32 = 2 if method == "bfloat16" else 1  # Horovod does not sum bfloat16
    assert by_horovod["payload"] <= as_float32 * by_strategy["payload"]
    assert by_horovod["sent"] <= as_float32 * by_strategy["sent"]


@quick
def test_gathered_payloads_are_sent_without_padding(methods):
    ranks = [rank["adacomp"] for rank in methods]
    payloads = [rank["payload"] for rank in ranks]
    words = ranks[0]["exchanges"]  # that tell the length, one in each step
    assert payloads[0] != payloads[1]
    assert only([rank["sent"] for rank in ranks]) - 4 * words == pytest.approx(
        sum(payloads) / 2, abs=4 * words
    )


if __name__ == "__main__":
    strategy()  # TensorFlow wants to know of its cluster before anything runs
    report({method: train(method) for method in sys.argv[1:]})
