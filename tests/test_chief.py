"""Tests `gc.is_chief` and the paths of workers: each job has one chief, in any kind of cluster."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.workers import run_workers

WORKERS = {"worker": ["a:1", "b:1", "c:1"]}
WITH_CHIEF = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "evaluator": ["d:1"], "ps": ["e:1"]}
EVERY_TASK = [
    (WORKERS, "worker", 0, True),
    (WORKERS, "worker", 1, False),
    (WORKERS, "worker", 2, False),
    (WITH_CHIEF, "chief", 0, True),
    (WITH_CHIEF, "worker", 0, False),
    (WITH_CHIEF, "worker", 1, False),
    (WITH_CHIEF, "evaluator", 0, False),
    (WITH_CHIEF, "ps", 0, False),
]
every_task = pytest.mark.parametrize(("cluster", "task_type", "index", "chief"), EVERY_TASK)


def strategy_of(cluster, task_type, index):
    """A strategy whose cluster is not in TF_CONFIG; its own constructor would connect to it."""
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    strategy.extended._cluster_resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type=task_type, task_id=index
    )
    return strategy


def set_tf_config(monkeypatch, cluster, task_type, index):
    text = json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})
    monkeypatch.setenv("TF_CONFIG", text)


@every_task
def test_the_strategy_determines_the_chief(cluster, task_type, index, chief):
    strategy = strategy_of(cluster, task_type, index)
    assert gc.is_chief(strategy) == chief
    assert gc.is_chief()
    with strategy.scope():
        assert gc.is_chief() == chief


@every_task
def test_tf_config_determines_the_chief(monkeypatch, cluster, task_type, index, chief):
    set_tf_config(monkeypatch, cluster, task_type, index)
    assert gc.is_chief() == chief
    assert gc.is_chief(tf.distribute.OneDeviceStrategy("CPU:0")) == chief


def test_the_strategy_goes_ahead_of_tf_config(monkeypatch):
    set_tf_config(monkeypatch, WORKERS, "worker", 2)
    assert gc.is_chief(strategy_of(WORKERS, "worker", 0))


def test_a_process_without_a_cluster_is_chief():
    assert gc.is_chief()
    assert gc.is_chief(gc.MultiWorkerMirroredStrategy())


@pytest.mark.parametrize(
    ("cluster", "task_type", "index", "folder"),
    [
        (WORKERS, "worker", 0, "."),
        (WORKERS, "worker", 1, "worker-1"),
        (WITH_CHIEF, "chief", 0, "."),
        (WITH_CHIEF, "worker", 0, "worker-0"),
        (WITH_CHIEF, "evaluator", 0, "evaluator-0"),
    ],
)
def test_paths_differ_where_the_strategy_knows_the_cluster(
    tmp_path, cluster, task_type, index, folder
):
    strategy = strategy_of(cluster, task_type, index)
    expected = str(tmp_path / folder / "model.keras")
    assert gc.worker_path(tmp_path / "model.keras", strategy) == expected
    with strategy.scope():
        assert gc.worker_path(tmp_path / "model.keras") == expected


def test_paths_may_be_urls_and_folders():
    strategy = strategy_of(WORKERS, "worker", 1)
    expected = "ram://bucket/runs/worker-1/model.keras"
    assert gc.worker_path("ram://bucket/runs/model.keras", strategy) == expected
    assert tf.io.gfile.isdir("ram://bucket/runs/worker-1")
    assert gc.worker_path("ram://bucket/logs/", strategy) == "ram://bucket/worker-1/logs"


def test_a_backup_has_one_folder_for_all_workers(tmp_path):
    with strategy_of(WORKERS, "worker", 1).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    backup = gc.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
    model.fit(tf.ones((4, 2)), tf.ones((4, 1)), verbose=0, callbacks=[backup])
    saved = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.weights.h5"))
    assert saved == [Path("backup", "latest.weights.h5")]


# The launcher makes workers only; the first of them becomes the chief here.
WITH_A_CHIEF = """
    import json, os, runpy, sys

    config = json.loads(os.environ["TF_CONFIG"])
    first, *others = config["cluster"]["worker"]
    index = config["task"]["index"]
    task = {"type": "worker", "index": index - 1} if index else {"type": "chief", "index": 0}
    config = {"cluster": {"chief": [first], "worker": others}, "task": task}
    os.environ["TF_CONFIG"] = json.dumps(config)

    program, folder = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(program))
    history = os.path.join(folder, f"{task['type']}.json")
    sys.argv = [program, "--epochs", "1", "--batch-size", "256", "--history", history]
    runpy.run_path(program, run_name="__main__")
"""


def test_of_a_chief_and_a_worker_the_chief_alone_prints_and_writes(tmp_path):
    program = Path(__file__).resolve().parents[1] / "benchmarks" / "programs" / "digits_cnn.py"
    chief, worker = run_workers(WITH_A_CHIEF, args=[program, tmp_path])
    assert [path.name for path in tmp_path.iterdir()] == ["chief.json"]
    for line in ("Payload of one exchange", "Test accuracy"):
        assert line in chief.stdout
        assert line not in worker.stdout
