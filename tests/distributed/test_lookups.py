"""Tables train as in one process, whether their lookups depend on the batch or not."""

import functools
from pathlib import Path

import pytest

from tests.bounds import assert_close
from tests.optimizer.cases import OPTIMIZERS, label
from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "lookups.py"
NAMES = [f"{i} {label(optimizer)}" for i, optimizer in enumerate(OPTIMIZERS)]


@functools.cache
def job(workers, way="strategy"):
    return [result(worker) for worker in run_workers(PROGRAM, workers, [way])]


@pytest.mark.parametrize("way", ["wrapped", "bare"])
@pytest.mark.parametrize("table", ["positions", "words"])
@pytest.mark.parametrize("optimizer", NAMES)
def test_workers_train_a_table_as_one_process(optimizer, table, way):
    index = ("positions", "words").index(table)
    (plain,) = job(1, "plain")
    for worker in job(2):
        # The optimizer gets the same numbers, so only its own operations round.
        actual, expected = worker[f"{optimizer} {way}"][index], plain[f"{optimizer} bare"][index]
        assert_close(actual, expected, terms=16, steps=8)
