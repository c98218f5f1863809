"""Runs programs in processes that have TensorFlow, Keras and the ops loaded, which takes seconds.

    python preloaded.py serve FILE        # forks a process for each program it is sent
    python preloaded.py PROGRAM ARGS...   # as `python PROGRAM ARGS...`, but in such a process
    python preloaded.py OPTIONS...        # as `python OPTIONS...`

A server listens at the socket that is its open file of that number, until its input ends. The other
finds it by the variable `PRELOADED`, and is the program to all who look at it: its arguments,
environment, folder and output are the program's, SIGINT and SIGTERM are passed on, it ends as the
program does, and when it is killed, so is the program. It loads next to nothing, to be quick.

A program that ends well is gone at once: only in `tests/distributed/test_end.py` does Python take
TensorFlow apart, as it does for users.

To such a program, `sys.executable` is `preloaded.sh`, so that what it starts is forked, too.
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

STANDARD_FILES = 3
MOST = 1 << 20  # bytes of a message


def address(name):
    """Not in the file system, and so gone with those who use it."""
    return f"\0gradcomp-tests-{name}"


def run():
    """Has a server run the program, and ends as it does."""
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
    """Forks who looks after a program, for each that is asked for; returns in the programs too."""
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    import tf_gradcomp
    from tf_gradcomp.ops import library

    _ = tf_gradcomp.MultiWorkerMirroredStrategy  # imports what it needs
    library.load()
    gc.freeze()  # else each program would look through all of that when it ends
    gc.set_threshold(100_000)  # to trace a function takes a tenth less than with the usual 700
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who look after programs
    with socket.socket(fileno=int(sys.argv[2])) as listener:
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            with listener.accept()[0] as client:
                if os.fork() == 0:
                    listener.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return look_after(client)


def look_after(client):
    """Runs what a client asks for, in a process group of its own, until one of the two ends."""
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
    os.killpg(program, signal.SIGKILL)  # what it has started
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(OSError):  # the client may have ended
        client.send(str(code).encode())
    os._exit(0)


def become(files, argv, environment, folder):
    """Runs the program in this process, which then ends."""
    import runpy

    import numpy as np

    os.setpgid(0, 0)
    # A shell has what it starts in the background ignore interruptions, and tests send some.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment, PRELOADED_PYTHON=sys.executable)
    sys.executable = os.path.join(os.path.dirname(os.path.abspath(__file__)), "preloaded.sh")
    np.random.seed()  # Python's own generator is seeded anew in each process by itself
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as ending:
        if not isinstance(ending.code, int | None):
            raise
        end(ending.code or 0)
    end(0)


def end(code):
    """Ends as Python does, but takes nothing apart.

    Python would look at each object of TensorFlow once more, which takes as long as many a program.
    """
    threading._shutdown()  # waits for threads, as the children of multiprocessing do
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.3)  # another worker may still be fetching what this one has sent last
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    elif sys.argv[1].startswith("-"):
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    else:
        run()
