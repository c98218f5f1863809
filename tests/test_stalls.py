"""When a watchdog reports, and what: with a board in this process in place of the service."""

import logging
import socket

import pytest

from tf_gradcomp.groups.progress import Progress
from tf_gradcomp.groups.stalls import ServiceBoard, Watchdog

pytestmark = pytest.mark.quick
LOOKS = 10  # of a stall; two more until the report


class FakeBoard(ServiceBoard):
    def __init__(self, addresses):
        super().__init__(addresses, heartbeat_timeout=60)
        self.told = {}
        self.answers = True

    def tell(self, worker, told):
        if not self.answers:
            raise TimeoutError
        self.told[worker] = told

    def read(self, worker, seconds):
        return self.told.get(worker)


class Workers:
    """Three workers; `look` has all of them look, but those that are paused."""

    def __init__(self, addresses):
        self.board = FakeBoard(addresses)
        self.names = [f"Worker {i} ({address})" for i, address in enumerate(addresses)]
        self.progress = [Progress() for _ in addresses]
        self.seconds = 0
        self.dogs = [
            Watchdog(progress, number, self.names, 30, self.board, lambda: self.seconds)
            for number, progress in enumerate(self.progress)
        ]

    def turn(self, *numbers):
        for number in numbers:
            self.progress[number].turn([])

    def look(self, times, paused=()):
        for _ in range(times):
            self.seconds += 3
            for number, dog in enumerate(self.dogs):
                if number not in paused:
                    dog.look()


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def workers(listening, caplog):
    caplog.set_level(logging.INFO, "tf_gradcomp")
    logging.getLogger("tf_gradcomp").propagate = True
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{bound.getsockname()[1]}"
        yield Workers([listening, listening, nobody])


def said(caplog):
    texts = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return texts


def test_each_worker_that_waits_reports_once_which_has_not_arrived(workers, caplog):
    for progress in workers.progress:
        progress.step(())
    workers.look(1)
    workers.turn(0, 2)
    workers.look(LOOKS + 2)
    assert said(caplog) == []  # the first of these looks saw the worker move
    workers.look(1)
    one = "Waiting for 30 seconds, in step 1. %s has not arrived: it runs, in step 1."
    assert said(caplog) == [one % workers.names[1]] * 2
    workers.look(50)
    assert said(caplog) == []
    workers.turn(1)  # it has come: all go on
    workers.turn(0, 1, 2)
    workers.look(1)
    assert said(caplog) == ["Goes on, after 186 seconds."] * 2


def test_a_worker_that_arrives_late_is_not_reported(workers, caplog):
    workers.turn(0)
    workers.look(LOOKS)
    workers.turn(2)
    workers.look(3)
    (text,) = said(caplog)
    assert "Worker 1" in text
    assert "Worker 2" not in text


@pytest.mark.parametrize(
    ("paused", "state"),
    [
        (1, "its process is there but does not answer, so it is paused or blocked"),
        (2, "its process has ended"),
    ],
)
def test_a_pause_is_told_from_a_crash(workers, caplog, paused, state):
    workers.turn(0)
    workers.turn(3 - paused)
    workers.look(LOOKS + 3, paused=[paused])
    name = workers.names[paused]
    lost = "After 60 seconds of silence it is lost, and the job ends."
    text = f"Waiting for 30 seconds, before the first step. {name} has not arrived: {state}. {lost}"
    assert said(caplog) == [text] * 2


def test_without_the_service_only_its_worker_is_named(workers, caplog):
    workers.turn(1)
    workers.board.answers = False
    workers.look(LOOKS + 3, paused=[0])
    (text,) = said(caplog)
    assert "Worker 0" in text
    assert "paused or blocked" in text
    assert "Worker 2" not in text


def test_a_service_that_answers_late_accuses_nobody_who_runs(workers, caplog):
    workers.turn(0, 2)
    workers.board.answers = False
    workers.look(1)
    workers.look(LOOKS - 1, paused=[0, 1, 2])
    workers.board.answers = True
    workers.look(LOOKS + 3)
    texts = said(caplog)
    assert len(texts) == 2
    assert all("Worker 1" in text and "it runs" in text for text in texts)


def test_a_slow_network_is_reported_once_for_all_steps(workers, caplog):
    for _ in range(3):
        workers.turn(0, 1, 2)
        workers.look(LOOKS + 3)
        workers.turn(0, 1, 2)
        workers.look(1)
    texts = [text for text in said(caplog) if "Goes on" not in text]
    wanted = "All workers have arrived: the network is slow or cut."
    assert texts == [f"Waiting for 30 seconds, before the first step. {wanted}"] * 3


def test_a_long_step_without_a_collective_is_no_stall(workers, caplog):
    workers.look(10 * LOOKS)
    assert said(caplog) == []


def test_a_worker_that_was_paused_itself_accuses_nobody(workers, caplog):
    workers.turn(0, 2)
    workers.look(LOOKS - 1, paused=[0])
    workers.turn(1)
    workers.look(1)
    workers.turn(0, 1, 2)
    workers.look(LOOKS)
    assert said(caplog) == []
