"""Compressed training is no further behind dense training than it was when that was recorded."""

import json
import statistics

import lag

RECORDED = json.loads(lag.FILE.read_text())
ALLOWED = 4 * statistics.stdev(RECORDED)  # bits; other texts and roundings are like other seeds


def test_adacomp_lags_no_more_than_it_did():
    assert ALLOWED < 0.1, "a lag of 0.1 bits would not be seen"
    measured = statistics.mean(lag.lag(seed) for seed in (0, 1))
    assert measured < statistics.mean(RECORDED) + ALLOWED
