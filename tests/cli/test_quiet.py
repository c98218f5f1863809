"""Tests which lines of workers are shown, when tracebacks come in any order and with pauses."""

import types

import pytest

from tf_gradcomp.launch.quiet import Quiet

TRACEBACK = "Traceback (most recent call last):"
LOST = [TRACEBACK, '  File "train.py", line 3', "OSError: lost worker 2"]
FULL = [TRACEBACK, '  File "train.py", line 1', "OSError: disk full"]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until the test sets it."""
    clock = types.SimpleNamespace(now=0.0)
    time = types.SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("tf_gradcomp.launch.quiet.time", time)
    return clock


def shown_now(quiet, worker, lines):
    return [line for line in lines if quiet.shows(worker, line)]


def test_an_error_of_several_workers_is_shown_once_after_another_error(clock):
    quiet = Quiet(3)
    assert shown_now(quiet, 2, FULL) == FULL
    assert shown_now(quiet, 0, LOST) == []
    clock.now = 2.0
    assert list(quiet.due()) == [(0, line) for line in LOST]
    assert shown_now(quiet, 1, LOST) == []
    assert list(quiet.due(all_ended=True)) == [(None, "the same error on worker 1 as on worker 0.")]


def test_a_traceback_is_compared_when_it_has_come_to_its_error(clock):
    quiet = Quiet(3)
    assert shown_now(quiet, 0, LOST[:1]) == LOST[:1]
    assert shown_now(quiet, 1, LOST) == []
    clock.now = 2.0  # worker 0 is paused, and the traceback that it shows is not complete
    assert list(quiet.due()) == []
    assert shown_now(quiet, 0, LOST[1:]) == LOST[1:]
    assert shown_now(quiet, 2, LOST[:2]) == []
    clock.now = 4.0  # worker 2 is paused
    assert list(quiet.due()) == []
    assert shown_now(quiet, 2, LOST[2:]) == []
    assert list(quiet.due()) == []
    clock.now = 5.0
    assert list(quiet.due()) == []  # more lines may follow
    clock.now = 5.5
    assert list(quiet.due()) == [(None, "the same error on all workers.")]


def test_an_incomplete_traceback_is_not_held_back_for_long(clock):
    quiet = Quiet(2)
    shown_now(quiet, 0, FULL)
    shown_now(quiet, 1, LOST[:2])
    clock.now = 6.0
    assert list(quiet.due()) == [(1, line) for line in LOST[:2]]
    assert quiet.shows(1, LOST[2])


def test_a_worker_may_have_an_error_again(clock):
    quiet = Quiet(2)
    shown_now(quiet, 0, FULL)
    for now in (2.0, 4.0):
        shown_now(quiet, 1, LOST)
        clock.now = now
        assert list(quiet.due()) == [(1, line) for line in LOST]


TERM = "W0000 00:00:1.2   22 preemption_notifier.cc:90] SIGTERM caught at 2026-11-29T08:07"
FRAME = '  File "fit.py", line 11, in <module>'
GONE = (
    "tensorflow.python.framework.errors_impl.UnavailableError: Collective ops is aborted by: Socket"
)
INTERRUPTIONS = {
    "the interruption": [TRACEBACK, FRAME, "KeyboardInterrupt"],
    "TensorFlow's log follows": [TRACEBACK, FRAME, "KeyboardInterrupt", TERM],
    "an open scope": [
        *[TRACEBACK, FRAME, "^^^^^^^^^^"],
        *["RuntimeError: Improper nesting of variable_scope.", TERM],
    ],
    "in a collective": [
        *[TRACEBACK, FRAME, "    ^^^^"],
        "RuntimeError: pybind11::error_already_set: ORIGINAL X REPLACED BY KeyboardInterrupt: <E>",
        *["", "At:", "  core.py(42): __init__", ""],
    ],
    "another worker has ended": [
        *[TRACEBACK, FRAME, GONE, "Additional GRPC error information from remote target:"],
    ],
}
ERRORS = {
    "in the clean-up": [
        *[TRACEBACK, FRAME, "KeyboardInterrupt", "During handling of the above exception, another"],
        *[TRACEBACK, FRAME, "OSError: disk full"],
    ],
    "of the program": [TRACEBACK, FRAME, "OSError: disk full", TERM],
    "a line of the program": [TRACEBACK, FRAME, "KeyboardInterrupt", "saved half of it"],
}


@pytest.mark.parametrize("name", [*INTERRUPTIONS, *ERRORS])
def test_of_a_stopped_job_only_errors_with_another_cause_are_shown(clock, name):
    quiet = Quiet(2)
    quiet.stopped = True
    lines = INTERRUPTIONS.get(name) or ERRORS[name]
    assert shown_now(quiet, 1, lines) == []
    shown = [(1, line) for line in lines] if name in ERRORS else []
    assert list(quiet.due(all_ended=True)) == shown
