"""Compares predictions on links of known speed with measurements of the same run."""

import json
import sys

import links
import network_report
import placed
import pytest
import turns
from turns import Plan

from tests.benchmarks.conftest import BENCHMARKS

WHY_NOT = links.missing()
LINK = "100 Mbit/s"
DENSE, SPARSE = "no_compression", "adacomp"
CONTENDERS = (turns.ALL_REDUCE, DENSE, "cast", SPARSE, "auto", turns.NOTHING)
pytestmark = pytest.mark.alone
NOISE = 2  # the machine may be busy: on a quiet one predictions are nearer, see benchmarks/


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """By contender."""
    output = tmp_path_factory.mktemp("network") / "measured.json"
    lines = []
    with links.network(2) as network:
        plan = Plan(turns.LSTM, CONTENDERS, (LINK,), network, 2, 0.1, 5, str(output))
        command = [
            sys.executable,
            str(BENCHMARKS / turns.BACKENDS[turns.TENSORFLOW_NAME]),
            plan.to_text(),
        ]
        with placed.placed_job(command, network, 1, lambda *line: lines.append(line)) as job:
            result = job.run()
    assert result.exit_code == 0, lines
    records = json.loads(output.read_text())
    return {row.name: row for row in network_report.rows(records)}


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("method", [DENSE, "cast"])
def test_a_step_that_the_network_dominates_takes_as_long_as_predicted(rows, method):
    row = rows[method]
    assert 1 / NOISE < row.predicted / row.median < NOISE


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_the_choice_is_sparse_where_that_is_many_times_faster(rows):
    auto, dense = rows["auto"], rows[DENSE]
    assert rows[SPARSE].predicted < dense.predicted
    assert auto.counted < dense.counted / 10
    assert auto.median < dense.median
