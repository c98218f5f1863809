"""A job that dies at any stage of a save is resumed from the last complete one."""

import io
import json
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.workers import Job, result

PROGRAM = Path(__file__).parent / "programs/killed_saving.py"
STAGES = {  # at which a job dies; whether the job has completed a save
    "before collecting": True,  # at the end of the next epoch
    "collecting": True,
    "writing": False,
    "before renaming": False,
    "after renaming": True,
    "disk is full": False,
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Returns by stage the restored values of the next job, the saved values, and the job's end."""
    folder = tmp_path_factory.mktemp("saves")
    epoch, seen, stage = 1, {}, None
    for next_stage in [*STAGES, "none"]:
        with Job(PROGRAM, 2, [folder, next_stage], grace=3) as job:
            workers = job.wait()
        if stage is not None:
            seen[stage] |= {
                "restored": [result(worker) for worker in workers],
                "said": workers[0].stderr + workers[0].stdout,
            }
        if next_stage in STAGES:
            stage = next_stage
            epoch += STAGES[stage]
            seen[stage] = {
                "ends": [worker.returncode for worker in workers],
                "errors": [worker.stderr for worker in workers],
                "saved": json.loads((folder / f"{epoch}.json").read_text()),
                "file": layers_in((folder / "m.keras").read_bytes()),
            }
    return seen


def layers_in(content):
    """Reads a `.keras` file to its end."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        with h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
            return sorted(file["optimizer"]), sorted(file["optimizer/vars"])


@pytest.mark.parametrize("stage", STAGES)
def test_the_next_job_resumes_from_the_last_complete_save(jobs, stage):
    saved, seen = jobs[stage]["saved"], jobs[stage]["restored"]
    assert f"resumed at epoch {saved['epoch'] + 1}" in jobs[stage]["said"]
    for restored in seen:
        for name in ("epoch", "weights", "slots", "iterations"):
            assert restored[name] == saved[name], name
        for got, wanted in zip(restored["residual sums"], saved["residual sums"], strict=True):
            # Each of two workers has half of the sum, which float32 holds exactly.
            np.testing.assert_array_equal(got, wanted)
            assert np.any(wanted)


@pytest.mark.parametrize("stage", STAGES)
def test_the_model_file_is_complete_whenever_a_worker_dies(jobs, stage):
    groups, state = jobs[stage]["file"]
    assert "inner_optimizer" in groups
    assert "residual_0" in state


def test_a_full_disk_is_an_error_on_all_workers(jobs):
    full = jobs["disk is full"]
    assert full["ends"] == [1, 1]
    assert "File too large" in full["errors"][0]
    assert "The chief could not save" in full["errors"][1]
