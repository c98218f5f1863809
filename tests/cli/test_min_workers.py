"""`gradcomp run --min-workers`: jobs that lose a worker for long continue with the others."""

import json
import textwrap

import pytest

from tests.cli.test_hosts import ssh  # noqa: F401
from tests.cli.test_restarts import START
from tests.cli.test_run import gradcomp, preloaded_gradcomp, program  # noqa: F401

PLACE = """
workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
"""
WITH_GPUS = """
gpu = os.environ["CUDA_VISIBLE_DEVICES"]
print(index, len(workers), gpu, os.environ.get("GRADCOMP_SAVED"), flush=True)
deaths = pathlib.Path(sys.argv[1], "deaths")
if gpu == "0" and (not deaths.exists() or len(deaths.read_text()) < 2):
    with open(deaths, "a") as file:
        file.write("x")
    sys.exit(3)
if len(workers) == 2 and index == 0:
    save()
    time.sleep(60)
while len(workers) == 2 and not os.path.getsize(os.environ["GRADCOMP_SAVES"]):
    time.sleep(0.01)
sys.exit(4 if len(workers) == 2 else 0)
"""
ON_HOSTS = """
host = os.environ["HOST"]
print(index, *(worker.partition(":")[0] for worker in workers), flush=True)
away = pathlib.Path(sys.argv[1], "bin/away-host2")
if len(workers) == 4 and not runs:
    if index == 1:
        away.touch()
        sys.exit(9)
    time.sleep(60)
if len(workers) == 2:
    if index == 1:
        away.unlink()
        save()
        sys.exit(8)
    time.sleep(60)
"""
TRAINING = """
import pathlib, shutil, signal
folder, backup = pathlib.Path(sys.argv[1]), sys.argv[2]
workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
lost = len(workers) == 3 and index == 1
if lost and (folder / "died").exists():
    os.kill(os.getpid(), signal.SIGKILL)
if index == 0 and len(workers) == 2 and backup == "backup":
    shutil.copytree(folder / backup, folder / "by_hand")

import keras, numpy as np
import tf_gradcomp as gc

strategy = gc.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4)])
    optimizer = gc.CompressedOptimizer(keras.optimizers.Adam(0.01), "top_k(density=0.1)")
    model.compile(optimizer, "mse")


class Watch(keras.callbacks.Callback):
    def residuals(self):
        return [np.asarray(total).tolist() for total in self.model.optimizer.exchange.residuals]

    def on_train_begin(self, logs=None):
        if len(workers) == 2:
            self.tell("restored", self.residuals())

    def on_epoch_begin(self, epoch, logs=None):
        if len(workers) == 3 and epoch == 1:
            self.tell("saved", self.residuals())
            if lost:
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, logs=None):
        self.tell("weights", [value.tolist() for value in self.model.get_weights()])

    def tell(self, what, values):
        if index == 0:
            (folder / f"{what}-{backup}").write_text(json.dumps(values))


x = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
callbacks = [gc.callbacks.BackupAndRestore(folder / backup), Watch()]
model.fit(x, x[:, :4], batch_size=12, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
"""


def slots_of(done):
    return [run["slots"] for run in json.loads(done.stdout)["runs"]]


def said(done):
    """The lines of the workers, in some order."""
    return sorted(line for line in done.stderr.splitlines() if line.startswith("[worker"))


def test_a_worker_that_dies_at_once_is_left_out_until_the_others_have_saved(program, tmp_path):  # noqa: F811
    options = ["--gpus-per-worker", "1", "--min-workers", "2", "--max-restarts", "9", "--json"]
    path = program(START + PLACE + WITH_GPUS)
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    done = gradcomp("run", "-n", "3", *options, "--grace", "0.2", path, str(tmp_path), env=env)
    assert done.returncode == 0, done.stderr
    assert slots_of(done) == [[0, 1, 2], [0, 1, 2], [1, 2], [0, 1, 2]]
    runs = json.loads(done.stdout)["runs"]
    assert [(run["exit_code"], run["first_failure"]) for run in runs] == [
        (3, 0),
        (3, 0),
        (4, 1),
        (0, None),
    ]
    # The others get new numbers and keep their GPUs.
    assert {"[worker 0] 0 2 1 None", "[worker 1] 1 2 2 None"} <= {*said(done)}
    assert [line for line in said(done) if line.endswith(" 1")] == [  # after the first save
        f"[worker {worker}] {worker} 3 {worker} 1" for worker in range(3)
    ]
    assert "gradcomp: slot 0 is left out until the other workers have saved" in done.stderr
    nothing = ", from zero: nothing has been saved.\n"
    assert f"gradcomp: restart 1 of 9{nothing}" in done.stderr
    assert f"gradcomp: restart 2 of 9, with 2 of 3 workers, in slots 1, 2{nothing}" in done.stderr
    assert "gradcomp: restart 3 of 9, with 3 of 3 workers, in slots 0, 1, 2.\n" in done.stderr


def test_a_host_that_is_away_is_left_out_until_it_is_back(program, ssh, tmp_path):  # noqa: F811
    options = ["--json", "--grace", "0.2", "--max-restarts", "9", "--min-workers", "2"]
    path = program(START + PLACE + ON_HOSTS)
    hosts = ["-H", "host1,host2:2,host3"]
    done = gradcomp("run", *hosts, *options, path, str(tmp_path), env=ssh)
    assert done.returncode == 0, done.stderr
    assert slots_of(done) == [[0, 1, 2, 3], [0, 3], [0, 1, 2, 3]]
    assert {"[worker 0] 0 host1 host3", "[worker 1] 1 host1 host3"} <= {*said(done)}
    assert "gradcomp: no worker can be started on host2: ssh: connect to host" in done.stderr
    assert "gradcomp: restart 2 of 9, with 4 of 4 workers, in slots 0, 1, 2, 3.\n" in done.stderr


@pytest.mark.parametrize("least", [[], ["--min-workers", "3"]])
def test_a_job_that_lacks_too_many_hosts_says_how_it_ended(program, ssh, tmp_path, least):  # noqa: F811
    options = ["--json", "--grace", "0.2", "--max-restarts", "9", "--wait-for-hosts", "0", *least]
    path = program(START + PLACE + ON_HOSTS)
    hosts = ["-H", "host1,host2:2,host3"]
    done = gradcomp("run", *hosts, *options, path, str(tmp_path), env=ssh)
    ended = json.loads(done.stdout)
    assert (done.returncode, ended["exit_code"], ended["restarts"]) == (9, 9, 0)
    assert "gradcomp: no worker can be started on host2: ssh: connect to host" in done.stderr
    needed = least[-1] if least else 4
    assert f"no restart: 2 of 4 workers could start, and the job needs {needed}." in done.stderr


def test_a_restart_waits_for_hosts(program, ssh, tmp_path):  # noqa: F811
    body = """
        if runs == 0 and index == 1:
            pathlib.Path(sys.argv[1], "bin/away-host2").write_text("2")
            sys.exit(9)
        time.sleep(0 if runs else 60)
    """
    path = program(START + textwrap.dedent(body))
    options = ["-H", "host1,host2", "--json", "--grace", "0.2", "--max-restarts", "9"]
    done = gradcomp("run", *options, path, str(tmp_path), env=ssh)
    assert done.returncode == 0, done.stderr
    assert slots_of(done) == [[0, 1], [0, 1]]
    told = [line for line in done.stderr.splitlines() if line.startswith("gradcomp: ")][-3:]
    assert told == [
        "gradcomp: no worker can be started on host2: ssh: connect to host host2 port 22: "
        "Connection refused",
        "gradcomp: waits up to 600 s for 2 workers.",
        "gradcomp: restart 1 of 9, from zero: nothing has been saved.",
    ]


def test_a_host_that_returns_joins_before_the_next_epoch(program, ssh, tmp_path):  # noqa: F811
    body = """
        host, regroup = os.environ["HOST"], os.environ.get("GRADCOMP_REGROUP")
        if host == "host1":
            save()
        if host == "host2" and not runs:
            pathlib.Path(sys.argv[1], "bin/away-host2").write_text("1")
            sys.exit(9)
        if len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]) == 1:
            while not os.path.exists(regroup):  # as BackupAndRestore looks, once in an epoch
                time.sleep(0.02)
            sys.exit(75)
        assert regroup is None
        time.sleep(0 if runs else 60)
    """
    path = program(START + textwrap.dedent(body))
    options = ["-H", "host1,host2", "--json", "--grace", "5", "--max-restarts", "1"]
    done = gradcomp("run", *options, "--min-workers", "1", path, str(tmp_path), env=ssh)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [(run["slots"], run["exit_code"]) for run in runs] == [
        ([0, 1], 9),
        ([0], 0),
        ([0, 1], 0),
    ]
    told = "start again, which does not count as a restart, with 2 of 2 workers, in slots 0, 1.\n"
    assert f"gradcomp: {told}" in done.stderr


def test_with_two_of_three_workers_a_job_trains_as_one_that_two_resume(program, tmp_path):  # noqa: F811
    options = ["--output", "chief", "--grace", "0.2", "--min-workers", "2", "--max-restarts", "3"]
    path = program(TRAINING)
    done = preloaded_gradcomp("run", "-n", "3", *options, path, str(tmp_path), "backup")
    assert done.returncode == 0, done.stderr
    assert "restart 3 of 3, with 2 of 3 workers, in slots 0, 2.\n" in done.stderr
    by_hand = preloaded_gradcomp("run", "-n", "2", path, str(tmp_path), "by_hand")
    assert by_hand.returncode == 0, by_hand.stderr

    def told(what):
        return json.loads((tmp_path / what).read_text())

    assert told("restored-backup") == told("saved-backup")
    assert any(any(row) for row in told("saved-backup")[0])
    assert told("weights-backup") == told("weights-by_hand")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--min-workers", "2"], "give --max-restarts, too."),
        (["--min-workers", "4", "--max-restarts", "1"], "--min-workers 4 is more than the 3 of"),
        (["--min-workers", "0", "--max-restarts", "1"], "0 is not in the range x>=1"),
    ],
)
def test_a_least_number_that_means_nothing_is_refused(program, args, says):  # noqa: F811
    done = gradcomp("run", "-n", "3", *args, program(""))
    assert done.returncode == 2
    assert says in done.stderr
