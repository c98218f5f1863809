"""Training leaves the program's own data as they are, in memory and on disk."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs" / "own_data.py"
FORMS = [
    *("PyDataset", "generator", "from_generator", "numpy_function", "py_function"),
    *("on_batch", "arrays"),
    *("mode c", "mode r", "h5py"),
]


@functools.cache
def seen():
    """Returns the batches that each of two workers saw, by the way it read them."""
    with tempfile.TemporaryDirectory() as folder:
        return [result(worker) for worker in run_workers(PROGRAM, 2, [folder])]


@pytest.mark.parametrize("form", FORMS)
def test_data_are_not_changed(form):
    for report in seen():
        assert report[form]["changed in memory"] == 0
        assert report[form]["file is as it was"]


@pytest.mark.parametrize("form", FORMS)
def test_all_workers_train_as_one_process(form):
    # Each of the 16 weights has one row of each batch, whose error each step halves. All numbers
    # are exact in float32, on any number of workers.
    y = np.arange(1.0, 17)
    losses = np.mean(y**2) / 4.0 ** np.arange(9)
    expected = [np.mean(losses[:4]), np.mean(losses[4:8]), losses[8]]
    for report in seen():
        assert report[form]["losses"] == expected
        for rows in np.reshape(report[form]["predicted"], (4, 16)):
            np.testing.assert_array_equal(np.sort(rows), y * (1 - 2.0**-8))
