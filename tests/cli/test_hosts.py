"""`gradcomp run -H`: workers on hosts. `ssh` is played by a program that runs commands here."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_restarts import START
from tests.cli.test_run import COMMAND, ENV, gradcomp, program  # noqa: F401
from tests.cli.test_scheduler import SLURM
from tf_gradcomp.launch import on_host, parse_hosts
from tf_gradcomp.launch.remote_worker import LOADER, MessageSplitter, program_text

# As the client of ssh does, it carries stdin to a session that does not end with it.
SSH = f"""#!{sys.executable} -IS
import os, pathlib, subprocess, sys, threading, time
*options, host, command = sys.argv[1:]
if host == "-G":
    print("hostname", command.rpartition("@")[2])
    sys.exit()
away = pathlib.Path(__file__).with_name(f"away-{{host}}")  # for a number of times, or for good
if host == "nowhere" or away.exists():
    times = away.read_text() if away.exists() else ""
    if times == "1":
        away.unlink()
    elif times:
        away.write_text(str(int(times) - 1))
    print(f"ssh: connect to host {{host}} port 22: Connection refused", file=sys.stderr)
    sys.exit(255)
if host == "bare":
    command = "exec /no/python"
with open(pathlib.Path(__file__).with_name("clients"), "a") as file:
    print(host, os.getpid(), file=file)
if pathlib.Path(__file__).with_name(f"hangs-{{host}}").exists():
    time.sleep(300)
remote = subprocess.Popen(
    ["sh", "-c", command],
    stdin=subprocess.PIPE,
    bufsize=0,
    env={{"PATH": os.environ["PATH"], "HOST": host}},
    start_new_session=True,
)
def carry():
    while chunk := os.read(0, 1 << 16):
        remote.stdin.write(chunk)
    remote.stdin.close()
threading.Thread(target=carry, daemon=True).start()
code = remote.wait()
os._exit(code if code >= 0 else 255)
"""


@pytest.fixture
def ssh(tmp_path):
    """Returns the environment with the fake `ssh`, which lists its processes in the file
    `clients`."""
    file = tmp_path / "bin/ssh"
    file.parent.mkdir()
    file.write_text(SSH)
    file.chmod(0o755)
    return {"PATH": f"{file.parent}{os.pathsep}{os.environ['PATH']}"}


def clients(ssh):
    file = Path(ssh["PATH"].partition(os.pathsep)[0], "clients")
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def ends(pid):
    """Waits until the process has ended."""
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


def test_workers_on_hosts_get_each_others_addresses_and_the_named_variables(
    program,  # noqa: F811
    ssh,
):
    names = "'HOST', 'GRADCOMP_COMPRESSOR', 'MINE', 'GIVEN', 'OTHER', 'TF_NUM_INTRAOP_THREADS'"
    path = program(
        f"""
        print(*map(os.environ.get, [{names}]))
        print(*json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"], file=sys.stderr)
        """
    )
    env = {**ssh, "GRADCOMP_COMPRESSOR": "cast", "MINE": "a b", "OTHER": "no"}
    options = ["-H", "host1,host2:2", "-x", "MINE", "-x", "GIVEN='", "--threads-per-worker", "3"]
    done = gradcomp("run", *options, path, env=env)
    assert done.returncode == 0, done.stderr
    hosts = ["host1", "host2", "host2"]
    assert sorted(done.stdout.splitlines()) == [
        f"[worker {index}] {host} cast a b ' None 3" for index, host in enumerate(hosts)
    ]
    (addresses,) = {line.partition("] ")[2] for line in done.stderr.splitlines()}
    assert [address.partition(":")[0] for address in addresses.split()] == hosts
    assert len({*addresses.split()}) == 3


def test_workers_on_hosts_end_like_local_workers(program, ssh):  # noqa: F811
    path = program(
        """
        print("\\r1/2\\r2/2", end="\\n", file=sys.stderr)
        if index:
            os.kill(os.getpid(), 11)
        time.sleep(60)
        """
    )
    done = gradcomp("run", "-H", "host1,host2", "--json", "--grace", "0.2", path, env=ssh)
    ended = json.loads(done.stdout)
    assert done.returncode == ended["exit_code"] == 128 + signal.SIGSEGV
    assert ended["first_failure"] == 1
    assert "[worker 1] 2/2\n" in done.stderr
    assert re.search(
        r"^gradcomp: worker 1 died first, after .* killed by SIGSEGV", done.stderr, re.M
    )


def test_the_time_limit_ends_workers_on_hosts(program, ssh):  # noqa: F811
    done = gradcomp("run", "-H", "host1", "--timeout", "1", program("time.sleep(60)"), env=ssh)
    assert done.returncode == 124
    assert all(ends(pid) for _, pid in clients(ssh))


def start(program, ssh, source, hosts="host1,host2", *options):  # noqa: F811
    """Starts workers, and returns the process and their ids once `say()` has said them."""
    path = program("def say():\n    print('pid', os.getpid(), flush=True)\n\n" + source)
    process = subprocess.Popen(
        [*COMMAND, "run", "-H", hosts, *options, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENV, **ssh},
    )
    lines = [process.stdout.readline() for _ in hosts.split(",")]
    pids = {int(re.search(r"worker (\d)", line)[1]): int(line.split()[-1]) for line in lines}
    return process, pids


def test_ctrl_c_reaches_workers_on_hosts(program, ssh):  # noqa: F811
    source = "try:\n    say()\n    time.sleep(60)\nfinally:\n    print('saved')"
    process, _ = start(program, ssh, source)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert sorted(out.splitlines()) == ["[worker 0] saved", "[worker 1] saved"]
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in err


def test_no_worker_outlives_its_connection(program, ssh):  # noqa: F811
    process, pids = start(program, ssh, "say()\ntime.sleep(60)", "host1,host2", "--grace", "0.2")
    (client,) = [pid for host, pid in clients(ssh)[2:] if host == "host2"]
    os.kill(int(client), signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 255
    assert re.search(r"worker 1 died first, .*: host2: the connection was lost", err)
    assert all(map(ends, pids.values()))


def test_no_worker_outlives_gradcomp(program, ssh):  # noqa: F811
    process, pids = start(program, ssh, "say()\ntime.sleep(60)")
    process.kill()
    process.communicate(timeout=300)
    assert all(map(ends, pids.values()))
    assert all(ends(pid) for _, pid in clients(ssh))


def test_a_silent_connection_ends_a_worker(tmp_path):
    """A cut network closes no connection; the host misses the launcher's signs of life."""
    text = Path(on_host.__file__).read_text().replace("SILENCE = 60.0", "SILENCE = 1.0")
    pid = tmp_path / "pid"
    source = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    command = [sys.executable, "-c", source]
    request = {
        "do": "run",
        "folder": str(tmp_path),
        "env": {},
        "command": command,
    }
    request["guard"] = "import os, sys; os.execvp(sys.argv[2], sys.argv[2:])"
    with subprocess.Popen(
        [sys.executable, "-c", LOADER], stdin=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as host:
        host.stdin.write(b"%s\n%s\n0\n" % (json.dumps(text).encode(), json.dumps(request).encode()))
        assert host.stderr.read() == b""
    assert text != Path(on_host.__file__).read_text()
    assert ends(pid.read_text())


def test_a_job_on_hosts_is_restarted(program, ssh, tmp_path):  # noqa: F811
    body = "sys.exit(10 + runs if runs < 3 else 0)"
    options = ["-H", "host1", "--json", "--max-restarts", "9"]
    done = gradcomp("run", *options, program(START + body), str(tmp_path), env=ssh)
    assert (done.returncode, json.loads(done.stdout)["restarts"]) == (0, 3)


def test_the_first_message_names_everything_that_hosts_lack(program, ssh, tmp_path):  # noqa: F811
    path = program("print('ran')")
    for args, messages in (
        (
            ["-H", "host1,host2", "no.py"],
            [f"{host}: there is no program no.py in {tmp_path}" for host in ("host1", "host2")],
        ),
        (["-H", "host1", "-m", "no_module"], [f"host1: {sys.executable} has no module no_module"]),
        (
            ["-H", "host1,nowhere", path],
            ["nowhere: ssh: connect to host nowhere port 22: Connection refused"],
        ),
        (["-H", "bare", path], [f"bare: there is no Python at {sys.executable}, as there is here"]),
    ):
        done = gradcomp("run", *args, env=ssh, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines() == ["Error: workers cannot be started on", *messages]


def test_a_job_that_is_stopped_before_a_restart_says_how_it_ended(program, ssh, tmp_path):  # noqa: F811
    body = "pathlib.Path(sys.argv[1], 'bin/hangs-host1').touch(); sys.exit(9)"
    options = ["-H", "host1", "--json", "--max-restarts", "9"]
    with subprocess.Popen(
        [*COMMAND, "run", *options, program(START + body), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENV, **ssh},
    ) as process:
        until = time.monotonic() + 300
        while len(clients(ssh)) < 3:  # surveyed, run, and surveyed again
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, json.loads(out)["exit_code"]) == (9, 9)
    assert "gradcomp: no restart: interrupted.\n" in err
    assert all(ends(pid) for _, pid in clients(ssh))


def test_without_ssh_only_this_machine_has_workers(program):  # noqa: F811
    done = gradcomp("run", "-H", "host1", program(""), env={"PATH": "/nowhere"})
    assert done.returncode == 1
    assert done.stderr.endswith("on\nhost1: there is no ssh here\n")


@pytest.mark.parametrize("command", ["methods", "info", "run -n 1", "run -H host1"])
def test_files_named_like_standard_modules_break_no_command(program, ssh, tmp_path, command):  # noqa: F811
    path = program("print('a line')")
    (folder := tmp_path / "current").mkdir()
    for name in ("json", "os", "select", "signal", "socket", "subprocess", "tempfile", "typing"):
        (folder / f"{name}.py").write_text("raise SystemExit('this is no standard module')")
    args = [*command.split(), *([path] if command.startswith("run") else [])]
    script = [str(Path(sys.executable).with_name("gradcomp"))]
    done = gradcomp(*args, env=ssh, cwd=folder, command=script)
    assert done.returncode == 0, done.stderr
    assert "no standard module" not in done.stdout + done.stderr


def test_a_host_without_the_folder_or_the_library_is_named(tmp_path):
    for request, message in (
        ({"folder": "/no/folder"}, "there is no folder /no/folder"),
        ({"folder": str(tmp_path)}, f"{sys.executable} has no module tf_gradcomp"),
    ):
        request |= {
            "do": "survey",
            "workers": 2,
            "program": "p.py",
            "module": None,
            "python_path": [],
        }
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", LOADER],
            input=program_text() + json.dumps(request).encode() + b"\n",
            capture_output=True,
            check=True,
        )
        _, (answer,) = MessageSplitter().feed(done.stdout)
        assert answer["problem"] == message
        assert len({*answer["ports"]}) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-H", "host1", "-n", "2"], "Leave out -n: -H says how many workers each host has"),
        (["-H", "host1", "--horovod"], "Leave out --horovod: start ranks of Horovod on hosts by"),
        (
            ["-H", "host1", "--gpus-per-worker", "1"],
            "Leave out --gpus-per-worker: start one worker on each host",
        ),
        (["-H", "host1:0"], "expected hosts and numbers of workers"),
        (["-H", "host1,,host2"], "received ''"),
        (["-H", "localhost,host2"], "localhost is another machine on each host"),
        (["-H", "host1", "-x", "NO_SUCH"], "there is no variable NO_SUCH here"),
        (["-n", "1", "-x", "HOME"], "-x is for workers on hosts"),
    ],
)
def test_wrong_use_is_refused(program, ssh, args, message):  # noqa: F811
    done = gradcomp("run", *args, program(""), env=ssh)
    assert done.returncode == 2
    assert message in done.stderr


def test_schedulers_know_their_hosts(program):  # noqa: F811
    done = gradcomp("run", "-H", "host1", program(""), env=SLURM)
    assert done.returncode == 2
    assert "leave out -H" in done.stderr


def test_hosts_are_read_as_ssh_and_mpirun_read_them(ssh, monkeypatch):
    monkeypatch.setenv("PATH", ssh["PATH"])
    hosts = parse_hosts("a, user@b-1.c:2,[fe80::1]:3,a")
    assert [(host.name, host.workers, host.address) for host in hosts] == [
        ("a", 2, "a"),
        ("user@b-1.c", 2, "b-1.c"),
        ("[fe80::1]", 3, "[fe80::1]"),
    ]


def test_this_machine_needs_no_ssh(program, ssh):  # noqa: F811
    done = gradcomp("run", "-H", "localhost:2", program("print(index)"), env=ssh)
    assert sorted(done.stdout.splitlines()) == ["[worker 0] 0", "[worker 1] 1"]
    assert clients(ssh) == []


def test_messages_are_found_across_the_boundaries_of_chunks():
    data = b'one\x1e{"ports": 1}\x1etwo\n\x1e{"returncode": 0}\x1e'
    for size in (1, 2, 5, len(data)):
        splitter, output, messages = MessageSplitter(), b"", []
        for start in range(0, len(data), size):
            some, more = splitter.feed(data[start : start + size])
            output, messages = output + some, messages + more
        assert output == b"onetwo\n"
        assert messages == [{"ports": 1}, {"returncode": 0}]
