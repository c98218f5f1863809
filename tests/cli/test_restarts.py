"""Tests `gradcomp run --max-restarts`: jobs whose workers die are restarted, and continue."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.cli.test_run import (
    ENV,
    gradcomp,
    preloaded_gradcomp,
    program,  # noqa: F401
    write_program,
)
from tests.workers import PYTHON, server
from tf_gradcomp.launch.preload import Preloaded


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


def train(folder, *args):
    """Trains on two workers that may be restarted; returns the chief's weights, and its log."""
    options = ["--output", "chief", "--max-restarts", "1"]
    path = write_program(folder, TRAINING)
    done = preloaded_gradcomp("run", "-n", "2", *options, path, str(folder), *args)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """Returns the weights and the log of a job whose workers live, and which saves nothing."""
    return train(tmp_path_factory.mktemp("lived"), "lives", "nothing")


def test_a_restarted_job_trains_as_one_whose_workers_live(tmp_path, lived):
    died, log = train(tmp_path, "dies", "saves")
    assert "worker 1 died first" in log
    assert "restart 1 of 1.\n" in log
    assert died == lived[0]


def test_a_job_that_saves_nothing_gets_a_warning_at_the_start(lived):
    assert "gradcomp run would restart this job from zero" in lived[1]


# `gradcomp`, which imports modules in advance as soon as the workers run.
PRELOADING = """
import sys
from tf_gradcomp.launch import job
job.PRELOAD_AFTER = 0.0
from tf_gradcomp.cli.main import main
sys.exit(main(prog_name="gradcomp"))
"""


def run_preloading(modules, *arguments, env=None, python=(sys.executable,)):
    """Restarts a job once, with modules that are imported in advance."""
    options = ["-n", "2", "--max-restarts", "1", "--preload", modules]
    command = [*python, "-c", PRELOADING]
    return gradcomp("run", *options, *arguments, command=command, env=env)


DIES = """
print(f"[{os.environ['GRADCOMP_RESTARTS']}]", 'wave' in sys.modules, sys.argv[1:], sys.path[0])
print(__name__, os.path.basename(__file__), repr(sys.stdin.read()), os.environ.get("MINE"))
time.sleep(1.0)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_restarted_workers_have_modules_that_were_imported_in_advance(program, as_module):  # noqa: F811
    path = Path(program(DIES))
    place = ["-m", path.stem] if as_module else [str(path)]
    env = {"PYTHONPATH": f"{path.parent}:{ENV['PYTHONPATH']}", "MINE": "a\\n'b'"}
    done = run_preloading("wave,json", *place, "x y", "--z", env=env)
    folder = os.getcwd() if as_module else str(path.parent)
    for restart, imported in ((0, False), (1, True)):
        line = f"[{restart}] {imported} ['x y', '--z'] {folder}\n"
        assert [f"[worker {i}] {line}" in done.stdout for i in range(2)] == [True, True], done
    assert done.stdout.count("__main__ program.py '' a\\n'b'\n") == 4
    assert done.returncode == 128 + 9


def test_a_worker_starts_without_a_module_that_cannot_be_imported_in_advance(program):  # noqa: F811
    done = run_preloading("json.nothing", program(DIES))
    assert done.stdout.count("[1] False") == 2
    assert (
        "gradcomp: --preload failed, so a worker starts without it: ModuleNotFoundError: No module "
        "named 'json.nothing'\n" in done.stderr
    )


def test_a_process_that_was_killed_while_it_waited_becomes_no_worker():
    with Preloaded(["json"], workers=1) as preloaded:
        preloaded.start(os.environ)
        (process,) = preloaded._waiting
        process.kill()
        process.wait()
        assert preloaded.take([sys.executable, "-c", ""], os.environ) is None


def test_a_module_that_is_not_there_is_refused(program):  # noqa: F811
    done = run_preloading("keras,no_such_module", program("print('ran')"))
    assert done.returncode == 2
    assert "--preload: there is no module 'no_such_module' here." in done.stderr
    assert "ran" not in done.stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-n", "1"], "--preload is for restarts; give --max-restarts, too."),
        (["-H", "host1,host2", "--max-restarts", "1"], "-H: leave out --preload; modules"),
    ],
)
def test_modules_are_imported_in_advance_only_for_restarts_here(program, options, reason):  # noqa: F811
    done = gradcomp("run", *options, "--preload", "keras", program("print('ran')"))
    assert done.returncode == 2
    assert reason in " ".join(done.stderr.split())


def test_a_job_trains_the_same_with_keras_imported_in_advance(tmp_path, lived):
    arguments = [write_program(tmp_path, TRAINING), str(tmp_path), "dies", "saves"]
    arguments = ["keras,tf_gradcomp", "--output", "chief", *arguments]
    done = run_preloading(*arguments, env={"PRELOADED": server(0)}, python=PYTHON)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1.\n" in done.stderr
    assert done.stdout == lived[0]
