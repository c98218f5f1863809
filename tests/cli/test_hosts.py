"""`gradcomp run -H`: workers on hosts.

A real `sshd` plays the hosts if there is one, and a program in place of `ssh` that runs commands
here.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.sshd import needs_sshd, running_sshd
from tests.cli.test_run import COMMAND, ENV, gradcomp, program  # noqa: F401
from tf_gradcomp.launch import parse_hosts

# Notes each connection and its process, so that tests can end it.
SSH = """#!/bin/sh
if [ "$1" = -G ]; then
    echo "hostname ${2#*@}"
    exit
fi
for argument; do host=$command; command=$argument; done
if [ "$host" = nowhere ]; then
    echo "ssh: connect to host nowhere port 22: Connection refused" >&2
    exit 255
fi
echo "$host" $$ >> "$(dirname "$0")/clients"
[ -e "$(dirname "$0")/hangs-$host" ] && exec sleep 300
"""
# As the client of ssh does, it carries stdin to a session that does not end with it.
PLAYED = f"""
exec {sys.executable} -IS - "$host" "$command" 3<&0 <<'PLAYED'
import os, subprocess, sys, threading
host, command = sys.argv[1:]
remote = subprocess.Popen(
    ["sh", "-c", command],
    stdin=subprocess.PIPE,
    bufsize=0,
    env={{"PATH": os.environ["PATH"], "HOST": host}},
    start_new_session=True,
)
def carry():
    while chunk := os.read(3, 1 << 16):
        remote.stdin.write(chunk)
    remote.stdin.close()
threading.Thread(target=carry, daemon=True).start()
code = remote.wait()
os._exit(code if code >= 0 else 255)
PLAYED
"""


@pytest.fixture
def ssh_folder(tmp_path):
    """A folder for a program in place of `ssh`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


@pytest.fixture
def real_ssh(ssh_folder):
    """The environment with an `ssh` that a real `sshd` lets in."""
    with running_sshd(ssh_folder) as client:
        yield environment(ssh_folder, f'exec {client} "$@"\n')


def environment(folder, client):
    (folder / "ssh").write_text(SSH + client)
    (folder / "ssh").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def played_ssh(ssh_folder):
    """The environment with an `ssh` that runs commands here."""
    return environment(ssh_folder, PLAYED)


@pytest.fixture(params=["played_ssh", pytest.param("real_ssh", marks=needs_sshd)])
def ssh(request):
    """The environment with an `ssh` that lists its processes in the file `clients`."""
    return request.getfixturevalue(request.param)


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
    names = "'HOST', 'GRADCOMP_COMPRESSOR', 'MINE', 'GIVEN', 'OTHER'"
    path = program(
        f"""
        print(*map(os.environ.get, [{names}]))
        print(*json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"], file=sys.stderr)
        """
    )
    env = {**ssh, "GRADCOMP_COMPRESSOR": "cast", "MINE": "a b", "OTHER": "no"}
    options = ["-H", "host1,host2:2", "-x", "MINE", "-x", "GIVEN='"]
    done = gradcomp("run", *options, path, env=env)
    assert done.returncode == 0, done.stderr
    hosts = ["host1", "host2", "host2"]
    assert sorted(done.stdout.splitlines()) == [
        f"[worker {index}] {host} cast a b ' None" for index, host in enumerate(hosts)
    ]
    _, *lines = done.stderr.splitlines()
    (addresses,) = {line.partition("] ")[2] for line in lines}
    assert [address.partition(":")[0] for address in addresses.split()] == hosts
    assert len({*addresses.split()}) == 3


def test_advice_is_measured_between_hosts(program, ssh):  # noqa: F811
    path = program("""
        import json  # and not tf_gradcomp, which takes long to import
        path = os.environ["GRADCOMP_ADVISE"]
        if index == 0:
            with open(path, "w") as file:
                json.dump({"verdict": os.environ["HOST"], "table": path, "best": "cast"}, file)
    """)
    done = gradcomp("advise", "-H", "host1,host2", path, env=ssh)
    assert done.returncode == 0, done.stderr
    verdict, written, more = done.stdout.splitlines()
    assert (verdict, more) == ("host1", "More: --details")
    assert not os.path.exists(written)
    assert "loopback" not in done.stdout
    missing = gradcomp("advise", "-H", "host1,host2", program("# tf_gradcomp"), env=ssh)
    assert missing.returncode == 1
    assert "ended before the measurement was complete" in missing.stderr


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
    (client,) = [pid for host, pid in clients(ssh) if host == "host2"]
    os.kill(int(client), signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGKILL
    assert "worker 1 died first" in err
    assert all(map(ends, pids.values()))


def test_no_worker_outlives_gradcomp(program, ssh):  # noqa: F811
    process, pids = start(program, ssh, "say()\ntime.sleep(60)")
    process.kill()
    process.communicate(timeout=300)
    assert all(map(ends, pids.values()))
    assert all(ends(pid) for _, pid in clients(ssh))


def test_a_job_on_hosts_is_restarted(program, ssh):  # noqa: F811
    source = """
        restarts = int(os.environ["GRADCOMP_RESTARTS"])
        sys.exit(10 + restarts if restarts < 3 else 0)
    """
    done = gradcomp("run", "-H", "host1", "--json", "--max-restarts", "9", program(source), env=ssh)
    assert (done.returncode, json.loads(done.stdout)["restarts"]) == (0, 3)


def test_the_first_message_names_everything_that_hosts_lack(program, ssh, tmp_path):  # noqa: F811
    path = program("print('ran')")
    for args, messages in (
        (
            ["-H", "host1,host2", "no.py"],
            [f"{host}: there is no {tmp_path}/no.py" for host in ("host1", "host2")],
        ),
        (
            ["-H", "host1,nowhere", path],
            ["nowhere: ssh: connect to host nowhere port 22: Connection refused"],
        ),
    ):
        done = gradcomp("run", *args, env=ssh, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines() == ["Error: workers cannot be started on", *messages]


def test_the_reason_of_a_module_that_hosts_lack_is_shown(program, ssh):  # noqa: F811
    done = gradcomp("run", "-H", "host1", "-m", "no_module", env=ssh)
    assert done.returncode == 1
    assert re.search(r"worker 0 died first, .*No module named no_module", done.stderr)


@needs_sshd
def test_the_reason_of_a_refused_login_is_shown(program, real_ssh):  # noqa: F811
    done = gradcomp("run", "-H", "host1,stranger", program(""), env=real_ssh)
    assert done.returncode == 1
    assert re.search(r"cannot be started on\nstranger: .*Permission denied", done.stderr)


@needs_sshd
def test_many_workers_on_a_host_do_not_log_in_at_once(program, real_ssh):  # noqa: F811
    done = gradcomp("run", "-H", "host1:12", program("print(index)"), env=real_ssh)
    assert done.returncode == 0, done.stderr
    said = [f"[worker {index:>2}] {index}" for index in range(12)]
    assert sorted(done.stdout.splitlines()) == said


def test_a_host_of_another_shape_gives_its_shell_s_reason(program, ssh_folder):  # noqa: F811
    env = environment(ssh_folder, 'command="exec /no/python"\n' + PLAYED)
    done = gradcomp("run", "-H", "host1", program(""), env=env)
    assert done.returncode == 1
    assert re.search(r"on\nhost1: .*/no/python.*not found", done.stderr)


@needs_sshd
def test_a_service_that_a_worker_has_started_does_not_hold_the_job(program, real_ssh):  # noqa: F811
    source = """
        import subprocess
        print(subprocess.Popen(["sleep", "300"], start_new_session=True).pid)
        sys.exit(7)
    """
    done = gradcomp("run", "-H", "host1", program(source), env=real_ssh, timeout=200)
    os.kill(int(done.stdout.split()[-1]), signal.SIGKILL)
    assert done.returncode == 7


def test_workers_may_print_control_characters(program, ssh):  # noqa: F811
    path = program(
        r"""
        for stream in (sys.stdout, sys.stderr):
            print('a\x1e{"returncode": 0}\x1e', "\x00\x04gradcomp 1", file=stream, flush=True)
        sys.exit(3)
        """
    )
    done = gradcomp("run", "-H", "host1", path, env=ssh)
    line = '[worker 0] a\x1e{"returncode": 0}\x1e \x00\x04gradcomp 1\n'
    assert done.returncode == 3
    assert done.stdout == line
    assert done.stderr.startswith(f"gradcomp: starting 1 worker on host1\n{line}")


def test_a_job_that_is_stopped_before_a_restart_says_how_it_ended(program, ssh, tmp_path):  # noqa: F811
    source = "open(sys.argv[1], 'w').close(); sys.exit(9)"
    options = ["-H", "host1", "--json", "--max-restarts", "9"]
    with subprocess.Popen(
        [*COMMAND, "run", *options, program(source), str(tmp_path / "bin/hangs-host1")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENV, **ssh},
    ) as process:
        until = time.monotonic() + 300
        while len(clients(ssh)) < 2:
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, json.loads(out)["exit_code"]) == (9, 9)
    assert "gradcomp: no restart: interrupted.\n" in err
    assert all(ends(pid) for _, pid in clients(ssh))


def test_without_ssh_only_this_machine_has_workers(program):  # noqa: F811
    done = gradcomp("run", "-H", "host1", program(""), env={"PATH": "/nowhere"})
    assert (done.returncode, done.stderr) == (1, "Error: there is no ssh on this machine\n")


MODULES = ("json", "os", "select", "signal", "socket", "subprocess", "tempfile", "typing")


def write_modules(folder, names):
    for name in names:
        (folder / f"{name}.py").write_text("raise SystemExit('this is no standard module')")


@pytest.mark.parametrize("command", ["methods", "info", "run -n 1"])
def test_files_named_like_standard_modules_break_no_command(program, tmp_path, command):  # noqa: F811
    path = program("print('a line')")
    (folder := tmp_path / "current").mkdir()
    write_modules(folder, MODULES)
    args = [*command.split(), *([path] if command.startswith("run") else [])]
    script = [str(Path(sys.executable).with_name("gradcomp"))]
    done = gradcomp(*args, cwd=folder, command=script)
    assert done.returncode == 0, done.stderr
    assert "no standard module" not in done.stdout + done.stderr


def test_files_named_like_standard_modules_break_no_worker_on_a_host(program, ssh, tmp_path):  # noqa: F811
    path = program("print('a line')")
    write_modules(tmp_path, {*MODULES} - {"json", "os"})  # which the program imports
    script = [str(Path(sys.executable).with_name("gradcomp"))]
    for args in ([path], ["-m", "program"]):
        done = gradcomp("run", "-H", "host1", *args, env=ssh, cwd=tmp_path, command=script)
        assert (done.returncode, done.stdout) == (0, "[worker 0] a line\n"), done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-H", "host1", "-n", "2"], "-H: leave out -n; each host has a number of workers"),
        (["-H", "host1", "--horovod"], "-H: leave out --horovod; start ranks of Horovod on hosts"),
        (
            ["-H", "host1", "--gpus-per-worker", "1"],
            "-H: leave out --gpus-per-worker; start one worker on each host",
        ),
        (["-H", "host1:0"], "expected hosts and numbers of workers"),
        (["-H", "host1,,host2"], "received ''"),
        (["-H", "localhost,host2"], "localhost is another machine on each host"),
        (["-H", "host1", "-x", "NO_SUCH"], "there is no variable NO_SUCH here"),
        (["-n", "1", "-x", "HOME"], "-x is for workers on hosts"),
    ],
)
def test_wrong_use_is_refused(program, played_ssh, args, message):  # noqa: F811
    done = gradcomp("run", *args, program(""), env=played_ssh)
    assert done.returncode == 2
    assert message in done.stderr


def test_hosts_are_read_as_ssh_and_mpirun_read_them(played_ssh, monkeypatch):
    monkeypatch.setenv("PATH", played_ssh["PATH"])
    hosts = parse_hosts("a, user@b-1.c:2,[fe80::1]:3,a")
    assert [(host.name, host.workers, host.address) for host in hosts] == [
        ("a", 2, "a"),
        ("user@b-1.c", 2, "b-1.c"),
        ("[fe80::1]", 3, "[fe80::1]"),
    ]


def test_this_machine_needs_no_ssh(program, played_ssh):  # noqa: F811
    done = gradcomp("run", "-H", "localhost:2", program("print(index)"), env=played_ssh)
    assert sorted(done.stdout.splitlines()) == ["[worker 0] 0", "[worker 1] 1"]
    assert clients(played_ssh) == []
