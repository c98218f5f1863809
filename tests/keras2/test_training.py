"""With Keras 2, dense training equals training in one process on whole batches."""

import sys
from pathlib import Path

import pytest

import tf_gradcomp as gc
from tests.keras2.common import ALONE, compiled, fit, new_strategy, state_of
from tests.keras2.jobs import (
    HAS_ADDONS,
    HAS_HOROVOD,
    TRAINED,
    by_horovod,
    by_strategy,
    largest_difference,
    needs_horovod,
    quick,
    tf_keras,
)
from tests.keras2.optimizers import OPTIMIZERS, layer_optimizers
from tests.ranks import (
    BY_HOROVOD,
    RANK,
    argument,
    compressed,
    data,
    digest,
    exchange_of,
    report,
)
from tests.workers import result, run_workers
from tf_gradcomp.private import tensorflow as tf_private

PROGRAM = Path(__file__)  # each worker runs this file
STEPS = 8
BUILT_IN_STEP = ("EMA", "legacy loss scale", "LazyAdam")  # as where nobody builds the optimizer
ALL_OPTIMIZERS = OPTIMIZERS | layer_optimizers()


def together(name, strategy):
    """Ranks of Horovod begin with different weights, and get rank 0's."""
    name, _, method = name.partition(":")

    def make():
        inner = ALL_OPTIMIZERS[name]()
        by_strategy = strategy is not ALONE and strategy.compressor is not None
        return inner if by_strategy else compressed(inner, method or "no_compression")

    model = compiled(make, strategy, seed=RANK if BY_HOROVOD else 0, in_step=name in BUILT_IN_STEP)
    callbacks = [gc.callbacks.BroadcastInitialState()]
    fit(model, *data(STEPS), callbacks=callbacks)
    replicas = zip(
        *map(strategy.experimental_local_results, model.trainable_variables), strict=True
    )
    return {
        **state_of(model),
        "residuals": digest(exchange_of(model).residuals),
        "replicas": [digest(variables) for variables in replicas],
    }


def train_alone(name):
    model = compiled(ALL_OPTIMIZERS[name], ALONE)
    fit(model, *data(STEPS))
    return state_of(model)


WRAPPED = [
    *("EMA", "loss scale"),
    *("legacy clipnorm", "legacy loss scale"),
    *("tfa AdamW", "RectifiedAdam", "SWA of Lookahead", "MultiOptimizer"),
]
BY_STRATEGY = ["LazyAdam", "MovingAverage"]
ON_RANKS = ["AdamW", "clipnorm", "EMA", "LazyAdam", "MovingAverage", "Lookahead"]
if not HAS_ADDONS:  # tf_keras: a few, as its code is that of Keras 2.15
    WRAPPED = ["legacy Adam"]
    BY_STRATEGY = ["EMA"]
    ON_RANKS = ["AdamW", "clipnorm", "EMA"]


@pytest.fixture(scope="module")
def alone():
    names = dict.fromkeys(["AdamW", *WRAPPED, *BY_STRATEGY, *(ON_RANKS if HAS_HOROVOD else [])])
    (worker,) = run_workers(PROGRAM, 1, ["alone", ",".join(names)])
    return result(worker)


@pytest.fixture(scope="module")
def wrapped():
    return by_strategy(PROGRAM, "wrapped", ",".join(WRAPPED))


@pytest.fixture(scope="module")
def as_they_are():
    return by_strategy(PROGRAM, "strategy", ",".join(BY_STRATEGY))


@pytest.fixture(scope="module")
def ranks():
    return by_horovod(PROGRAM, "wrapped", ",".join(ON_RANKS))


@pytest.mark.parametrize(
    ("job", "name"),
    [
        *(pytest.param("wrapped", name, marks=[tf_keras, quick]) for name in WRAPPED),
        *(("as_they_are", name) for name in BY_STRATEGY),
        *(pytest.param("ranks", name, marks=[needs_horovod, tf_keras, quick]) for name in ON_RANKS),
    ],
)
def test_dense_training_equals_one_process_on_whole_batches(request, alone, job, name):
    first, second = (worker[name] for worker in request.getfixturevalue(job))
    expected = alone[name]
    assert first == second
    assert largest_difference(first["values"], expected["values"]) <= TRAINED
    assert first["iterations"] == expected["iterations"]


def test_workers_of_several_replicas_train_as_one_process_and_stay_equal(alone):
    first, second = by_strategy(PROGRAM, "wrapped", "AdamW,Adam:adacomp", 2)
    for name in ("AdamW", "Adam:adacomp"):
        assert first[name]["slots"] == second[name]["slots"]
        copies = [*first[name]["replicas"], *second[name]["replicas"]]
        assert copies == [first[name]["weights"]] * 4
    assert largest_difference(first["AdamW"]["values"], alone["AdamW"]["values"]) <= TRAINED
    compressed, other = first["Adam:adacomp"], second["Adam:adacomp"]
    assert compressed["residuals"] != other["residuals"]


# Trains an optimizer of tensorflow-addons by Horovod's own wrapper, which drifts in silence.
_DRIFTS = """
    import horovod.tensorflow.keras as hvd
    import numpy as np
    import tensorflow_addons as tfa
    from tests.keras2.common import compiled, fit, legacy, new_strategy

    from tests.ranks import data, report, values


    def reduced():
        return hvd.DistributedOptimizer(legacy.SGD(0.1))


    orders = {"inside": lambda: tfa.optimizers.MovingAverage(reduced()), "alone": reduced}
    seen = {}
    for name, make in orders.items():
        model = compiled(make, new_strategy())
        fit(model, *data(8))
        seen[name] = np.concatenate(list(map(np.ravel, values(model.trainable_variables)))).tolist()
    report(seen)
"""


@needs_horovod
@pytest.mark.skipif(not HAS_ADDONS, reason="tensorflow-addons is not there")
def test_moving_average_around_horovods_optimizer_drifts():
    """If this fails, what is said about `MovingAverage(hvd(...))` has to be looked at again."""
    first, second = by_horovod(_DRIFTS)
    assert first["alone"] == second["alone"]
    assert largest_difference([first["inside"]], [second["inside"]]) > 1e-3


if __name__ == "__main__":
    way, names = argument(1), argument(2).split(",")
    if way == "alone":
        report({name: train_alone(name) for name in names})
    else:
        if len(sys.argv) > 3:
            tf_private.use_logical_cpus(int(argument(3)))
        strategy = new_strategy(**({"compressor": "no_compression"} if way == "strategy" else {}))
        report({name: together(name, strategy) for name in names})
