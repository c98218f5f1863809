"""When a run is as good as the dense one was in the end."""

import pytest
import time_to_accuracy
from trainings import DIGITS, TEXT, Run


def run(task, compressor, curve, seconds_per_step):
    history = {task.metric: curve, "seconds_per_step": [seconds_per_step] * len(curve)}
    record = {"history": history, "steps_per_epoch": 10}
    return Run(task, 2, "adam", compressor, 0, record)


def test_it_is_when_the_figure_is_reached_first():
    dense = run(TEXT, "no_compression", [4.0, 3.0, 2.5], 1.0)
    compressed = run(TEXT, "adacomp", [4.5, 2.4, 2.6, 2.3], 0.1)
    one, other = time_to_accuracy.compare([dense, compressed])
    assert (one["goal"], one["seconds"], one["times faster"]) == (2.5, pytest.approx(30), 1)
    assert (other["goal"], other["seconds"]) == (2.5, pytest.approx(2))
    assert other["times faster"] == pytest.approx(15)
    assert other["seconds of a step"] == pytest.approx(0.1)


def test_a_mean_over_the_last_epochs_may_be_reached_before_the_end():
    dense = run(DIGITS, "no_compression", [0.5, 0.9, 0.97, 0.96, 0.98, 0.97], 1.0)
    assert dense.quality == pytest.approx(95.6)
    assert time_to_accuracy.seconds_to(dense, dense.quality) == 30


def test_what_is_never_reached_is_said():
    dense, compressed = run(TEXT, "no_compression", [2.0], 1.0), run(TEXT, "top_k", [3.0, 2.1], 0.1)
    rows = time_to_accuracy.compare([dense, compressed])
    assert rows[1]["seconds"] is None
    assert "| top_k | 0 | 2.000 | never |  | 2.100 | 100.0 |" in time_to_accuracy.markdown("", rows)


def test_plot(tmp_path):
    runs = [run(TEXT, "no_compression", [4.0, 2.5], 1.0), run(TEXT, "adacomp", [3.0, 2.4], 0.1)]
    time_to_accuracy.plot(runs, "100 Mbit/s", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
