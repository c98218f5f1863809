"""Workers that die: the others end with an error, and the job resumes with nothing lost."""

import json
import re
import signal
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.bounds import assert_close
from tests.distributed.common import (
    Setup,
    dense_model,
    digits,
    local_residuals,
    residual_sums,
    say,
    scalar,
    state_digest,
    state_sums,
)
from tests.ranks import SIZE, argument, exchange_of, inner_of, report
from tests.workers import Job, results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file


class Watch(keras.callbacks.Callback):
    """Comes after BackupAndRestore, records the restored values, and reports the saved values."""

    def __init__(self):
        super().__init__()
        self.epochs = []
        self.restored = None
        self.after_first_step = None

    def sums(self):
        return residual_sums(exchange_of(self.model))

    def second_moments(self):
        return state_sums(exchange_of(self.model))["second_moment"]

    def on_train_begin(self, logs=None):
        self.restored = {
            "residual sums": self.sums(),
            "second moments": self.second_moments(),
            **state_digest(self.model),
        }

    def on_train_batch_end(self, batch, logs=None):
        if self.after_first_step is None:
            self.after_first_step = [
                float(np.abs(residual).max())
                for residual in local_residuals(exchange_of(self.model))
            ]

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)
        report_now(self)
        say(f"epoch {epoch} ended")


def report_now(watch):
    report(
        {
            "epochs": watch.epochs,
            "restored": watch.restored,
            "after first step": watch.after_first_step,
            "residual sums": watch.sums(),
            "second moments": watch.second_moments(),
            "own second moments": [
                np.asarray(v)
                for v in inner_of(watch.model.optimizer).variables
                if "velocity" in v.path
            ],
            "iterations": scalar(inner_of(watch.model.optimizer).iterations),
            **state_digest(watch.model),
        }
    )


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Runs two workers, one of which is killed after its second epoch; returns the backup and the
    survivor."""
    folder = tmp_path_factory.mktemp("backup")
    with Job(PROGRAM, 2, [folder / "backup", 1000]) as job:
        job.wait_for_line(1, "epoch 1 ended", timeout=300)
        job.kill(1)
        killed = time.monotonic()
        survivor = job.wait()[0]
        seconds = time.monotonic() - killed
    print(f"the survivor ended {seconds:.1f} s after the other was killed")
    return folder / "backup", survivor


def test_survivor_of_a_killed_worker_ends_with_a_named_error(killed):
    _, survivor = killed
    assert survivor.returncode not in (0, None)
    assert "tensorflow.python.framework.errors_impl.UnavailableError" in survivor.stderr


# Trains with ScaleCom; worker 1 kills itself when it is to broadcast, in its second turn.
_LEADER_DIES = '''
    import os
    import signal

    import keras
    import tensorflow as tf
    from tests.distributed.common import Setup, dense_model, digits

    from tests.ranks import RANK
    from tf_gradcomp import compressors
    from tf_gradcomp.compressors.requests import Broadcast

    LAST_STEP = 3


    def die_if_last(step):
        if step == LAST_STEP:
            os.kill(os.getpid(), signal.SIGKILL)


    class Dying(compressors.ScaleCom, registered=False):
        """ScaleCom's step up to a broadcast."""

        name = "dying"

        def reduce(self, inputs):
            requests, answer = super().reduce(inputs), None
            while True:
                try:
                    request = requests.send(answer)
                except StopIteration as end:
                    return end.value
                if isinstance(request, Broadcast) and RANK == 1:
                    with tf.control_dependencies([tf.py_function(die_if_last, [inputs.step], [])]):
                        request = Broadcast(tf.identity(request.payload), request.root)
                answer = yield request


    setup = Setup("optimizer", Dying(8))
    model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.SGD(0.1)))
    model.fit(*digits(320), batch_size=32, verbose=0)
'''


@pytest.mark.oldest
def test_no_worker_hangs_after_a_leader_dies_before_its_broadcast():
    survivor, leader = run_workers(_LEADER_DIES, 2, check=False)
    assert leader.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, None)
    assert "tensorflow.python.framework.errors_impl.UnavailableError" in survivor.stderr


# Trains in rounds of four local steps; worker 1 kills itself after the sixth step.
_DIES_IN_ROUND = '''
    import os
    import signal

    import keras
    from tests.distributed.common import Setup, dense_model, digits

    from tests.ranks import RANK

    DEATH = 6


    class Die(keras.callbacks.Callback):
        """Kills worker 1 within its second round."""

        def on_train_batch_end(self, batch, logs=None):
            if batch + 1 == DEATH and RANK == 1:
                assert self.model.optimizer.rounds.pending
                os.kill(os.getpid(), signal.SIGKILL)


    setup = Setup("optimizer", "no_compression")
    model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.SGD(0.1), local_steps=4))
    model.fit(*digits(320), batch_size=32, verbose=0, callbacks=[Die()])
'''


def test_no_worker_hangs_after_another_dies_within_a_round():
    survivor, other = run_workers(_DIES_IN_ROUND, 2, check=False)
    assert other.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, None)
    assert "tensorflow.python.framework.errors_impl.UnavailableError" in survivor.stderr


@pytest.mark.parametrize("workers", [3, 1])
def test_killed_job_resumes_with(killed, tmp_path, workers):
    backup, _ = killed
    saved, epochs_done = read_backup(backup)
    copy = tmp_path / "backup"
    copy.mkdir()
    for file in backup.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    args = [copy, epochs_done + 2]
    resumed = results(run_workers(PROGRAM, workers, args))
    for worker in resumed:
        assert worker["epochs"] == [epochs_done, epochs_done + 1]
        assert worker["weights"] == resumed[0]["weights"]
        assert worker["iterations"] == 4 * (epochs_done + 2)
        assert worker["restored"]["weights"] == resumed[0]["restored"]["weights"]
        for what, sums in saved.items():
            for restored, before in zip(worker["restored"][what], sums, strict=True):
                assert_close(restored, before, terms=4)
        residuals = worker["after first step"]
        assert (max(residuals) == 0) == (workers == 1)  # one replica applies it at once
        # And Adam gets its second moment back.
        assert all(np.any(v) == (workers == 1) for v in worker["own second moments"])


def read_backup(folder):
    """The sums over the replicas, by name, and the number of epochs in Keras' files."""
    h5py = pytest.importorskip("h5py")
    metadata = json.loads((folder / "training_metadata.json").read_text())
    with h5py.File(folder / "latest.weights.h5") as file:
        group = file["optimizer/vars"]
        saved = {
            what: [np.asarray(group[name]) for name in sorted(group) if re.fullmatch(pattern, name)]
            for what, pattern in (
                ("residual sums", r"residual_\d+"),
                ("second moments", r"second_moment_\d+"),
            )
        }
    for sums in saved.values():
        assert max(np.abs(total).max() for total in sums) > 0
    return saved, metadata["epoch"]


if __name__ == "__main__":
    FOLDER, EPOCHS = argument(1), int(argument(2))
    setup = Setup("optimizer")
    x, y = digits(96)
    model = setup.model(
        dense_model, lambda: setup.wrap(keras.optimizers.Adam(1e-2), precondition="auto")
    )
    callbacks = [gc.callbacks.BackupAndRestore(FOLDER, delete_checkpoint=False), Watch()]
    say(f"{SIZE} workers")
    model.fit(x, y, batch_size=24, epochs=EPOCHS, verbose=0, callbacks=callbacks)
