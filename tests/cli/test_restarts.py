"""Tests `gradcomp run --max-restarts`: jobs whose workers die are restarted, and continue."""

import json

import pytest

from tests.cli.test_run import gradcomp, preloaded_gradcomp, program  # noqa: F401

START = """
import pathlib
file = pathlib.Path(sys.argv[1], f"runs-{index}")
runs = len(file.read_text()) if file.exists() else 0
file.write_text("x" * (runs + 1))

def save():
    with open(os.environ["GRADCOMP_SAVES"], "a") as file:
        file.write(".")

"""
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


def run(program, tmp_path, body, *options, workers=1):  # noqa: F811
    """Runs `body` on each worker; `runs` is the number of earlier runs."""
    path = program(START + body)
    return gradcomp("run", "-n", str(workers), "--json", *options, path, str(tmp_path))


def test_a_job_that_makes_progress_is_restarted_as_often_as_allowed(program, tmp_path):  # noqa: F811
    done = run(program, tmp_path, "save(); sys.exit(3)", "--max-restarts", "2")
    assert json.loads(done.stdout)["restarts"] == 2
    assert done.returncode == 3
    assert "gradcomp: restart 1 of 2.\n" in done.stderr
    assert "gradcomp: --max-restarts allows only 2.\n" in done.stderr


def test_the_restarted_job_decides_how_it_ended(program, tmp_path):  # noqa: F811
    body = "sys.exit(7 if runs == 0 and index == 1 else 0)"
    done = run(program, tmp_path, body, "--max-restarts", "5", workers=2)
    end = json.loads(done.stdout)
    assert (done.returncode, end["exit_code"], end["restarts"]) == (0, 0, 1)
    assert "worker 1 died first" in done.stderr
    assert "gradcomp: restart 1 of 5, from zero: nothing has been saved.\n" in done.stderr


def test_two_runs_without_a_save_end_the_job_with_the_first_reason(program, tmp_path):  # noqa: F811
    done = run(program, tmp_path, "sys.exit(10 + runs)", "--max-restarts", "9")
    assert done.returncode == 10
    assert json.loads(done.stdout)["restarts"] == 1
    assert "two runs died without a save between them" in done.stderr


def test_a_run_that_saves_forgives_the_run_before(program, tmp_path):  # noqa: F811
    body = "save() if runs == 1 else None\nsys.exit(10 + runs if runs < 3 else 0)"
    done = run(program, tmp_path, body, "--max-restarts", "9")
    assert (done.returncode, json.loads(done.stdout)["restarts"]) == (0, 3)


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_job_that_ends_well_is_run_once(program, tmp_path, restarts):  # noqa: F811
    done = run(program, tmp_path, "print('ran')", "--max-restarts", restarts)
    assert done.returncode == 0
    assert done.stderr.count("ran") == 1


def test_the_time_limit_covers_all_runs(program, tmp_path):  # noqa: F811
    body = "save(); time.sleep(1 if runs == 0 else 60); sys.exit(3)"
    done = run(program, tmp_path, body, "--max-restarts", "9", "--timeout", "10")
    assert done.returncode == 124
    assert json.loads(done.stdout)["restarts"] == 1


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


REGROUPED = TRAINING.replace(
    "import keras",
    """
regroup = sys.argv[1] + f"/regroup-{index}"
if sys.argv[2] == "regroups":
    os.environ["GRADCOMP_REGROUP"] = regroup
import keras""",
    1,
).replace(
    "        marker =",
    """
        print("epoch", epoch)
        if epoch == 1 and index == 0 and sys.argv[2] == "regroups":
            open(regroup, "w").close()
        marker =""",
)
REGROUPED = REGROUPED.replace(
    '"/backup"', '"/backup" + ("-of-another" if index == 1 and sys.argv[2] == "differs" else "")'
)


def test_a_job_that_is_asked_to_regroup_ends_before_an_epoch_and_resumes(program, tmp_path):  # noqa: F811
    path = program(REGROUPED)

    def fit(folder, does):
        (tmp_path / folder).mkdir(exist_ok=True)
        done = preloaded_gradcomp("run", "-n", "2", path, str(tmp_path / folder), does, "saves")
        return done, [line for line in done.stdout.splitlines() if line.startswith("[worker 0]")]

    done, epochs = fit("regrouped", "regroups")
    assert done.returncode == 75, done.stderr
    assert done.stderr.count("exit code 75") == 2, done.stderr
    assert done.stderr.count("[worker 0] tf_gradcomp: fit ends before this epoch") == 1
    assert epochs == ["[worker 0] epoch 0", "[worker 0] epoch 1"]
    differs, _ = fit("regrouped", "differs")
    assert differs.returncode == 1
    assert "epochs and steps already trained, and updates, by" in differs.stderr
    resumed, rest = fit("regrouped", "lives")
    whole, all_of_it = fit("whole", "lives")
    assert (resumed.returncode, whole.returncode) == (0, 0)
    assert epochs + rest == all_of_it


def test_a_job_that_saves_nothing_gets_a_warning_at_the_start(program, tmp_path):  # noqa: F811
    _, log = train(program, tmp_path / "lived", "lives", "nothing")
    assert "gradcomp run would restart this job from zero" in log
