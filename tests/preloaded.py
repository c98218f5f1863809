"""Runs programs in processes that have already loaded TensorFlow, Keras and the ops.

    python preloaded.py serve FILE        # forks a process for each program it is sent
    python preloaded.py PROGRAM ARGS...   # as `python PROGRAM ARGS...`, but in such a process
    python preloaded.py OPTIONS...        # as `python OPTIONS...`

Loading takes seconds, so tests fork from such processes. A server listens at the socket with this
file number, until its input ends. The client finds the server by the variable `PRELOADED`, and
looks like the program from outside: it has the program's arguments, environment, folder and output,
passes on SIGINT and SIGTERM, and ends as the program does. When the client is killed, the program
is killed, too. The client imports almost nothing, so it starts fast.

A program that ends well is gone at once: only in `tests/distributed/test_end.py` does Python take
TensorFlow apart, as it does for users.

In such a program, `sys.executable` is `preloaded.sh`, so that its child programs are forked, too.

TensorFlow's graph optimizer is off in programs, as it takes a tenth of the time of short training.
Tracing takes less time, too (`tests/tracing.py`). Programs with the variable `OPTIMIZE_GRAPHS`,
such as examples and those of pages, run as for users.
"""

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time

OPTIMIZE_GRAPHS = "GRADCOMP_TESTS_OPTIMIZE_GRAPHS"
CPU_LOG = "GRADCOMP_TESTS_CPU_LOG"  # the file that `note_cpu_seconds` writes
STANDARD_FILES = 3
MOST = 1 << 20  # bytes of a message


def address(name):
    """An abstract socket, which disappears with its users."""
    return f"\0gradcomp-tests-{name}"


def run():
    """Lets a server run the program, and ends as the program does."""
    request = {"argv": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address(os.environ["PRELOADED"]))
        socket.send_fds(server, [json.dumps(request).encode()], range(STANDARD_FILES))
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda signum, _: server.send(str(int(signum)).encode()))
        answer = server.recv(MOST)
    if not answer:
        sys.exit("preloaded.py: the server has ended")
    code = int(answer)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def serve():
    """Forks a supervisor for each requested program; also returns in the programs."""
    import keras  # noqa: F401
    import pytest  # noqa: F401  # which a test file imports when it is run as a program
    import tensorflow  # noqa: F401

    import tf_gradcomp
    from tests import tracing  # noqa: F401
    from tf_gradcomp.ops import library

    _ = tf_gradcomp.MultiWorkerMirroredStrategy  # imports everything it needs
    library.load()
    gc.freeze()  # otherwise each program would scan all of these objects when it ends
    gc.set_threshold(100_000)  # tracing takes a tenth less time than with the usual 700
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the supervisors
    with socket.socket(fileno=int(sys.argv[2])) as listener:
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            with listener.accept()[0] as client:
                if os.fork() == 0:
                    listener.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return look_after(client)


def look_after(client):
    """Runs a client's program in its own process group, until the client or the program ends."""
    message, files, _, _ = socket.recv_fds(client, MOST, STANDARD_FILES)
    if not message:
        os._exit(0)
    program = os.fork()
    if program == 0:
        client.close()
        return become(files, **json.loads(message))
    os.setpgid(program, program)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(program)
    while ended not in select.select([client, ended], [], [])[0]:
        os.killpg(program, int(client.recv(MOST) or signal.SIGKILL))
    os.killpg(program, signal.SIGKILL)  # the program's children
    _, status, usage = os.wait4(program, 0)
    note_cpu_seconds(json.loads(message)["environment"], usage.ru_utime + usage.ru_stime)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OSError):  # the client may have ended
        client.send(str(code).encode())
    os._exit(0)


def note_cpu_seconds(environment, seconds):
    """Appends a program's CPU time to the log of the test run, with the file of its test."""
    log = environment.get(CPU_LOG)
    if log:
        file = environment.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
        with open(log, "a") as lines:
            lines.write(f"{seconds:.3f} {file}\n")


def become(files, argv, environment, folder):
    """Runs the program in this process, which then ends."""
    import runpy

    import numpy as np

    from tests import tracing

    os.setpgid(0, 0)
    # A shell lets background processes ignore interruptions, but tests send interruptions.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment, PRELOADED_PYTHON=sys.executable)
    sys.executable = os.path.join(os.path.dirname(os.path.abspath(__file__)), "preloaded.sh")
    np.random.seed()  # Python reseeds its own generator in each process
    if OPTIMIZE_GRAPHS not in environment:
        run_graphs_as_traced()
        tracing.trace_faster()
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    local = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [path for path in local if path not in sys.path]
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as ending:
        if not isinstance(ending.code, int | None):
            raise
        end(ending.code or 0)
    end(0)


def run_graphs_as_traced():
    """Switches TensorFlow's graph optimizer off."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def end(code):
    """Ends as Python does, but takes nothing apart.

    Python would look at each object of TensorFlow once more, which takes as long as many a program.
    """
    threading._shutdown()  # waits for threads, like children of multiprocessing
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.3)  # another worker may still be receiving this worker's last data
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    elif sys.argv[1].startswith("-"):
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    else:
        run()
