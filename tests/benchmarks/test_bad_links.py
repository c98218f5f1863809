"""Tests a real job on a bad link."""

import bad_links
import links
import pytest
from bad_links import Case

WHY_NOT = links.missing(delay=0.001)


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_job_trains_on_after_loss_delay_and_a_cut():
    outcome = bad_links.endure(Case(loss=0.01, delay=0.005, cut=5.0, timeout=60.0), watched=1.0)
    assert outcome.faults == []
    assert outcome.ends == []
    assert outcome.survived
    assert outcome.resumed_after is not None
