"""Links of known speed: that they are, and that nothing is left of them."""

import json
import os
import signal
import subprocess
import sys

import links
import pytest
from turns import Plan

from tests.benchmarks.conftest import BENCHMARKS
from tf_gradcomp.launch import LocalJob

WHY_NOT = links.missing()
shaped = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def namespaces():
    return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def measured(network, names):
    lines = []
    command = [sys.executable, str(BENCHMARKS / "raw_link.py")]
    with LocalJob(
        [*command, Plan("raw link", (), names, network).to_text()],
        network.workers,
        worker_prefix=network.prefixes,
        hosts=network.hosts,
        on_line=lambda worker, stream, line: lines.append(line),
    ) as job:
        result = job.run()
    assert result.exit_code == 0, result.summary()
    return {said["link"]: said["Mbit/s"] for said in map(json.loads, lines)}


@pytest.mark.alone
@shaped
def test_links_carry_as_their_names_say_beside_each_other():
    with links.network(2) as network:
        speeds = measured(network, ["10 Mbit/s", "100 Mbit/s", links.UNSHAPED, "100 Mbit/s"])
    assert 5 < speeds["100 Mbit/s"] / speeds["10 Mbit/s"] < 20
    assert speeds[links.UNSHAPED] > 2 * speeds["100 Mbit/s"]


def test_the_loopback_can_be_measured_as_well():
    network = links.Network(2)
    assert measured(network, [links.LOOPBACK])[links.LOOPBACK] > 0
    assert network.counters().carried > 0


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


def test_it_says_what_it_cannot_do(monkeypatch):
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    assert links.missing() == "Only root can make network namespaces."
    monkeypatch.setattr(links.os, "geteuid", lambda: 0)
    monkeypatch.setattr(links.shutil, "which", lambda command: None)
    nothing = "There is no ip and no tc and no unshare here; "
    assert links.missing() == f"{nothing}Debian has them in iproute2 and util-linux."
    monkeypatch.setattr(links.shutil, "which", lambda command: command)
    monkeypatch.setattr(links, "_run", refuse)
    assert links.missing() == "Links cannot be shaped here: ip: Operation not permitted."


def refuse(*command):
    raise OSError("ip: Operation not permitted")


def test_counters_can_be_subtracted():
    later, earlier = links.Counters(500, 300), links.Counters(100, 50)
    assert later.since(earlier) == links.Counters(400, 250)
