"""The example of Ray Train on a local cluster: a worker dies, and later there is another number."""

import functools
import importlib.util
import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.workers import ONE_THREAD, PYTHON, python_path, server

QUIET = {
    "RAY_AUTH_MODE": "disabled",  # no files at home
    "RAY_USAGE_STATS_ENABLED": "0",  # no net
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process less in each run
}
EXAMPLES = Path(__file__).resolve().parents[2] / "keras_examples"
PROGRAM = Path(__file__).parent / "programs" / "on_ray.py"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason='Ray is not installed: pip install "tf-gradcomp[ray]"',
)


@functools.cache
def trained():
    """Returns the metrics of each epoch, first with two workers, and then with one."""
    with tempfile.TemporaryDirectory(prefix="gradcomp-ray-") as folder:
        env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        path = os.pathsep.join([str(EXAMPLES), python_path()])
        # Ray starts its processes by sys.executable, so they are forked, too.
        done = subprocess.run(
            [*PYTHON, PROGRAM, folder],
            env={**env, **ONE_THREAD, **QUIET, "PYTHONPATH": path, "PRELOADED": server(0)},
            capture_output=True,
            text=True,
            timeout=540,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert Path(folder, "died").exists()
    return json.loads(done.stdout.splitlines()[-1])


def test_workers_start_again_from_the_last_checkpoint_when_one_dies():
    metrics = trained()["two"]
    assert [metric["epoch"] for metric in metrics] == [0, 1, 2, 3]
    assert {metric["workers"] for metric in metrics} == {2}


def test_nothing_is_lost_also_with_another_number_of_workers():
    two, one = trained()["two"], trained()["one"]
    assert [(of["epoch"], of["workers"]) for of in one[-1:]] == [(4, 1)]
    assert all(metrics["lost"] == 0 for metrics in [*two, *one])
    assert all(metrics["unsent"] > 0 for metrics in two)
    assert one[-1]["unsent"] == 0  # a single worker applies what two had not sent


def test_ray_trains_by_keras_3():
    """Although it sets TF_USE_LEGACY_KERAS: it has imported TensorFlow before."""
    last = trained()["one"][-1]
    assert (last["keras"].split(".")[0], last["kind"]) == ("3", "keras")
