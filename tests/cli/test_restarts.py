"""Tests `gradcomp run --max-restarts`: jobs whose workers die are restarted, and continue."""

import json
import re

import pytest

from tests.cli.test_run import gradcomp, preloaded_gradcomp, program  # noqa: F401


def run(program, source, *options, workers=1):  # noqa: F811
    return gradcomp("run", "-n", str(workers), "--json", *options, program(source))


def test_a_job_is_restarted_as_often_as_allowed(program):  # noqa: F811
    source = "print('restarts', os.environ['GRADCOMP_RESTARTS']); sys.exit(3)"
    done = run(program, source, "--max-restarts", "2")
    ended = json.loads(done.stdout)
    assert (done.returncode, ended["exit_code"], ended["restarts"]) == (3, 3, 2)
    assert ended["runs"] == [{"exit_code": 3, "first_failure": 0}] * 3
    assert re.findall(r"restarts (\d)", done.stderr) == ["0", "1", "2"]
    assert "gradcomp: restart 1 of 2.\n" in done.stderr
    assert "gradcomp: --max-restarts allows only 2.\n" in done.stderr


def test_the_restarted_job_decides_how_it_ended(program):  # noqa: F811
    source = "sys.exit(7 if os.environ['GRADCOMP_RESTARTS'] == '0' and index == 1 else 0)"
    done = run(program, source, "--max-restarts", "5", workers=2)
    end = json.loads(done.stdout)
    assert (done.returncode, end["exit_code"], end["restarts"]) == (0, 0, 1)
    assert "worker 1 died first" in done.stderr
    assert "gradcomp: restart 1 of 5.\n" in done.stderr


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_job_that_ends_well_is_run_once(program, restarts):  # noqa: F811
    done = run(program, "print('ran')", "--max-restarts", restarts)
    assert done.returncode == 0
    assert done.stderr.count("ran") == 1


def test_the_time_limit_covers_all_runs(program):  # noqa: F811
    source = "time.sleep(1 if os.environ['GRADCOMP_RESTARTS'] == '0' else 60); sys.exit(3)"
    done = run(program, source, "--max-restarts", "9", "--timeout", "10")
    assert done.returncode == 124
    assert json.loads(done.stdout)["restarts"] == 1


TRAINING = """
import os, signal, sys
import keras, numpy as np
import tf_gradcomp as gc

strategy = gc.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    optimizer = gc.CompressedOptimizer(keras.optimizers.Adam(0.01), "no_compression")
    model.compile(optimizer, "mse")


class Die(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        marker = sys.argv[1] + "/died"
        if epoch == 2 and index == 1 and sys.argv[2] == "dies" and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
callbacks = [gc.callbacks.BackupAndRestore(sys.argv[1] + "/backup"), Die()]
callbacks = callbacks if sys.argv[3] == "saves" else callbacks[1:]
model.fit(x, x[:, :2], batch_size=8, epochs=4, verbose=0, shuffle=False, callbacks=callbacks)
print([value.tolist() for value in model.get_weights()])
"""


def train(program, folder, *args):  # noqa: F811
    """Trains on two workers that may be restarted; returns the chief's weights, and its log."""
    folder.mkdir()
    options = ["--output", "chief", "--max-restarts", "1"]
    path = program(TRAINING)
    done = preloaded_gradcomp("run", "-n", "2", *options, path, str(folder), *args)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_restarted_job_trains_as_one_whose_workers_live(program, tmp_path):  # noqa: F811
    died, log = train(program, tmp_path / "died", "dies", "saves")
    lived, _ = train(program, tmp_path / "lived", "lives", "saves")
    assert "worker 1 died first" in log
    assert "restart 1 of 1.\n" in log
    assert died == lived


def test_a_job_that_saves_nothing_gets_a_warning_at_the_start(program, tmp_path):  # noqa: F811
    _, log = train(program, tmp_path / "lived", "lives", "nothing")
    assert "gradcomp run would restart this job from zero" in log
