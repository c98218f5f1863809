"""Compressed training is no further behind dense training than it was when that was recorded."""

import evidence
from click.testing import CliRunner

from tf_gradcomp.adam import preconditioner


def test_adacomp_lags_no_more_than_it_did():
    done = CliRunner().invoke(evidence.main, ["--short"])
    assert done.exit_code == 0, done.output


def test_the_epsilon_that_once_cost_a_tenth_of_a_bit_is_seen(monkeypatch):
    """Then, the bias correction enlarged a small epsilon of Adam up to 30 times."""
    monkeypatch.setattr(preconditioner, "LARGEST_NOT_CORRECTED", 0.0)
    done = CliRunner().invoke(evidence.main, ["--short"])
    assert done.exit_code == 1
    assert "expected at most" in done.output
