"""The heartbeat timeout: who says it, and what is refused."""

import pytest

from tf_gradcomp.strategy.heartbeat import DEFAULT, heartbeat_timeout

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("given", "environment", "seconds"),
    [(None, None, DEFAULT), (None, "90", 90), (15, "90", 15)],
)
def test_the_argument_goes_before_the_environment(monkeypatch, given, environment, seconds):
    monkeypatch.delenv("GRADCOMP_HEARTBEAT_TIMEOUT", raising=False)
    if environment is not None:
        monkeypatch.setenv("GRADCOMP_HEARTBEAT_TIMEOUT", environment)
    assert heartbeat_timeout(given) == seconds


@pytest.mark.parametrize("value", [0, 0.5, -3, "soon", float("inf"), float("nan")])
def test_what_is_no_time_is_refused(monkeypatch, value):
    with pytest.raises(ValueError, match="heartbeat_timeout="):
        heartbeat_timeout(value)
    monkeypatch.setenv("GRADCOMP_HEARTBEAT_TIMEOUT", str(value))
    with pytest.raises(ValueError, match="received GRADCOMP_HEARTBEAT_TIMEOUT="):
        heartbeat_timeout(None)
