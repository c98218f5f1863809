"""Tests a real job on a bad link, and the table of outcomes."""

import bad_links
import links
import pytest
from bad_links import Case, Outcome

from tf_gradcomp.launch import WorkerEnd

WHY_NOT = links.missing(delay=0.001)


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_job_trains_on_after_loss_delay_and_a_cut():
    outcome = bad_links.endure(Case(loss=0.01, delay=0.005, cut=5.0, timeout=60.0), watched=1.0)
    assert outcome.faults == []
    assert outcome.ends == []
    assert outcome.survived
    assert outcome.resumed_after is not None


def test_the_table_has_the_outcomes():
    ends = [WorkerEnd(0, 1, 80.0, stderr_tail=("ValueError: a",)), WorkerEnd(1, 1, 81.0)]
    outcomes = [
        Outcome(Case(loss=0.05)),
        Outcome(Case(delay=0.02, cut=5), resumed_after=1.2),
        Outcome(Case(cut=60, timeout=30), ends=ends, ended_after=45.2),
        Outcome(Case(cut=60), faults=["1 workers hang"]),
    ]
    assert bad_links.markdown(outcomes).splitlines()[2:] == [
        "| 5 % loss | 60 s | trains on |",
        "| 20 ms of delay, a cut of 5 s | 60 s | trains on, 1 s after the cut |",
        "| a cut of 60 s | 30 s | all workers end, after 45 s |",
        "| a cut of 60 s | 60 s | 1 workers hang |",
    ]
