"""The reports of watchdogs, with a store in this process in place of TensorFlow's service."""

import logging
import socket

import pytest

from tf_gradcomp.groups.stalls import CoordinationStore, Progress, Watchdog

pytestmark = pytest.mark.quick
LOOKS = 10  # until a wait is a stall; the report follows after two more looks


class FakeStore(CoordinationStore):
    def __init__(self, addresses):
        super().__init__(addresses, heartbeat_timeout=60)
        self.reports = {}
        self.answers = True

    def post(self, worker, report):
        if not self.answers:
            raise TimeoutError
        self.reports[worker] = report

    def read(self, worker, seconds):
        return self.reports.get(worker)


class Workers:
    """Three workers; `look` has all of them look, except paused workers."""

    def __init__(self, addresses):
        self.store = FakeStore(addresses)
        self.names = [f"Worker {i} ({address})" for i, address in enumerate(addresses)]
        self.progress = [Progress() for _ in addresses]
        self.seconds = 0
        self.dogs = [
            Watchdog(progress, index, self.names, 30, self.store, lambda: self.seconds)
            for index, progress in enumerate(self.progress)
        ]

    def turn(self, *values):
        for index in values:
            self.progress[index].count_event([])

    def look(self, times, paused=()):
        for _ in range(times):
            self.seconds += 3
            for index, dog in enumerate(self.dogs):
                if index not in paused:
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


def messages(caplog):
    texts = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return texts


def test_each_worker_that_waits_reports_once_which_has_not_arrived(workers, caplog):
    for progress in workers.progress:
        progress.count_step(())
    workers.look(1)
    workers.turn(0, 2)
    workers.look(LOOKS + 2)
    assert messages(caplog) == []  # the first of these looks saw progress
    workers.look(1)
    one = "Waiting for 30 seconds, in step 1. %s has not arrived: it runs, in step 1."
    assert messages(caplog) == [one % workers.names[1]] * 2
    workers.look(50)
    assert messages(caplog) == []
    workers.turn(1)  # it has arrived, so all continue
    workers.turn(0, 1, 2)
    workers.look(1)
    assert messages(caplog) == ["Continues after 186 seconds."] * 2


def test_a_worker_that_arrives_late_is_not_reported(workers, caplog):
    workers.turn(0)
    workers.look(LOOKS)
    workers.turn(2)
    workers.look(3)
    (text,) = messages(caplog)
    assert "Worker 1" in text
    assert "Worker 2" not in text


@pytest.mark.parametrize(
    ("paused", "state"),
    [
        (1, "its process is there but does not answer, so it is paused or blocked"),
        (2, "its process has ended"),
    ],
)
def test_a_pause_is_distinguished_from_a_crash(workers, caplog, paused, state):
    workers.turn(0)
    workers.turn(3 - paused)
    workers.look(LOOKS + 3, paused=[paused])
    name = workers.names[paused]
    lost = "After 60 seconds of silence it is lost, and the job ends."
    text = f"Waiting for 30 seconds, before the first step. {name} has not arrived: {state}. {lost}"
    assert messages(caplog) == [text] * 2


def test_without_the_service_only_its_worker_is_named(workers, caplog):
    workers.turn(1)
    workers.store.answers = False
    workers.look(LOOKS + 3, paused=[0])
    (text,) = messages(caplog)
    assert "Worker 0" in text
    assert "paused or blocked" in text
    assert "Worker 2" not in text


def test_a_late_answer_of_the_service_accuses_no_running_worker(workers, caplog):
    workers.turn(0, 2)
    workers.store.answers = False
    workers.look(1)
    workers.look(LOOKS - 1, paused=[0, 1, 2])
    workers.store.answers = True
    workers.look(LOOKS + 3)
    texts = messages(caplog)
    assert len(texts) == 2
    assert all("Worker 1" in text and "it runs" in text for text in texts)


def test_a_slow_network_is_reported_once_for_all_steps(workers, caplog):
    for _ in range(3):
        workers.turn(0, 1, 2)
        workers.look(LOOKS + 3)
        workers.turn(0, 1, 2)
        workers.look(1)
    texts = [text for text in messages(caplog) if "Continues" not in text]
    wanted = "All workers have arrived: the network is slow or cut."
    assert texts == [f"Waiting for 30 seconds, before the first step. {wanted}"] * 3


def test_a_long_step_without_a_collective_is_no_stall(workers, caplog):
    workers.look(10 * LOOKS)
    assert messages(caplog) == []


def test_a_worker_that_was_itself_paused_accuses_no_other_worker(workers, caplog):
    workers.turn(0, 2)
    workers.look(LOOKS - 1, paused=[0])
    workers.turn(1)
    workers.look(1)
    workers.turn(0, 1, 2)
    workers.look(LOOKS)
    assert messages(caplog) == []
