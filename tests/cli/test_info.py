"""Tests `gradcomp info`, in a separate process if it needs the real TensorFlow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import tf_gradcomp
from tf_gradcomp.cli import info
from tf_gradcomp.cli.main import main
from tf_gradcomp.ops import library


@pytest.fixture
def run_info(monkeypatch):
    """Runs `gradcomp info` in this process."""
    # It quiets TensorFlow through the environment; that shall not outlive the test.
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return lambda *options: CliRunner().invoke(main, ["info", *options])


def rows(output):
    """The table as a dict."""
    split = ((line[:14].strip(), line[14:]) for line in output.splitlines())
    return {name: value for name, value in split if name}


def test_it_can_be_read_by_a_program(run_info, monkeypatch):
    found = json.loads(run_info("--json").output)
    assert found["tf_gradcomp"] == tf_gradcomp.__version__
    assert found["problems"] == []
    monkeypatch.setenv("TF_CONFIG", "{")
    broken = run_info("--json")
    assert broken.exit_code == 1
    assert "not valid JSON" in json.loads(broken.output)["problems"][0]


def test_all_is_well():
    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"} | {
        "PYTHONPATH": str(Path(tf_gradcomp.__file__).parents[1]),
        "COLUMNS": "200",
    }
    code = "from tf_gradcomp.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "info"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    shown = rows(done.stdout)
    import tensorflow as tf

    assert shown["tf_gradcomp"] == tf_gradcomp.__version__
    assert shown["TensorFlow"] == f"{tf.__version__} (supported)"
    assert shown["built for"].split(".")[:2] == ["TensorFlow 2", tf.__version__.split(".")[1]]
    assert shown["op library"] == str(library.PATH)
    assert shown["kernels"].split()[0] == library.library_info().simd.split()[0]
    assert done.stdout.splitlines()[-1].startswith("OK: tf_gradcomp trains with this TensorFlow")
    assert shown["TF_CONFIG"] == "not set: one worker"
    assert {
        "Keras",
        "NumPy",
        "Python",
        "platform",
        "GPUs",
        "Horovod",
    } <= shown.keys()


def test_horovod_that_cannot_be_loaded_is_a_problem(run_info, monkeypatch, tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise OSError('undefined symbol')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    done = run_info()
    assert done.exit_code == 1
    assert rows(done.output)["Horovod"] == "cannot be imported"
    assert "undefined symbol. Build Horovod for the installed TensorFlow" in done.output


def fake_library(error, built_for, simd=None):
    path = Path("/somewhere/[red]ops.so")
    return lambda: library.LibraryInfo(path, built_for, simd, ("x86_64", "avx2"), error)


def test_a_missing_library_does_not_hide_the_rest(run_info, monkeypatch):
    monkeypatch.setattr(library, "library_info", fake_library("Not built. Run: pip x", None))
    done = run_info()
    assert done.exit_code == 1
    assert "gradcomp: Not built. Run: pip x\n" in done.stderr
    shown = rows(done.stdout)
    assert shown["op library"] == "/somewhere/[red]ops.so"
    assert shown["built for"] == "TensorFlow - (not built)"
    assert shown["kernels"] == "cannot be loaded (this CPU: x86_64 avx2)"
    assert done.stdout.splitlines()[-1].startswith("Not OK: 1 of these")
    assert shown["TF_CONFIG"] == "not set: one worker"


def test_paths_are_never_cut_off(run_info, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert str(library.PATH) in run_info().stdout.split("\n")[5:][1]


def test_an_unsupported_tensorflow(run_info, monkeypatch):
    monkeypatch.setattr("tensorflow.__version__", "2.22.0rc1")
    done = run_info()
    assert done.exit_code == 1
    assert rows(done.stdout)["TensorFlow"].startswith("2.22.0rc1 (not supported")
    assert (
        "TensorFlow 2.22.0rc1 is not supported: install 2.17 to 2.21, or 2.15 with Keras 2."
        in done.stderr
    )


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        *(("2.14.1", False), ("2.15.1", True), ("2.16.2", False), ("2.17.0", True)),
        *(("2.21.0", True), ("2.22.0-rc0", False), ("3.0", False)),
    ],
)
def test_the_supported_versions(version, supported):
    assert info.is_supported(version) is supported


def test_no_tensorflow(run_info, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    done = run_info()
    assert done.exit_code == 1
    assert "TensorFlow cannot be imported: install tensorflow or tensorflow-cpu" in done.stderr
    assert rows(done.stdout)["TF_CONFIG"] == "not set: one worker"


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (
            library.GpuInfo("", 0, "there is no CUDA driver"),
            " (gradients are copied to the host for the exchange: there is no CUDA driver)",
        ),
        (
            library.GpuInfo("A GPU", 90, ""),
            f", A GPU, sm_90 (runs {', '.join(info._methods_on_gpus())} and, for all methods, "
            "the division by second moments; its kernels agree with the CPU's)",
        ),
    ],
)
def test_gpus_are_listed_with_what_happens_on_them(run_info, monkeypatch, found, shown):
    class Gpu:
        name = "/physical_device:GPU:0"

    monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: [Gpu])
    monkeypatch.setattr(library, "gpu_info", [found].__getitem__)
    assert rows(run_info().stdout)["GPU"] == Gpu.name + shown


def test_tf_config_is_described(run_info, monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    for task, says in (
        ({"type": "chief", "index": 0}, "chief 0, the chief of chief: a:1; worker: b:1, c:1"),
        ({"type": "worker", "index": 1}, "worker 1 of chief: a:1; worker: b:1, c:1"),
    ):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
        done = run_info()
        assert done.exit_code == 0
        assert rows(done.stdout)["TF_CONFIG"] == says


def test_a_wrong_tf_config_is_a_problem(run_info, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    done = run_info()
    assert done.exit_code == 1
    assert rows(done.stdout)["TF_CONFIG"] == "wrong"
    assert "gradcomp: TF_CONFIG is not valid JSON" in done.stderr
