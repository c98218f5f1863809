"""The network benchmark as a whole, on the loopback and, as root, on a shaped link."""

import json
import math
import os
import subprocess
import sys

import keras
import links
import network
import network_report
import pytest
import turns

from tests.benchmarks.conftest import BENCHMARKS
from tests.workers import PYTHON, python_path, server

WHY_NOT = links.missing()


def measure(folder, *options, python=(sys.executable,)):
    command = [*python, str(BENCHMARKS / "network.py"), *options, "--results", str(folder)]
    quick = ["--rounds", "1", "--seconds", "0.1", "--warm-up", "10", "--malloc", "default"]
    done = subprocess.run(
        [*command, *quick],
        env={**os.environ, "PYTHONPATH": python_path(), "PRELOADED": server(0)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads((folder / "default" / "network.json").read_text())
    rows = {row.name: row for row in network_report.rows(measured["records"])}
    assert (folder / "default" / "network.md").read_text() in done.stdout
    return measured, rows, done.stdout


def test_on_the_loopback(tmp_path):
    some = ("adacomp", turns.GOSSIP, turns.HOROVOD_ADACOMP)
    few = [option for name in some for option in ("--contender", name)]
    options = ["--loopback", "--job", "mlp", "--workers", "2", *few]
    measured, rows, said = measure(tmp_path, *options, python=PYTHON)
    assert {record["link"] for record in measured["records"]} == {links.LOOPBACK}
    pairs = {"adacomp": turns.ALL_REDUCE, turns.GOSSIP: turns.ALL_REDUCE}
    if network.version("horovod.tensorflow"):
        pairs[turns.HOROVOD_ADACOMP] = turns.HOROVOD_ALL_REDUCE
    assert set(rows) == {*pairs, *pairs.values()}
    for sparse, dense in pairs.items():
        assert rows[sparse].counted < rows[dense].counted / 10
    assert all(math.isfinite(row.median) and row.page_faults >= 0 for row in rows.values())
    assert " has no PyTorch" in said or network.version("torch.distributed")


@pytest.mark.alone
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_on_a_shaped_link(tmp_path):
    few = (turns.ALL_REDUCE, "cast", "adacomp", turns.NOTHING)
    measured, rows, _ = measure(
        tmp_path,
        *("--job", "mlp", "--workers", "2", "--link", "100 Mbit/s"),
        *(option for name in few for option in ("--contender", name)),
    )
    dense = rows[turns.ALL_REDUCE]
    assert 0.5 < 8e-3 * dense.counted / dense.median / measured["raw"][0]["Mbit/s"] < 1.5
    assert dense.agrees
    assert rows["cast"].agrees
    assert 1.2 < rows["cast"].speed_up < 3
    assert rows["adacomp"].speed_up > 5
    parts = network_report.split(measured["records"])
    assert parts["adacomp"]["encode"] > 0
    assert (tmp_path / "default" / "network-split-mlp-2workers.png").exists()


def test_cells_can_be_chosen():
    (cell,) = network.chosen(
        network.FULL,
        only_jobs=["mlp"],
        only_workers=[2],
        only_links=["1 Gbit/s"],
        frameworks=[turns.TENSORFLOW_NAME],
    )
    assert (cell.job, cell.links) == ("mlp", ["1 Gbit/s"])
    assert tuple(cell.contenders) == (*network.EVERYONE, turns.GOSSIP)
    assert list(cell.by_framework) == [turns.TENSORFLOW_NAME]
    some = network.chosen(network.FULL, only_jobs=["lstm"], only_contenders=["power_sgd"])
    assert {tuple(cell.contenders) for cell in some} == {(turns.ALL_REDUCE, "power_sgd")}
    whole = network.chosen(network.FULL)
    assert [cell.job for cell in whole] == [cell.job for cell in network.FULL]
    assert whole[0].by_framework[turns.TORCH_NAME] == list(turns.TORCH)
    assert whole[0].by_framework[turns.HOROVOD_NAME] == list(turns.HOROVOD)
    assert {tuple(cell.links) for cell in network.chosen(network.SHORT, shaped=False)} == {
        (links.LOOPBACK,)
    }


def test_a_python_without_pytorch_is_found_out(tmp_path):
    assert network.version("torch.distributed", "/bin/false") == ""
    assert network.version("torch.distributed", str(tmp_path / "python")) == ""
    assert network.version("no_such_module") == ""


def test_pytorch_is_given_the_shapes_that_keras_has():
    model = keras.applications.ResNet50(weights=None)
    shapes = sorted(tuple(variable.shape) for variable in model.trainable_variables)
    assert sorted(turns.resnet50_shapes()) == shapes
