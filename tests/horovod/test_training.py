"""Training by Horovod equals training in one process on whole batches."""

from pathlib import Path

import keras
import pytest

import tf_gradcomp as gc
from tests.bounds import training
from tests.horovod.common import compiled, fit, state_of
from tests.horovod.jobs import largest_difference, needs_horovod, only, run_ranks
from tests.ranks import RANK, SIZE, argument, compressed, data, report
from tests.workers import results

pytestmark = needs_horovod
PROGRAM = Path(__file__)  # each rank runs this file
STEPS = 8
EPSILON = 0.05  # of Adam, for `tests.bounds.training`
OPTIMIZERS = {
    "sums": lambda: keras.optimizers.SGD(0.1),  # by ranks in steps that are as many times shorter
    "AdamW": lambda: keras.optimizers.AdamW(1e-2, epsilon=EPSILON),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "EMA": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=16
    ),
}


def optimizer_of_rank(name):
    if name == "sums":
        return compressed(keras.optimizers.SGD(0.1 / SIZE), "no_compression", reduction="sum")
    return compressed(OPTIMIZERS[name](), "no_compression")


def by_horovod(name):
    """Ranks begin with different weights, and get rank 0's."""
    model = compiled(lambda: optimizer_of_rank(name), seed=RANK)
    callbacks = [gc.callbacks.BroadcastInitialState()]
    fit(model, *data(STEPS), callbacks=callbacks)
    return {**state_of(model), "iterations": int(model.optimizer.iterations)}


def alone(name):
    model = compiled(OPTIMIZERS[name], seed=0)
    model.optimizer.build(model.trainable_variables)  # else the first step would be traced twice
    model.fit(*data(STEPS), batch_size=24, shuffle=False, verbose=0)
    return {**state_of(model), "iterations": int(model.optimizer.iterations)}


quick = pytest.mark.quick("Horovod", "custom training loop")
ON_TWO, ON_THREE = [name for name in OPTIMIZERS if name != "AdamW"], ["AdamW"]
# Adam moves a weight by up to 0.01 / 0.05 of its gradient. Sums are over 24 rows, 20 words, and 16
# and 3 units.
TRAINED = training(gain=0.2, terms=24 + 20 + 16 + 3, steps=STEPS)


@pytest.fixture(scope="module")
def two_ranks():
    return results(run_ranks(PROGRAM, 2, [",".join(ON_TWO)]))


@pytest.fixture(scope="module")
def three_ranks():
    return results(run_ranks(PROGRAM, 3, [",".join(ON_THREE)]))


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        *(("two_ranks", name) for name in ON_TWO),
        *(pytest.param("three_ranks", name, marks=quick) for name in ON_THREE),
    ],
)
def test_dense_training_equals_one_process_on_whole_batches(request, ranks, name):
    seen = request.getfixturevalue(ranks)
    together = only([rank["by Horovod"][name] for rank in seen])
    single = seen[0]["alone"][name]
    assert largest_difference(together["values"], single["values"]) <= TRAINED
    assert together["iterations"] == single["iterations"]


if __name__ == "__main__":
    names = argument(1).split(",")
    seen = {"by Horovod": {name: by_horovod(name) for name in names}}
    if RANK == 0:
        seen["alone"] = {name: alone(name) for name in names}
    report(seen)
