"""A job that dies at any stage of a save is resumed from the last complete one.

Each job resumes from the files of the jobs before, and trains for one epoch; the first job trains
for two. The job then dies at the given stage of the next save. At stage "none" it ends before it
trains.
"""

import io
import json
import os
import resource
import signal
import sys
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

from tests.distributed.common import Setup, dense_model, digits, residual_sums, scalar, state_digest
from tests.ranks import RANK, argument, exchange_of, report
from tests.workers import Job, results
from tf_gradcomp.exchange import saving

PROGRAM = Path(__file__)  # each worker runs this file
WEIGHTS = "latest.weights.h5"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def before(module, name, where=lambda *_: True, act=die):
    """Has a function die before it does its work; `where` is asked with its arguments."""
    original = getattr(module, name)

    def dying(*args, **kwargs):
        if where(*args):
            act(*args)
        return original(*args, **kwargs)

    setattr(module, name, dying)


def truncate_and_die(descriptor):
    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
    die()


def rename_and_die(source, to):
    os.rename(source, to)
    die()


def is_written(descriptor):
    return WEIGHTS in os.readlink(f"/proc/self/fd/{descriptor}")


def is_complete(_, to):
    return to.endswith(WEIGHTS)


def arm():
    if STAGE == "before collecting" and RANK == 1:
        before(saving.Saving, "collect")
    if STAGE == "collecting" and RANK == 1:
        before(saving, "_totals")
    if STAGE == "writing" and RANK == 0:
        before(os, "fsync", is_written, truncate_and_die)
    if STAGE == "before renaming" and RANK == 0:
        before(os, "replace", is_complete)
    if STAGE == "after renaming" and RANK == 0:
        before(os, "replace", is_complete, rename_and_die)
    if STAGE == "disk is full" and RANK == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))


class Watch(keras.callbacks.Callback):
    """Comes first, and records the values that will be saved."""

    def on_epoch_begin(self, epoch, logs=None):
        if not hasattr(self, "first"):  # Keras restores in `on_train_begin`, after this callback
            self.first = epoch
            report({"epoch": epoch, **self.state()})
            if STAGE == "none":
                sys.exit()

    def on_epoch_end(self, epoch, logs=None):
        state = self.state()
        if RANK == 0:
            (FOLDER / f"{epoch + 1}.json").write_text(json.dumps({"epoch": epoch + 1, **state}))
        if epoch == max(self.first, 1):
            arm()

    def state(self):
        sums = residual_sums(exchange_of(self.model))
        return {
            **state_digest(self.model),
            "iterations": scalar(self.model.optimizer.iterations),
            "residual sums": [total.tolist() for total in sums],
        }


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
        with Job(PROGRAM, 2, [folder, next_stage], grace=120) as job:  # kills end all at once
            workers = job.wait()
        if stage is not None:
            seen[stage] |= {
                "restored": results(workers),
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


if __name__ == "__main__":
    FOLDER, STAGE = Path(argument(1)), argument(2)
    setup = Setup("optimizer")
    x, y = digits(48)
    model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.Adam(1e-2)))
    with setup.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    callbacks = [
        Watch(),
        keras.callbacks.ModelCheckpoint(FOLDER / "m.keras"),
        keras.callbacks.BackupAndRestore(FOLDER / "backup", delete_checkpoint=False),
    ]
    model.fit(x, y, batch_size=24, epochs=20, verbose=0, callbacks=callbacks)
