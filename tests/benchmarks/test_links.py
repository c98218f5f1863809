"""Links of known speed: that they are, and that nothing is left of them."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import links
import pytest
from placed import measured_links

from tests.benchmarks.conftest import BENCHMARKS

WHY_NOT = links.missing()
shaped = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
WHY_NO_DELAY = links.missing(0.001)
delayed = pytest.mark.skipif(bool(WHY_NO_DELAY), reason=WHY_NO_DELAY)


def namespaces():
    return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def measured(network, names):
    return {link["link"]: link for link in measured_links(network, names)}


@pytest.mark.alone
@shaped
def test_links_have_the_speeds_of_their_names_at_the_same_time():
    with links.network(2) as network:
        found = measured(network, ["10 Mbit/s", "100 Mbit/s", links.UNSHAPED, "100 Mbit/s"])
    speeds = {link: result["Mbit/s"] for link, result in found.items()}
    assert 5 < speeds["100 Mbit/s"] / speeds["10 Mbit/s"] < 20
    assert speeds[links.UNSHAPED] > 2 * speeds["100 Mbit/s"]


def test_the_loopback_can_be_measured_as_well():
    network = links.Network(2)
    result = measured(network, [links.LOOPBACK])[links.LOOPBACK]
    assert result["Mbit/s"] > 0
    assert result["Mbit/s both ways"] > 0
    assert network.counters().carried > 0


@delayed
def test_a_relay_delays_what_workers_send_each_other():
    with links.network(2, delay=0.02) as network:
        (result,) = measured_links(network, [links.UNSHAPED])
        assert namespaces().count(network.name) == 3
    assert result["ms"] >= 2 * 20
    assert result["Mbit/s"] > 0
    assert network.name not in namespaces()


DELAY, LOSS, FRAMES = 0.1, 0.3, 200


def test_a_relay_delays_and_drops_one_direction_of_a_cable():
    (near, near_end), (far, far_end) = (
        socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)
    )
    near_end.setblocking(False)
    far_end.setblocking(False)
    pipe, stop = os.pipe()
    ends = [(near_end.fileno(), far_end.fileno())]
    chance = random.Random(7)
    carrying = threading.Thread(target=links.carry, args=(ends, DELAY, LOSS, chance, pipe))
    carrying.start()
    try:
        sent = {}
        for i in range(FRAMES):
            sent[i] = time.monotonic()
            near.send(bytes([i]))
            far.send(bytes([i]))
        back = [near.recv(1)[0] for _ in range(FRAMES)]
        same = random.Random(7)
        kept = [i for i in range(FRAMES) if same.random() >= LOSS]
        arrived = {far.recv(1)[0]: time.monotonic() for _ in kept}
    finally:
        os.close(stop)
        carrying.join()
        os.close(pipe)
    assert back == list(range(FRAMES))
    assert list(arrived) == kept
    assert all(arrived[i] - sent[i] >= DELAY for i in kept)
    for one in (near, near_end, far, far_end):
        one.close()


@shaped
def test_nothing_is_left_when_the_block_ends():
    with links.network(3) as network:
        assert namespaces().count(network.name) == 4
    assert network.name not in namespaces()


@shaped
def test_nothing_is_left_after_an_error():
    with pytest.raises(RuntimeError, match="amid"), links.network(2) as network:
        raise RuntimeError("amid")
    assert network.name not in namespaces()


@shaped
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_an_interruption(signum):
    program = (
        "import links, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with links.network(2) as network:\n"
        "    print(network.name, flush=True)\n"
        "    time.sleep(60)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        name = process.stdout.readline().strip()
        assert name in namespaces()
        process.send_signal(signum)
        assert process.wait(300) != 0
    assert name not in namespaces()


def test_missing_requirements_of_links_are_named(monkeypatch):
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    assert links.missing() == "Only root can make network namespaces."
    monkeypatch.setattr(links.os, "geteuid", lambda: 0)
    monkeypatch.setattr(links.shutil, "which", lambda command: None)
    nothing = "There is no ip and no tc and no unshare here; "
    assert links.missing() == f"{nothing}Debian has them in iproute2 and util-linux."
    monkeypatch.setattr(links.shutil, "which", lambda command: command)
    monkeypatch.setattr(links, "_TUN", "/dev/nothing")
    nothing = "Links cannot be delayed here: there is no /dev/nothing."
    assert links.missing(0.02) == nothing
    monkeypatch.setattr(links, "_run", refuse)
    assert links.missing() == "Links cannot be shaped here: ip: Operation not permitted."


def refuse(*command):
    raise OSError("ip: Operation not permitted")


def test_counters_can_be_subtracted():
    later, earlier = links.Counters(500, 300), links.Counters(100, 50)
    assert later.since(earlier) == links.Counters(400, 250)
