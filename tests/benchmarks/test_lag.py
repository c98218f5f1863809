"""Compressed training is no further behind dense training than it was when that was recorded."""

import json

import lag


def test_no_method_lags_more_than_it_did():
    recorded = json.loads(lag.FILE.read_text())
    assert lag.too_late(lag.lags(seed=0), recorded) == []


def test_a_lag_of_a_tenth_of_a_bit_is_a_fault():
    recorded = json.loads(lag.FILE.read_text())
    assert set(recorded) == set(lag.METHODS)
    for method, of_seeds in recorded.items():
        assert lag.too_late({method: min(of_seeds) + 0.1}, recorded), method
        assert not lag.too_late({method: max(of_seeds)}, recorded), method
    assert lag.too_late({method: float("nan")}, recorded)
