"""Jobs of Keras 2 train by lossy methods: workers stay equal, and skip a step together."""

import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.keras2.common import compiled, new_strategy, state_of
from tests.keras2.jobs import (
    HAS_ADDONS,
    by_horovod,
    by_strategy,
    needs_horovod,
    tf_keras,
)
from tests.keras2.optimizers import OPTIMIZERS, layer_optimizers
from tests.ranks import (
    BATCH,
    BY_HOROVOD,
    RANK,
    SIZE,
    argument,
    compressed,
    data,
    exchange_of,
    own_rows,
    report,
)
from tf_gradcomp.exchange.exchange import residual_norm

PROGRAM = Path(__file__)  # each worker runs this file
STEPS, BAD = 12, 5
ALL_OPTIMIZERS = OPTIMIZERS | layer_optimizers()
SETTINGS = {"local": {"precondition": "local"}, "none": {"precondition": None}, "": {}}


def trained(case, strategy):
    name, method, setting = (case + "::").split(":")[:3]
    scaled = "mixed_float16" if setting == "scaled" else "float32"

    def make():
        inner = ALL_OPTIMIZERS[name]()
        return inner if by_strategy else compressed(inner, method, **SETTINGS.get(setting, {}))

    by_strategy = getattr(strategy, "compressor", None) is not None
    model = compiled(make, strategy, policy=scaled)
    exchange = exchange_of(model)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")

    def step(x, y, factor):
        with tf.GradientTape() as tape:
            loss = factor * loss_of(y, model(x, training=True)) / BATCH
            if BY_HOROVOD:
                loss *= SIZE
        model.optimizer.minimize(loss, model.trainable_variables, tape=tape)

    @tf.function(autograph=False)
    def run(x, y, factor):
        strategy.run(step, args=(x, y, factor))

    x, y = (own_rows(part).reshape(STEPS, BATCH // SIZE, -1) for part in data(STEPS))
    norms = []
    for i in range(STEPS):
        factor = np.nan if i == BAD and RANK == 0 else 1.0
        before = state_of(model)["weights"]
        run(x[i], y[i, :, 0], tf.constant(factor, tf.float32))
        if i == BAD:
            unchanged = before == state_of(model)["weights"]
        norms.append(residual_norm(exchange))
    seen = state_of(model)
    seen |= {"skipped": int(exchange.skipped_steps.numpy()), "unchanged": unchanged}
    if hasattr(model.optimizer, "loss_scale"):
        seen["scale"] = float(model.optimizer.loss_scale)
    return {**seen, "residual": norms[-1], "finite": bool(np.isfinite(norms).all())}


# Methods do not see which Keras calls them. These cases have the kinds of optimizers, and of what
# these are given.
METHODS = [
    *("Adam:adacomp", "legacy Adam:adacomp", "legacy Nadam:adacomp"),
    *("MovingAverage:adacomp", "Lookahead:scalecom", "MultiOptimizer:adacomp"),
    *("SGD:adacomp:scaled", "legacy SGD:top_k:scaled"),
]
METHODS_BY_HOROVOD = ["Adam:adacomp", "MovingAverage:adacomp", "SGD:adacomp:scaled"]
AS_THEY_ARE = ["SGD::scaled", "legacy SGD::scaled", "MovingAverage"]
if not HAS_ADDONS:  # tf_keras: a few, as its code is that of Keras 2.15
    METHODS_BY_HOROVOD = ["Adam:adacomp", "SGD:adacomp:scaled", "SGD:scalecom", "SGD:power_sgd"]
    METHODS = [*METHODS_BY_HOROVOD, "legacy Adam:adacomp"]
    AS_THEY_ARE = ["legacy SGD::scaled"]


@pytest.fixture(scope="module")
def methods():
    return by_strategy(PROGRAM, ",".join(METHODS))


@tf_keras
@pytest.mark.parametrize("case", METHODS)
def test_workers_stay_equal_and_skip_a_step_together(methods, case):
    first, second = (worker[case] for worker in methods)
    for name in ("weights", "slots", "iterations"):
        assert first[name] == second[name]
    assert first["skipped"] == second["skipped"] == 1
    assert first["unchanged"]
    assert first["finite"]
    assert second["finite"]
    assert first["residual"] != second["residual"]
    if case.endswith("scaled"):
        assert first["scale"] == second["scale"] == 2**14


@pytest.fixture(scope="module")
def methods_of_the_strategy():
    return by_strategy(PROGRAM, ",".join(AS_THEY_ARE), "adacomp")


@pytest.mark.parametrize("case", AS_THEY_ARE)
def test_workers_stay_equal_with_a_method_of_the_strategy(methods_of_the_strategy, case):
    """A loss scaler sees the bad gradient, leaves the weights alone, and halves the scale."""
    first, second = (worker[case] for worker in methods_of_the_strategy)
    for name in ("weights", "slots", "iterations"):
        assert first[name] == second[name]
    assert first["skipped"] == 1
    assert first["residual"] != second["residual"]
    if case.endswith("scaled"):
        assert first["unchanged"]
        assert first["scale"] == second["scale"] == 2**14


@pytest.fixture(scope="module")
def methods_by_horovod():
    return by_horovod(PROGRAM, ",".join(METHODS_BY_HOROVOD))


@tf_keras
@needs_horovod
@pytest.mark.parametrize("case", METHODS_BY_HOROVOD)
def test_ranks_of_horovod_do_what_workers_of_a_strategy_do(methods_by_horovod, methods, case):
    for rank, worker in zip(methods_by_horovod, methods, strict=True):
        assert rank[case]["weights"] == worker[case]["weights"]
        assert rank[case]["residual"] == worker[case]["residual"]


def test_addons_and_keras_step_alike_with_divided_gradients(methods):
    """Legacy and new-style Adam differ in rounding alone, and not with divided gradients."""
    first = methods[0]
    assert first["Adam:adacomp"]["weights"] == first["legacy Adam:adacomp"]["weights"]


if __name__ == "__main__":
    strategy = new_strategy(compressor=sys.argv[2]) if len(sys.argv) > 2 else new_strategy()
    report({case: trained(case, strategy) for case in argument(1).split(",")})
