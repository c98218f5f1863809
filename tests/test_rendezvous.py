"""Waiting for workers that have not started: reports, the limit, signals, and proxies."""

import contextlib
import json
import logging
import signal
import socket
import threading
from unittest import mock

import pytest

from tests.workers import Job
from tf_gradcomp.environment import bypass
from tf_gradcomp.groups import rendezvous
from tf_gradcomp.groups.rendezvous import wait_for_workers, warn_of_proxy
from tf_gradcomp.tf_config import TFConfig

pytestmark = pytest.mark.quick
PROXY = {"http_proxy": "http://127.0.0.1:9"}


def free_addresses(number):
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(socket.create_server(("", 0))) for _ in range(number)]
        return [f"localhost:{one.getsockname()[1]}" for one in bound]


def task(addresses, rank):
    return TFConfig({"worker": tuple(addresses)}, "worker", rank)


@pytest.fixture
def log(caplog, monkeypatch):
    """Returns the lines that were logged since the last call."""
    caplog.set_level(logging.INFO, "tf_gradcomp")
    monkeypatch.setattr(logging.getLogger("tf_gradcomp"), "propagate", True)

    def lines():
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    return lines


@pytest.fixture
def worker():
    """Starts a worker in a thread; as with TensorFlow, it listens once it has met the others."""
    with contextlib.ExitStack() as servers:

        def start(addresses, rank):
            wait_for_workers(task(addresses, rank), 60)
            port = int(addresses[rank].rpartition(":")[2])
            servers.enter_context(socket.create_server(("", port)))

        def thread(addresses, rank):
            started = threading.Thread(target=start, args=[addresses, rank])
            started.start()
            return started

        yield thread


def test_workers_that_start_at_different_times_meet(log, worker):
    addresses = free_addresses(3)
    early = [worker(addresses, rank) for rank in (0, 1)]
    early[0].join(0.5)
    assert all(thread.is_alive() for thread in early)
    for thread in [*early, worker(addresses, 2)]:
        thread.join(20)
        assert not thread.is_alive()
    assert log() == []


def test_a_worker_that_came_late_is_reported_to_have_come(log, monkeypatch, worker):
    addresses = free_addresses(2)
    monkeypatch.setattr(rendezvous, "_FIRST_REPORT", 0.1)
    early = worker(addresses, 0)
    early.join(0.5)
    worker(addresses, 1).join(20)
    early.join(20)
    missing, come = log()
    assert f"Worker 1 ({addresses[1]}) has not started" in missing
    assert come.startswith("Continues after ")


@pytest.mark.parametrize(
    ("address", "error", "text"),
    [
        ("nowhere.invalid:2222", None, "the name nowhere.invalid cannot be found"),
        (None, None, "its machine refuses the connection"),
        ("silent:2222", TimeoutError("timed out"), "its machine does not answer"),
        ("far:2222", OSError("No route to host"), "the connection fails (No route to host)"),
    ],
)
def test_a_missing_worker_is_reported_with_its_state(log, monkeypatch, address, error, text):
    local, closed = free_addresses(2)
    address = address or closed
    monkeypatch.setattr(rendezvous, "_FIRST_REPORT", 0.5)
    if error:
        monkeypatch.setattr(socket, "create_connection", mock.Mock(side_effect=error))
    with pytest.raises(TimeoutError) as ended:
        wait_for_workers(task([local, address], 0), 1)
    (line,) = log()
    for message in (line, str(ended.value)):
        assert f"Worker 1 ({address}) has not started: {text}" in message
    assert line.startswith("Waiting for ")
    assert "not started within 1 seconds" in str(ended.value)
    assert "GRADCOMP_START_TIMEOUT" in str(ended.value)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_a_missing_worker(signum):
    program = """
        import signal
        from tf_gradcomp.groups import rendezvous
        import tf_gradcomp as gc

        signal.signal(signal.SIGINT, signal.default_int_handler)
        rendezvous._FIRST_REPORT = 0.1
        gc.MultiWorkerMirroredStrategy()
    """
    cluster = {"worker": free_addresses(2)}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    with Job(program, 1, per_worker_env=[{"TF_CONFIG": config}], deadline=60) as job:
        job.wait_for_line(0, "Worker 1 (localhost:", timeout=30)
        job.kill(0, signum)
        (end,) = job.wait(30)
    assert end.returncode == -signum


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, {}),
        ({"http_proxy": ""}, {}),
        ({"HTTP_PROXY": "http://p:1"}, {}),  # gRPC reads lower case only
        (PROXY, {"no_proxy": "one.lan,two.lan"}),
        ({"https_proxy": "http://p:1"}, {"no_proxy": "one.lan,two.lan"}),
        ({"grpc_proxy": "http://p:1"}, {"no_proxy": "one.lan,two.lan"}),
        ({**PROXY, "grpc_proxy": ""}, {}),  # the first that is set decides
        ({**PROXY, "no_proxy": "two.lan"}, {"no_proxy": "two.lan,one.lan"}),
        ({**PROXY, "no_proxy": "other, .LAN"}, {}),
        (
            {**PROXY, "no_proxy": ".lan", "no_grpc_proxy": "x"},
            {"no_grpc_proxy": "x,one.lan,two.lan"},
        ),
    ],
)
def test_workers_behind_a_proxy_are_found_as_grpc_finds_them(env, expected):
    assert bypass(["one.lan", "two.lan", "one.lan"], env) == expected


def test_a_job_without_the_launcher_is_warned_of_a_proxy(log, monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", PROXY["http_proxy"])
    warn_of_proxy(task(["[::1]:1", "two.lan:1"], 0))
    (line,) = log()
    assert "http_proxy" in line
    assert "set no_proxy=::1,two.lan in" in line
    monkeypatch.setenv("no_proxy", "::1,two.lan")
    warn_of_proxy(task(["[::1]:1", "two.lan:1"], 0))
    assert log() == []
