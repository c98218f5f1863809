"""Benchmarks check all they need before hours of work begin."""

import convergence
import links
import network
import pytest
import time_to_accuracy
import trainings
from click.testing import CliRunner

PROGRAMS = {
    "convergence": (convergence.main, ["digits"], "convergence-digits.json"),
    "convergence, a run": (
        convergence.main,
        ["digits"],
        "convergence/digits-2workers-adam-no_compression-seed0.json",
    ),
    "convergence, the same number of workers twice": (
        convergence.main,
        ["digits", "--workers", "2", "--workers", "2"],
        "convergence/digits-2workers-adam-adacomp-seed1.json",
    ),
    "time to accuracy, a run": (
        time_to_accuracy.main,
        ["digits"],
        "time-to-accuracy/100mbit/digits-2workers-adam-no_compression-seed0.json",
    ),
    "time to accuracy, a curve": (
        time_to_accuracy.main,
        ["digits", "--seeds", "2"],
        "time-to-accuracy/curves/digits-2workers-adam-adacomp-seed1.json",
    ),
    "time to accuracy, local steps on a delayed link": (
        time_to_accuracy.main,
        ["digits", "--local-steps", "16", "--local-compressor", "top_k", "--delay", "20"],
        "time-to-accuracy/100mbit-20ms/digits-2workers-adam-top_k-16local-seed0.json",
    ),
    "network": (network.main, [], "tuned/network.json"),
    "time to accuracy": (
        time_to_accuracy.main,
        ["digits"],
        "time-to-accuracy-digits-adam-2workers.md",
    ),
}


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch):
    def run(*_, **__):
        raise AssertionError("it began")

    monkeypatch.setattr(links, "missing", lambda *_: "")
    monkeypatch.setattr(links, "network", run)
    monkeypatch.setattr(network.Bench, "run_all", run)
    monkeypatch.setattr(trainings.Bench, "run_all", run)


@pytest.mark.parametrize(("command", "args", "file"), PROGRAMS.values(), ids=PROGRAMS)
def test_earlier_results_are_refused(command, args, file, tmp_path):
    earlier = tmp_path / file
    earlier.parent.mkdir(parents=True, exist_ok=True)
    earlier.write_text("earlier")
    refused = CliRunner().invoke(command, [*args, "--results", str(tmp_path)])
    assert refused.exit_code == 2, refused.output
    assert "holds the results of an earlier run" in refused.output
    assert earlier.read_text() == "earlier"
    allowed = CliRunner().invoke(command, [*args, "--results", str(tmp_path), "--overwrite"])
    assert "it began" in str(allowed.exception)


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (convergence.main, "convergence/digits-2workers-adam-no_compression-seed0.json"),
        (
            time_to_accuracy.main,
            "time-to-accuracy/100mbit/digits-2workers-adam-no_compression-seed0.json",
        ),
    ],
)
def test_runs_that_are_reused_are_kept(command, file, tmp_path):
    earlier = tmp_path / file
    earlier.parent.mkdir(parents=True)
    earlier.write_text("earlier")
    result = CliRunner().invoke(command, ["digits", "--results", str(tmp_path), "--reuse"])
    assert "it began" in str(result.exception)
    assert earlier.read_text() == "earlier"


@pytest.mark.parametrize(
    ("command", "option"),
    [(convergence.main, "--compressor"), (time_to_accuracy.main, "-c")],
)
def test_unknown_compressors_are_refused(command, option, tmp_path):
    result = CliRunner().invoke(command, ["digits", option, "zip", "--results", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert "unknown name 'zip'" in " ".join(result.output.split())
