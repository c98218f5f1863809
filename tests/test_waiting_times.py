"""Tests the waiting times of workers: their sources, and refused values."""

import pytest

from tf_gradcomp.groups.stalls import (
    HEARTBEATS,
    STALLS,
    STARTS,
    heartbeat_timeout,
    stall_after,
    start_timeout,
)

pytestmark = pytest.mark.quick
TIMES = [
    (heartbeat_timeout, "GRADCOMP_HEARTBEAT_TIMEOUT", HEARTBEATS),
    (stall_after, "GRADCOMP_STALL_AFTER", STALLS),
]


@pytest.mark.parametrize(("time", "variable", "default"), TIMES)
def test_the_argument_goes_before_the_environment(monkeypatch, time, variable, default):
    monkeypatch.delenv(variable, raising=False)
    assert time(None) == default
    monkeypatch.setenv(variable, "90")
    assert (time(None), time(15)) == (90, 15)


@pytest.mark.parametrize(("time", "variable", "default"), TIMES)
@pytest.mark.parametrize("value", [0.5, -3, "soon", float("inf"), float("nan")])
def test_invalid_times_are_refused(monkeypatch, time, variable, default, value):
    with pytest.raises(ValueError, match=f"{time.__name__}="):
        time(value)
    monkeypatch.setenv(variable, str(value))
    with pytest.raises(ValueError, match=f"received {variable}="):
        time(None)


def test_the_time_in_which_workers_must_have_started_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("GRADCOMP_START_TIMEOUT", raising=False)
    assert start_timeout() == STARTS
    monkeypatch.setenv("GRADCOMP_START_TIMEOUT", "90")
    assert start_timeout() == 90
    monkeypatch.setenv("GRADCOMP_START_TIMEOUT", "0")
    with pytest.raises(ValueError, match="received GRADCOMP_START_TIMEOUT='0'"):
        start_timeout()


def test_only_reports_can_be_switched_off():
    assert stall_after(0) == 0
    with pytest.raises(ValueError, match="at least 1 second; received heartbeat_timeout=0"):
        heartbeat_timeout(0)
