"""`gradcomp run` as a user starts it."""

import functools
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import tf_gradcomp
from tests.cli.test_launch import ENDS_OF_OTHERS
from tests.workers import PYTHON, server
from tf_gradcomp.cli.run import program_command
from tf_gradcomp.stall_reports import continues, waits

# A shell that runs the tests in the background has its children ignore Ctrl-C, and nohup the end of
# the terminal; undo that.
ENTRY = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from tf_gradcomp.cli.main import main
sys.exit(main(prog_name="gradcomp"))
"""
COMMAND = [sys.executable, "-c", ENTRY]
_UNSET = ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL", "PYTHONUNBUFFERED")
ENV = {name: value for name, value in os.environ.items() if name not in _UNSET} | {
    "PYTHONPATH": str(Path(tf_gradcomp.__file__).parents[1])
}
quick = pytest.mark.quick("gradcomp run")
STARTS = "gradcomp: starting {}"


def write_program(folder, source):
    """Writes a worker program, which knows its `index`; returns its path."""
    path = folder / "program.py"
    path.write_text(
        "import json, os, sys, time\n"
        "index = json.loads(os.environ['TF_CONFIG'])['task']['index']\n" + textwrap.dedent(source)
    )
    return str(path)


@pytest.fixture
def program(tmp_path):
    return functools.partial(write_program, tmp_path)


def gradcomp(*args, env=None, cwd=None, timeout=300, command=COMMAND):
    return subprocess.run(
        [*command, *args],
        capture_output=True,
        text=True,
        env={**ENV, **(env or {})},
        cwd=cwd,
        timeout=timeout,
        check=False,
    )


def preloaded_gradcomp(*args, env=None):
    """The same where TensorFlow is loaded, as it then is in the workers, too."""
    command = [*PYTHON, Path(sys.executable).with_name("gradcomp")]
    return gradcomp(*args, env={"PRELOADED": server(0), **(env or {})}, command=command)


@quick
def test_output_is_prefixed_and_separated(program):
    path = program("print('one', index); print('two', index, file=sys.stderr)")
    done = gradcomp("run", "-n", "2", path)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[worker 0] one 0", "[worker 1] one 1"]
    first, *others = done.stderr.splitlines()
    assert first == STARTS.format("2 workers")
    assert sorted(others) == ["[worker 0] two 0", "[worker 1] two 1"]


def test_characters_that_cannot_be_shown_do_not_end_the_job(program):
    path = program(
        r"""
        sys.stdout.buffer.write(b"caf\xe9 \xc3\xa9\n")  # Latin-1, and UTF-8
        print("end")
        """
    )
    done = gradcomp("run", "-n", "1", path, env={"PYTHONIOENCODING": "iso8859-5"})
    assert (done.returncode, done.stderr) == (0, f"{STARTS.format('1 worker')}\n")
    assert done.stdout == "[worker 0] caf? ?\n[worker 0] end\n"


def test_how_a_job_ended_can_be_read_by_a_program(program):
    path = program(
        """
        print("out")
        said = f"{__file__}.said"
        if index == 0:
            open(said, "w").close()
            time.sleep(30)
        while not os.path.exists(said):
            time.sleep(0.01)
        sys.exit(3)
        """
    )
    done = gradcomp("run", "-n", "2", "--json", "--grace", "0", path)
    ended = json.loads(done.stdout)
    assert done.returncode == ended["exit_code"] == 3
    assert ended["first_failure"] == 1
    assert [worker["exit_code"] for worker in ended["workers"]] == [128 + signal.SIGKILL, 3]
    assert "[worker 0] out" in done.stderr


def test_without_horovod_its_ranks_are_refused(program, tmp_path):
    (tmp_path / "horovod.py").write_text("")
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ENV['PYTHONPATH']}"}
    done = gradcomp("run", "--horovod", "-n", "2", program(""), env=env)
    assert done.returncode == 1
    assert "Horovod cannot be imported here" in done.stderr
    assert "Traceback" not in done.stderr


def test_prefixes_line_up(program):
    done = gradcomp("run", "-n", "11", program("print('x')"))
    assert {len(line) for line in done.stdout.splitlines()} == {len("[worker  0] x")}


def test_a_file_gets_the_last_state_of_a_bar_without_colours(program):
    path = program("""
        for step in range(20):
            print(f"\\r\\x1b[32m{step + 1}/20\\x1b[0m", end="", flush=True)
        print("\\nend")
    """)
    done = gradcomp("run", "-n", "1", path)
    assert done.stdout.splitlines() == ["[worker 0] 20/20", "[worker 0] end"]


def test_output_of_the_chief_alone(program):
    path = program("""
        print("out", index)
        print("cause", index, file=sys.stderr)
        print("I0000 00:00:1.5 7 port.cc:153] noise", file=sys.stderr)
        sys.exit(index)
    """)
    done = gradcomp("run", "-n", "2", "--output", "chief", path)
    assert done.stdout == "[worker 0] out 0\n"
    # The last lines of the failed worker are shown nevertheless.
    assert "[worker 1] cause 1\n" in done.stderr
    assert "noise" not in done.stderr
    assert "out 1" not in done.stdout + done.stderr


def test_reports_of_waiting_workers_are_shown_with_the_chief_output(program):
    path = program(f"""
        if index == 1:
            import logging
            logging.basicConfig(format="%(asctime)s %(message)s")
            for line in {[waits(30, 0), waits(1e6, 7), continues(41.6), "Waiting for 3 files."]}:
                logging.warning("%s Worker 0", line)
    """)
    done = gradcomp("run", "-n", "2", "--output", "chief", path)
    _, *lines = done.stderr.splitlines()
    assert [line.partition(",")[2].partition(" ")[2] for line in lines] == [
        "Waiting for 30 seconds, before the first step. Worker 0",
        "Waiting for 1e+06 seconds, in step 7. Worker 0",
        "Continues after 42 seconds. Worker 0",
    ]
    assert all(line.startswith("[worker 1] ") for line in lines)


def test_all_after_the_program_is_the_programs_own(program):
    path = program("print(sys.argv[1:])")
    args = ["-n", "9", "--timeout=x", "--help", "--", "-m", "*", "a b"]
    done = gradcomp("run", "-n", "1", path, *args)
    assert done.stdout == f"[worker 0] {args}\n"


def test_a_module(tmp_path):
    (tmp_path / "trainer.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = gradcomp("run", "-n", "1", "-m", "trainer", "-x", cwd=tmp_path)
    assert done.stdout == "[worker 0] __main__ ['-x']\n"


@quick
def test_the_first_failure_is_named_and_is_the_exit_code(program):
    path = program("""
        if index == 1:
            sys.exit(5)
        time.sleep(60)
    """)
    done = gradcomp("run", "-n", "2", "--grace", "0.2", path)
    assert done.returncode == 5
    assert re.search(r"^gradcomp: worker 1 died first, after .* exit code 5\.$", done.stderr, re.M)
    assert "gradcomp: worker 0 was still running and has been ended.\n" in done.stderr


def test_a_traceback_is_summed_up(program):
    done = gradcomp("run", "-n", "1", program("raise OSError('disk full')"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("exit code 1: OSError: disk full")


START_UP = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795745126.010205   21855 port.cc:153] oneDNN custom operations are on.",
    "2024-01-02 03:04:05.678: I tensorflow/core/util/port.cc:113] oneDNN custom operations.",
    "W0000 00:00:1795745133.183607   21 dataset.cc:997] Input of GeneratorDatasetOp::Dataset will "
    "not be optimized because",
]
TO_BE_SEEN = [
    "I1127 02:04:39.123456 139 train.py:12] the program's own log",
    "W0000 00:00:1795745133.183607   21 gpu_device.cc:2] Cannot dlopen some GPU libraries.",
    "E0000 00:00:1795745382.729856   32484 ring_alg.cc:291] Aborting RingGather",
]


def test_a_long_error_is_not_repeated_in_the_last_line(program):
    done = gradcomp("run", "-n", "1", program("raise ValueError('long ' * 100)"))
    assert done.stderr.count("long " * 100) == 1
    assert re.search(r"exit code 1: ValueError: (long )+\.\.\.$", done.stderr.splitlines()[-1])


def test_start_up_lines_of_tensorflow_are_shown_only_if_asked_for(program):
    path = program(
        f"""
        print(os.environ.get("TF_CPP_MIN_LOG_LEVEL"))
        print(*{START_UP + TO_BE_SEEN!r}, sep="\\n", file=sys.stderr)
        """
    )
    seen = [f"[worker 0] {line}" for line in TO_BE_SEEN]
    every = [f"[worker 0] {line}" for line in START_UP + TO_BE_SEEN]
    for args, env, level, lines in (
        ([], {}, "1", seen),
        ([], {"TF_CPP_MIN_LOG_LEVEL": "2"}, "2", seen),
        ([], {"TF_CPP_MIN_LOG_LEVEL": "0"}, "0", every),
        (["--verbose"], {"TF_CPP_MIN_LOG_LEVEL": "2", "GRADCOMP_MALLOC": "default"}, "2", every),
    ):
        done = gradcomp("run", "-n", "1", *args, path, env=env)
        _, *shown = done.stderr.splitlines()
        assert (done.stdout, shown) == (f"[worker 0] {level}\n", lines)


def test_an_error_of_all_workers_is_printed_once(program):
    path = program(
        """
        case = sys.argv[1]
        def fail():
            raise ValueError(f"no data for task {index}\\nat {hex(id(fail))}")
        open(f"{__file__}.{case}.{index}", "w").close()
        while not all(os.path.exists(f"{__file__}.{case}.{i}") for i in range(3)):
            time.sleep(0.01)
        if case == "other" and index == 2:
            raise OSError("disk full")
        fail()
        """
    )
    # The workers fail together, but on a busy machine one of them may end much later.
    run = ["run", "-n", "3", "--grace", "200"]
    done = gradcomp(*run, path, "same")
    assert done.stderr.count("Traceback") == done.stderr.count("ValueError: no data for task") - 1
    assert done.stderr.count("Traceback") == 1
    end = done.stderr.splitlines()[-1]
    assert "gradcomp: all workers died with the same error, after " in end
    assert "exit code 1: ValueError: no data for task " in end
    other = gradcomp(*run, path, "other").stderr
    assert other.count("Traceback") == other.count("raise ") == 2
    assert "[worker 2] OSError: disk full" in other
    assert re.search(r"^gradcomp: the same error on worker [01] as on worker [01]\.$", other, re.M)
    assert gradcomp(*run, "-v", path, "verbose").stderr.count("Traceback") == 3


def test_a_traceback_that_ends_no_worker_is_shown_soon(program):
    path = program(
        """
        if index == 0:
            try:
                1 / 0
            except ZeroDivisionError:
                import traceback
                traceback.print_exc()
            open(f"{__file__}.said", "w").close()
            while not os.path.exists(f"{__file__}.end"):
                time.sleep(0.01)
        else:
            while not os.path.exists(f"{__file__}.said"):
                time.sleep(0.01)
            time.sleep(0.5)
            print("Traceback (most recent call last):\\n  here\\nMyError: x", file=sys.stderr)
            time.sleep(3)
            print("still at work", file=sys.stderr)
            open(f"{__file__}.end", "w").close()
        """
    )
    done = gradcomp("run", "-n", "2", path)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert lines.index("[worker 1] MyError: x") < lines.index("[worker 1] still at work")


def test_a_worker_that_left_early_is_named_as_the_cause(program, tmp_path):
    source = """
        if index == 1:
            leave_id(sys.argv[1])
            sys.exit()
        wait_for_end(sys.argv[1])
        raise OSError("UNAVAILABLE: Socket closed")
    """
    path = program(ENDS_OF_OTHERS + textwrap.dedent(source))
    ids = tmp_path / "ids"
    ids.mkdir()
    done = gradcomp("run", "-n", "2", path, str(ids))
    assert done.returncode == 1
    left, died = done.stderr.splitlines()[-2:]
    assert re.match(r"gradcomp: worker 1 left first, after .* s, without an error, and", left)
    assert "likely cause. All workers must take the same number of steps." in left
    assert re.match(r"gradcomp: worker 0 died, after .*: OSError: UNAVAILABLE: Socket", died)


def test_timeout(program):
    done = gradcomp("run", "-n", "2", "--timeout", "1", program("time.sleep(60)"))
    assert done.returncode == 124
    assert "gradcomp: the time limit of 1 s was reached; ended workers: " in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_reaches_the_workers(program, signum):
    path = program("""
        try:
            print("up", flush=True)
            time.sleep(60)
        finally:
            print("saved")
    """)
    with subprocess.Popen(
        [*COMMAND, "run", "-n", "2", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    ) as process:
        assert {process.stdout.readline() for _ in range(2)} == {
            "[worker 0] up\n",
            "[worker 1] up\n",
        }
        process.send_signal(signum)
        out, err = process.communicate(timeout=300)
    assert sorted(out.splitlines()) == ["[worker 0] saved", "[worker 1] saved"]
    assert f"gradcomp: stopped by {signal.Signals(signum).name}." in err
    assert process.returncode == 128 + signum
    assert "Traceback" not in err


WAITS_FOR_A_SIGNAL = """
    import signal

    def save(number, frame):
        time.sleep(1)
        print("saved on", signal.Signals(number).name, flush=True)
        sys.exit(0)

    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, save)
    print("up", os.getpid(), flush=True)
    while True:
        time.sleep(0.1)
"""


@pytest.fixture
def waiting_job(program):
    """A job whose workers wait for a signal, and their process ids."""
    command = [*COMMAND, "run", "-n", "2", program(WAITS_FOR_A_SIGNAL)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=ENV, start_new_session=True) as job:
        yield job, [int(job.stdout.readline().split()[-1]) for _ in range(2)]
        job.kill()


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_other_signals_are_passed_on_to_the_workers(waiting_job, name):
    job, _ = waiting_job
    job.send_signal(signal.Signals[name])
    out, err = job.communicate(timeout=300)
    lines = [f"[worker {index}] saved on {name}" for index in (0, 1)]
    assert (job.returncode, sorted(out.splitlines())) == (0, lines)
    assert err == f"{STARTS.format('2 workers')}\n"


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_scheduler_may_signal_all_processes_of_a_job(waiting_job, name):
    job, workers = waiting_job
    for pid in (*workers, job.pid):
        os.kill(pid, signal.Signals[name])
    out, err = job.communicate(timeout=300)
    assert job.returncode == (143 if name == "SIGTERM" else 0)
    assert len(out.splitlines()) == (0 if name == "SIGTERM" else 2)
    assert "Traceback" not in err


def test_after_ctrl_c_an_error_in_the_clean_up_is_shown(program):
    path = program("""
        try:
            print("up", flush=True)
            time.sleep(60)
        finally:
            if index:
                raise OSError("cannot save")
    """)
    command = [*COMMAND, "run", "-n", "2", path]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=ENV) as process:
        assert len([process.stdout.readline() for _ in range(2)]) == 2
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert "[worker 1] OSError: cannot save" in err
    assert "[worker 0]" not in err


@pytest.mark.parametrize(
    ("options", "signals", "code"),
    [
        (["--grace", "60"], [signal.SIGINT, signal.SIGINT], 130),
        (["--grace", "0.5"], [signal.SIGTERM], 143),
        (["--grace", "0.5", "--timeout", "3"], [], 124),
    ],
)
def test_a_job_with_unread_output_can_be_ended(program, tmp_path, options, signals, code):
    begun = tmp_path / "begun"
    path = program(
        f"""
        while True:
            print("a line", flush=True)
            open({str(begun)!r}, "a").close()
        """
    )
    command = [*COMMAND, "run", "-n", "2", *options, path]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE) as job:
        while not begun.exists():
            time.sleep(0.1)
        time.sleep(1)  # so that the pipe is full
        for signum in signals:
            job.send_signal(signum)
            time.sleep(0.5)
        try:
            assert job.wait(timeout=300) == code
        finally:
            job.kill()


def test_a_time_limit_may_be_as_long_as_one_likes(program):
    done = gradcomp("run", "-n", "1", "--timeout", "1e300", program("print('a line')"))
    assert done.stdout == "[worker 0] a line\n"


def test_output_that_is_closed_does_not_end_the_job(program, tmp_path):
    path = program(f"print('a line'); open({str(tmp_path / 'end')!r} + str(index), 'w')")
    line = f"exec {shlex.join([*COMMAND, 'run', '-n', '2', path])} >&-"
    done = subprocess.run(["sh", "-c", line], env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "end1").exists()


def test_a_reader_that_goes_away_ends_the_job(program):
    path = program("""
        while True:
            print(os.getpid(), flush=True)
            time.sleep(0.05)
    """)
    with subprocess.Popen(
        [*COMMAND, "run", "-n", "1", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    ) as process:
        pid = int(process.stdout.readline().split()[-1])
        process.stdout.close()
        _, *lines = process.stderr.read().splitlines()
        assert lines == ["Error: Cannot write the output: Broken pipe."]
        assert process.wait(timeout=300) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("command", ["run", "run --json", "methods", "--version"])
def test_a_full_disk_under_the_output_is_one_line(program, tmp_path, command):
    path = program(f"""
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        print("a line", flush=True)
        time.sleep(0 if sys.argv[1:] else 60)
    """)
    options = {"run": ["-n", "1", path], "run --json": ["-n", "1", path, "end"]}.get(command, [])
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *command.split(), *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENV,
            timeout=50,
            check=False,
        )
    *_, line = done.stderr.splitlines()
    assert line == "Error: Cannot write the output: No space left on device."
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    if command == "run":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)


def test_on_a_terminal_bars_are_drawn_in_place(program):
    path = program("""
        for step in range(3):
            print(f"\\r{step + 1}/3", end="", flush=True)
            time.sleep(0.3)
        print("\\nend")
    """)
    shown = on_terminal("run", "-n", "2", path)
    assert "1/3" in shown  # Seen while it is drawn, not only when it is complete.
    assert re.search(r"\x1b\[\d+m\[worker 1\]", shown)
    *_, after_bars = shown.rpartition("\x1b[2K")
    assert "1/3" not in after_bars
    assert "\x1b[?25h" in after_bars  # The cursor is back.


def test_tables_fit_a_terminal_behind_the_names(program):
    path = program("print('columns', os.environ.get('COLUMNS'))")
    assert "columns 69" in on_terminal("run", "-n", "2", path)


def on_terminal(*args):
    """Runs gradcomp on a new terminal, and returns its output."""
    primary, secondary = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *args],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        env={**ENV, "TERM": "xterm-256color", "COLUMNS": "80"},
    ) as process:
        os.close(secondary)
        chunks = []
        while True:
            try:
                chunk = os.read(primary, 4096)
            except OSError:  # Linux' way to say that the other side is closed.
                break
            chunks.append(chunk)
        assert process.wait(timeout=300) == 0
    os.close(primary)
    return b"".join(chunks).decode()


OWN_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
"""


def test_a_closed_terminal_ends_the_job_as_ctrl_c_does(program, tmp_path):
    path = program(f"""
        try:
            while True:
                print("still here", flush=True)
                time.sleep(0.01)
        except KeyboardInterrupt:
            print("cleaning up", flush=True)
            time.sleep(0.5)
            open({str(tmp_path)!r} + f"/cleaned{{index}}", "w").close()
    """)
    terminal, secondary = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL + ENTRY, "run", "-n", "2", path],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        start_new_session=True,
        env={**ENV, "TERM": "xterm"},
    ) as process:
        os.close(secondary)
        seen = b""
        while seen.count(b"still here") < 10:
            seen += os.read(terminal, 4096)
        os.close(terminal)
        try:
            assert process.wait(timeout=300) == 128 + signal.SIGHUP
        finally:
            process.kill()
    assert {file.name for file in tmp_path.glob("cleaned*")} == {"cleaned0", "cleaned1"}


def test_the_workers_get_another_compressor(program):
    path = program("print(os.environ.get('GRADCOMP_COMPRESSOR'))")
    env = {"GRADCOMP_COMPRESSOR": "cast"}
    for args, says in (
        ([], "cast"),
        (["--compressor", "top_k(density=0.5)"], "top_k(density=0.5)"),
    ):
        assert gradcomp("run", "-n", "1", *args, path, env=env).stdout == f"[worker 0] {says}\n"


PRINTS_GPUS = "print(index, os.environ.get('CUDA_VISIBLE_DEVICES'))"


def gpus_of(done):
    assert done.returncode == 0, done.stderr
    return [line.partition("] ")[2] for line in sorted(done.stdout.splitlines())]


def machine_with(folder, listed, code=0):
    """The environment on a machine on which `nvidia-smi --list-gpus` says this."""
    folder = folder / f"ends with {code}"
    folder.mkdir()
    lists = folder / "nvidia-smi"
    lists.write_text(f"#!/bin/sh\n[ $1 = --list-gpus ] && printf '{listed}'; exit {code}\n")
    lists.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": None}


def run_with_gpus(each, workers, path, env):
    """As `gradcomp run`; a variable that is None is not set."""
    named = {name: value for name, value in (ENV | env).items() if value is not None}
    args = ["run", "-n", str(workers), "--gpus-per-worker", str(each), path]
    return subprocess.run(
        [*COMMAND, *args], capture_output=True, text=True, env=named, timeout=300, check=False
    )


def test_each_worker_gets_its_own_gpus(program, tmp_path):
    path = program(PRINTS_GPUS)
    three = machine_with(tmp_path, "GPU 0: H200 (UUID: a)\n  MIG 1g (UUID: m)\nGPU 1: H200\nGPU 2:")
    assert gpus_of(run_with_gpus(1, 3, path, three)) == ["0 0", "1 1", "2 2"]
    assert gpus_of(run_with_gpus(3, 1, path, three)) == ["0 0,1,2"]
    some = {"CUDA_VISIBLE_DEVICES": "3, 5,GPU-a,7,-1,8"}
    assert gpus_of(run_with_gpus(2, 2, path, some)) == ["0 3,5", "1 GPU-a,7"]


def test_gpus_are_left_alone_unless_asked_for(program):
    done = gradcomp("run", "-n", "2", program(PRINTS_GPUS), env={"CUDA_VISIBLE_DEVICES": "6,7"})
    assert gpus_of(done) == ["0 6,7", "1 6,7"]


def test_too_few_gpus_are_refused_with_how_many_there_are(program, tmp_path):
    path = program(PRINTS_GPUS)
    for env, says in (
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, "has 3: CUDA_VISIBLE_DEVICES is '0,1,2'"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "has 0: CUDA_VISIBLE_DEVICES is ''"),
        (machine_with(tmp_path, "GPU 0: H200"), "has 1: nvidia-smi lists them"),
        (machine_with(tmp_path, "No devices", 6), "has 0: nvidia-smi says 'No devices'"),
        ({"PATH": "", "CUDA_VISIBLE_DEVICES": None}, "which lists them, cannot be started "),
    ):
        done = run_with_gpus(2, 2, path, env)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "Error: 2 workers with 2 GPUs each need 4, but this machine has" in done.stderr
        assert says in done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["-n", "2"], "Missing argument 'PROGRAM'"),
        (["train.py"], "Missing option '-n', the number of workers to start on"),
        (["train.py", "-n", "2"], "to start on this machine. Put -n before the program."),
        (["-n", "0", __file__], "0 is not in the range x>=1"),
        (["-np", "2", __file__], "there is no option -np; write -n, as in -n 2."),
        (["-n", "two", __file__], "'two' is not a valid integer"),
        (["-n", "2", "no/such.py"], "There is no program 'no/such.py' here; expected"),
        (["-n", "2", ""], "There is no program '' here; expected a file, or -m and a module"),
        (["-n", "2", "--timeout", "0", __file__], "0.0 is not in the range x>0"),
        (["-n", "2", "--grace", "-1", __file__], "-1.0 is not in the range x>=0"),
        (["-n", "2", "--timeout", "nan", __file__], "'nan' is not a number of seconds"),
        (["-n", "2", "--gpus-per-worker", "0", __file__], "0 is not in the range x>=1"),
        (["-n", "2", "--gpus-per-worker", "1", "--horovod", __file__], "leave out --gpus-per-w"),
        (["--nothing", "-n", "2", __file__], "No such option"),
        (["--compressor", "adacopm", "-n", "2", __file__], "did you mean 'adacomp'?"),
        (["--compressor", "top-k(density=0.1)", "-n", "2", __file__], "did you mean 'top_k'"),
    ],
)
def test_wrong_use_is_one_sentence(args, says):
    done = gradcomp("run", *args)
    assert done.returncode == 2
    assert done.stdout == ""
    message = done.stderr.splitlines()[-1]
    assert message.startswith("Error: ")
    assert says in message


def test_a_worker_cannot_start_workers(program):
    done = gradcomp("run", "-n", "1", program(""), env={"TF_CONFIG": "{}"})
    assert done.returncode == 2
    assert "Error: TF_CONFIG is set already" in done.stderr


def test_a_program_may_begin_with_a_dash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("-d.py").write_text("print('from the program')")
    done = subprocess.run([sys.executable, *program_command("-d.py", False)], capture_output=True)
    assert done.stdout == b"from the program\n"


def test_starts_without_loading_tensorflow():
    code = """
        import sys
        import tf_gradcomp.cli.main
        assert not {"tensorflow", "keras", "numpy"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=ENV, check=True)


@quick
def test_two_tensorflow_workers_sum_past_a_dead_proxy(program):
    path = program("""
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()

        def replica():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", tf.constant(index + 1.0))

        print("sum", float(tf.function(lambda: strategy.run(replica))()))
    """)
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "example.com"}
    done = preloaded_gradcomp("run", "-n", "2", "--timeout", "100", path, env=proxy)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[worker 0] sum 3.0", "[worker 1] sum 3.0"]
    assert "gradcomp: the workers get no_proxy=example.com,localhost, " in done.stderr


def test_tf_config_written_is_what_tensorflow_reads(program):
    path = program("print(json.dumps(json.loads(os.environ['TF_CONFIG'])))")
    done = gradcomp("run", "-n", "2", path)
    configs = [json.loads(line.partition("] ")[2]) for line in sorted(done.stdout.splitlines())]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    assert all(a.startswith("localhost:") for a in configs[0]["cluster"]["worker"])
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
    ]
