"""Compressed training is no further behind dense training than it was when that was recorded."""

import evidence
import lag
from click.testing import CliRunner


def test_a_lag_of_a_tenth_of_a_bit_is_seen():
    assert lag.limit() < 0.1


def test_adacomp_lags_no_more_than_it_did():
    done = CliRunner().invoke(evidence.main, ["--short"])
    assert done.exit_code == 0, done.output


def test_a_larger_lag_is_refused(monkeypatch):
    monkeypatch.setattr(lag, "lag", lambda seed: lag.limit() + 0.01)
    done = CliRunner().invoke(evidence.main, ["--short"])
    assert done.exit_code == 1
    assert "expected at most" in done.output
