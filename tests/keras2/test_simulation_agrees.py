"""A simulation with Keras 2 trains as a job does."""

from pathlib import Path

import pytest

import tf_gradcomp as gc
from tests.keras2.common import ALONE, compiled, fit, new_strategy
from tests.keras2.jobs import (
    HAS_ADDONS,
    TRAINED,
    by_strategy,
    largest_difference,
)
from tests.keras2.optimizers import OPTIMIZERS
from tests.ranks import BATCH, RANK, SIZE, argument, compressed, data, report, values

PROGRAM = Path(__file__)  # each worker runs this file
STEPS = 6


def real(name, method, strategy):
    model = compiled(lambda: compressed(OPTIMIZERS[name](), method), strategy)
    fit(model, *data(STEPS))
    return values(model.trainable_variables)


def simulate(name, method):
    model = compiled(OPTIMIZERS[name], ALONE)
    x, y = (part.reshape(STEPS, BATCH, *part.shape[1:]) for part in data(STEPS))
    gc.simulation.Learners(model, SIZE, method).fit(list(zip(x, y, strict=True)))
    return values(model.trainable_variables)


SIMULATED = ["Nadam:adacomp", "MovingAverage:scalecom"] if HAS_ADDONS else ["Nadam:adacomp"]


@pytest.fixture(scope="module")
def simulated():
    return by_strategy(PROGRAM, ",".join(SIMULATED))[0]


@pytest.mark.parametrize("case", SIMULATED)
def test_a_simulation_trains_as_workers_do(simulated, case):
    assert largest_difference(simulated["real"][case], simulated["simulated"][case]) <= TRAINED


if __name__ == "__main__":
    strategy = new_strategy()
    cases = [case.split(":") for case in argument(1).split(",")]
    seen = {"real": {":".join(case): real(*case, strategy) for case in cases}}
    if RANK == 0:
        seen["simulated"] = {":".join(case): simulate(*case) for case in cases}
    report(seen)
