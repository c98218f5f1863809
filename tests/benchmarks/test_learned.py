"""Tests the figures of benchmarks/learned.py for LGC and the methods it is compared with."""

import json

import learned
import pytest
from click.testing import CliRunner


def test_rows_tell_the_end_of_a_run_from_the_whole_of_it(tmp_path):
    few = ["--seeds", "1", "--learners", "2", "--epochs", "1", "--results", str(tmp_path)]
    phases = ["--dense-steps", "4", "--training-steps", "4"]
    methods = ["--method", "dense", "--method", "LGC, all_reduce"]
    ran = CliRunner().invoke(learned.main, [*few, *phases, *methods], catch_exceptions=False)
    dense, lgc = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [dense["last ratio"], dense["whole ratio"]] == pytest.approx([1, 1], rel=1e-4)
    assert lgc["steps"] == 22
    assert lgc["last ratio"] > 50
    assert 1 < lgc["whole ratio"] < 22 / 4
    assert (tmp_path / "table.md").read_text() in ran.output
    assert (tmp_path / "over-bytes.png").stat().st_size > 5_000


def test_a_method_that_is_not_there_is_refused_with_the_names_of_all():
    ran = CliRunner().invoke(learned.main, ["--method", "LGC"])
    assert ran.exit_code == 2
    assert "LGC; expected some of dense, ScaleCom, 32 bits" in ran.output


@pytest.mark.parametrize(
    ("workload", "kernels"),
    [
        ("digits", ["sequential/conv2d/kernel"]),
        ("resnet", [f"{name}/kernel" for name in ("conv2d", "conv2d_9", "dense")]),
        ("text", []),
    ],
)
def test_scalecom_sends_dense_what_lgc_does(workload, kernels):
    settings = learned.Settings(workload, 1, 0.01, 4, 4, 0.5, 0)
    paths = learned.dense_paths(settings)
    assert [path for path in paths if path.endswith("/kernel")] == kernels
    scalecom = learned.methods(settings)["ScaleCom, 8 bits"]
    assert len(scalecom.get_config()["overrides"]) == len(paths)
