"""Workers that read the same data in different orders, and batches with too few rows for all."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.bounds import assert_close
from tests.workers import result, run_workers

FILES = 10
TOLD_OF_FILES = "list the files"
TOLD_OF_ROWS = ["set_random_seed(0)", "reshuffle_each_iteration=False"]
TOLD_OF_EQUAL_ROWS = ["AutoShardPolicy.OFF", "seed=rank"]
PROGRAM = Path(__file__).parent / "programs/same_data.py"


@functools.cache
def seen():
    with tempfile.TemporaryDirectory() as folder:
        # So many that two random orders of the files are hardly ever equal.
        for i in range(FILES):
            rows = [f"{i},{row}\n" for row in range(8)]
            (Path(folder) / f"{i}.csv").write_text("".join(rows))
        workers = run_workers(PROGRAM, 2, [folder, str(FILES)], deadline=300)
    return [{**result(worker), "stderr": worker.stderr} for worker in workers]


def test_the_chief_reports_different_orders_with_advice():
    logged = seen()[0]["orders"][0]
    for name, messages in logged.items():
        assert len(messages) == 1, name
        advice = {"files in other orders": [TOLD_OF_FILES], "kept whole": TOLD_OF_EQUAL_ROWS}
        for expected in advice.get(name, TOLD_OF_ROWS):
            assert expected in messages[0], name


def test_equal_or_unknown_orders_are_not_reported():
    for report in seen():
        assert set(map(tuple, report["orders"][1].values())) == {()}


@pytest.mark.parametrize("data", ["arrays", "dataset"])
def test_statistics_stay_as_they_are_on_a_worker_without_rows(data):
    # The batches of two epochs, as far as they have rows of this worker: of 8, and a last one of 1.
    x = np.arange(130, dtype="float32").reshape(65, 2) / 100
    for rank, report in enumerate(seen()):
        mean, variance = np.zeros(2), np.ones(2)
        for start in [0, 16, 32, 48, 64] * 2:
            rows = x[start : start + 16]
            size = -(-len(rows) // 2)
            if len(local := rows[rank * size : (rank + 1) * size]):
                mean, variance = mean / 2 + local.mean(0) / 2, variance / 2 + local.var(0) / 2
        found = report[data]
        # Ten updates by statistics over at most eight rows, of numbers below 2.
        assert_close(found["statistics"], [mean, variance], terms=8 + 4, steps=10, scale=2)
        assert np.isfinite(found["history"]["val_loss"]).all()


def test_a_worker_with_an_empty_batch_warns_in_each_epoch():
    counts = [report["stderr"].count("this worker got an empty batch") for report in seen()]
    assert counts == [0, 4]  # the second replica's, twice by arrays and twice by a dataset


def test_a_short_last_batch_of_arrays_is_reported_before_training():
    chief, other = (report["arrays"]["told"] for report in seen())
    assert any("1 row for 2 replicas" in message for message in chief)
    assert other == []
