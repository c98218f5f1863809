"""Slots for the next run of a job, after one of its workers has died."""

import pytest

from tf_gradcomp.launch import JobResult, Slots, WorkerEnd
from tf_gradcomp.launch.result import TRACEBACK

LOST = "UnavailableError: Socket closed"


def end(used, slot, *errors):
    """The end of a run; each error is the exception of one more worker."""
    failed = [WorkerEnd(used.index(slot), 1, 1.0, stderr_tail=(f"killed at {slot}",))]
    if errors:
        failed = [
            WorkerEnd(used.index(slot) + number, 1, 1.0, stderr_tail=(TRACEBACK, error))
            for number, error in enumerate(errors)
        ]
    return JobResult(tuple(failed))


def play(runs, number=3, least=1):
    """Returns the slots of each run as text; a star where another run would die as well.

    A run is "saved", or the slot of the worker that died first, with exceptions if it has any.
    """
    slots, used = Slots(number, least), list(range(number))
    history = []
    for run in runs:
        history.append("".join(map(str, used)))
        if run == "saved":
            slots.forgive(used)
        elif slots.blame(end(used, *run) if isinstance(run, tuple) else end(used, run), used)[1]:
            return [*history, "*"]
        used = slots.usable(range(number), used)
    return [*history, "".join(map(str, used))]


@pytest.mark.parametrize(
    ("runs", "slots"),
    [
        ([1, 1], ["012", "012", "02"]),
        ([1, 2, 1], ["012", "012", "012", "02"]),
        ([0, 0, 1, 1], ["012", "012", "12", "12", "2"]),
        ([1, "saved", 1, "saved"], ["012"] * 5),
        # It returns once the others have saved, and is left out at once if it dies again.
        ([1, 1, "saved", 1, "saved"], ["012", "012", "02", "012", "02", "012"]),
        # It has taken part in a save since.
        ([1, 1, "saved", "saved", 1], ["012", "012", "02", "012", "012", "012"]),
        # The last that is left.
        ([0, 0, 1, 1, 2, 2], ["012", "012", "12", "12", "2", "2", "*"]),
        # Nobody is to blame for what happens to several.
        ([(1, "ValueError: 1", "ValueError: 2")] * 2, ["012", "012", "*"]),
        ([(1, LOST)] * 2, ["012", "012", "*"]),
        # The chief's error follows to the next chief: it is the program's.
        (
            [(0, "OSError"), (0, "OSError"), (1, "OSError"), (1, "OSError")],
            ["012", "012", "12", "12", "*"],
        ),
        (
            [(0, "OSError"), (0, "OSError"), (1, "ValueError"), (1, "ValueError")],
            ["012", "012", "12", "12", "2"],
        ),
    ],
)
def test_a_slot_whose_worker_dies_again_and_again_is_left_out(runs, slots):
    assert play(runs) == slots


def test_no_fewer_workers_than_allowed_are_left():
    assert play([1, 1, 2, 2], least=2) == ["012", "012", "02", "02", "*"]


def test_without_fewer_workers_any_two_deaths_without_a_save_are_one_too_many():
    assert play([1, 2], least=3) == ["012", "012", "*"]


def test_the_end_to_report_is_the_first_of_its_kind():
    slots, used = Slots(2, 2), [0, 1]
    ends = [end(used, slot) for slot in (1, 0)]
    assert slots.blame(ends[0], used) == (None, None)
    assert slots.blame(ends[1], used) == (None, ends[0])


def test_workers_of_hosts_that_are_away_do_not_take_part():
    slots = Slots(4, 1)
    assert slots.usable([0, 3], [0, 1, 2, 3]) == [0, 3]
    for _ in range(2):
        slots.blame(end([0, 3], 3), [0, 3])
    assert slots.usable([0, 1, 3], [0, 3]) == [0, 1]


def test_the_program_is_not_to_blame_for_the_loss_of_hosts():
    slots, used = Slots(4, 1), [0, 1, 2, 3]
    for present in ([0, 1, 2], [0, 1], [0, 1]):  # hosts are lost after two runs of three
        assert slots.blame(end(used, used[-1], LOST), used) == (None, None)
        used = slots.usable(present, used)
    assert slots.blame(end(used, 1, LOST), used)[1] is not None
