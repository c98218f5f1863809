"""`gradcomp run`: trains on several worker processes, here or as `srun` or `mpirun` say."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType

import click

from tf_gradcomp.cli import quiet
from tf_gradcomp.cli.json_output import print_json
from tf_gradcomp.cli.options import Seconds, Threads, Workers
from tf_gradcomp.cli.output import (
    WorkerOutput,
    columns_beside_names,
    echo,
    leave_terminal,
    leave_what_nobody_reads,
)
from tf_gradcomp.environment import COMPRESSOR
from tf_gradcomp.launch import (
    JobResult,
    LocalJob,
    Rank,
    addresses_of_all,
    gpus_of_workers,
    horovod_ranks,
    scheduled,
)
from tf_gradcomp.tf_config import VARIABLE as TF_CONFIG
from tf_gradcomp.tf_config import make_tf_config

_TAIL_LINES = 10
_GRACE = 5.0  # seconds
_LONGEST = 1e8  # seconds, of a timer
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command(
    # What follows the program is the program's own, whatever it looks like.
    context_settings={"allow_interspersed_args": False},
    short_help="Start the worker processes of a training program.",
)
@click.option(
    "-n",
    "--workers",
    type=Workers(min=1),
    help="Start so many worker processes on this machine. Leave this out under srun and mpirun, "
    "which start one gradcomp for each worker.",
)
@click.option("-m", "--module", is_flag=True, help="Run PROGRAM as a module, as `python -m` does.")
@click.option(
    "--output",
    type=click.Choice(["all", "chief"]),
    default="all",
    show_default=True,
    help="Show the output of all workers, or of worker 0 alone. The last lines of a worker that "
    "fails are always shown.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Show all that workers write: TensorFlow's own information at start-up, an error that "
    "several workers share on each of them, and where Ctrl-C has found them.",
)
@click.option(
    "--grace",
    type=Seconds(min=0),
    default=_GRACE,
    show_default=True,
    metavar="SECONDS",
    help="Let the other workers go on for so long when one has failed, or after Ctrl-C.",
)
@click.option(
    "--timeout",
    type=Seconds(min=0, min_open=True),
    metavar="SECONDS",
    help="End the whole job after this time, with exit code 124.",
)
@click.option(
    "--threads-per-worker",
    type=Threads(),
    help="Give each worker's TensorFlow operations so many threads, or 'auto' to share the cores "
    "out. By default TensorFlow decides, and every worker takes all cores.",
)
@click.option(
    "--gpus-per-worker",
    type=click.IntRange(min=1),
    metavar="N",
    help="Give each worker so many GPUs of this machine for itself, by CUDA_VISIBLE_DEVICES. By "
    "default every worker sees all GPUs, and would take them all.",
)
@click.option(
    "--compressor",
    metavar="NAME|NAME(KEY=VALUE,...)",
    help="Exchange gradients by this method, in place of the one that the program names. It sets "
    "GRADCOMP_COMPRESSOR for the workers.",
)
@click.option(
    "--horovod",
    is_flag=True,
    help="Start the workers as ranks of Horovod, as `horovodrun --gloo` does, without TF_CONFIG.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print how the job ended as one JSON object on stdout, and what workers print on stderr.",
)
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int | None,
    module: bool,
    output: str,
    verbose: bool,
    grace: float,
    timeout: float | None,
    threads_per_worker: int | str | None,
    gpus_per_worker: int | None,
    compressor: str | None,
    horovod: bool,
    as_json: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Start the worker processes of the Python program PROGRAM.

    Each worker runs `python PROGRAM ARGS` and finds in TF_CONFIG who the workers are and which of
    them it is. When one fails, the others are ended, and the exit code is that of the one that
    failed first.

    On several machines, srun or mpirun starts one gradcomp for each worker, and tells it which
    worker that is and where the others are.

    With --horovod, the workers are ranks of Horovod, and find each other by `hvd.init()`.

    \b
    Examples:
      gradcomp run -n 4 train.py --epochs 10
      srun -N 2 --kill-on-bad-exit gradcomp run train.py --epochs 10
      mpirun -H host1,host2 gradcomp run train.py --epochs 10
    """  # noqa: D301
    _refuse_nested_start()
    place = scheduled()
    check_scheduled(place, workers, horovod, gpus_per_worker is not None)
    workers = 1 if place else _given(workers, args)
    gpus = _gpus(workers, gpus_per_worker, horovod) if gpus_per_worker else None
    command = [sys.executable, *program_command(program, module), *args]
    env = {**os.environ, **thread_settings(threads_per_worker, workers, place)}
    if compressor is not None:
        env[COMPRESSOR] = compressor
    if place:
        result = run_rank(
            place, command, env, output, grace, timeout, all_to_stderr=as_json, verbose=verbose
        )
    else:
        with _ranks(workers) if horovod else nullcontext() as ranks:
            result = run_job(
                command,
                workers,
                env,
                output,
                grace,
                timeout,
                ranks or gpus,
                tf_config=not horovod,
                all_to_stderr=as_json,
                verbose=verbose,
            )
    report_end(result, shown_tails=output == "all")
    if as_json:
        print_json(result.as_dict())
    sys.exit(result.exit_code)


def run_job(
    command: Sequence[str],
    workers: int,
    env: Mapping[str, str],
    output: str,
    grace: float = _GRACE,
    timeout: float | None = None,
    worker_env: Sequence[Mapping[str, str]] | None = None,
    part: Rank | None = None,
    *,
    tf_config: bool = True,
    all_to_stderr: bool = False,
    verbose: bool = False,
) -> JobResult:
    """Runs a job to its end, showing what `output` says; Ctrl-C ends it.

    With `part`, its one worker is that of a larger job; without `verbose`, what `Quiet` leaves out
    is not shown. The rest is `LocalJob`'s.
    """
    of_all = part.size if part else workers
    is_quiet = quiet.wanted(verbose)
    if is_quiet:
        env = {quiet.LEVEL: "1", **env}
    if part is None and sys.stdout is not None and sys.stdout.isatty():
        env = {**env, "COLUMNS": str(columns_beside_names(of_all))}
    with (
        _stop_requests(grace, timeout) as requests,
        WorkerOutput(
            of_all,
            chief_only=output == "chief",
            all_to_stderr=all_to_stderr,
            bars=part is None,
            quiet=is_quiet,
        ) as shown,
        LocalJob(
            command,
            workers,
            env=env,
            worker_env=worker_env,
            tf_config=tf_config,
            first=part.rank if part else 0,
            on_line=shown.line,
            on_progress=shown.progress,
            grace=grace,
            timeout=timeout,
        ) as job,
    ):
        requests.pass_to(job, shown)
        while job.step():
            shown.show_held_back()
        return job.run()  # reads what is left in the pipes


def run_rank(
    place: Rank,
    command: Sequence[str],
    env: Mapping[str, str],
    output: str,
    grace: float = _GRACE,
    timeout: float | None = None,
    *,
    all_to_stderr: bool = False,
    verbose: bool = False,
) -> JobResult:
    """Runs the one worker of a scheduler's job that this process is to start."""
    with ExitStack() as stack:
        try:
            addresses = stack.enter_context(addresses_of_all(place))
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
        own = {TF_CONFIG: make_tf_config(addresses, place.rank)}
        return run_job(
            command,
            1,
            env,
            output,
            grace,
            timeout,
            [own],
            place,
            tf_config=False,
            all_to_stderr=all_to_stderr,
            verbose=verbose,
        )


def check_scheduled(
    place: Rank | None, workers: int | None, horovod: bool = False, gpus: bool = False
) -> None:
    """Refuses what is for one machine where a scheduler has started this process."""
    if place is None:
        return
    started = f"{place.scheduler} has started this process as rank {place.rank} of {place.size}"
    if workers is not None:
        raise click.UsageError(f"{started}, and each starts one worker: leave out -n.")
    if gpus:
        raise click.UsageError(
            f"{started}: leave out --gpus-per-worker, which shares out the GPUs of one machine; "
            "srun --gpus-per-task gives each its own."
        )
    if horovod:
        raise click.UsageError(
            f"{started}: ranks of Horovod need no gradcomp run; start the program itself, by "
            "python."
        )


@contextmanager
def _ranks(number: int) -> Iterator[list[dict[str, str]]]:
    with ExitStack() as stack:
        try:
            ranks = stack.enter_context(horovod_ranks(number))
        except ImportError as error:
            raise click.ClickException(str(error)) from error
        yield ranks


def _gpus(workers: int, each: int, horovod: bool) -> list[dict[str, str]]:
    if horovod:
        raise click.UsageError(
            "Ranks of Horovod choose their GPU themselves, by hvd.local_rank(): leave out "
            "--gpus-per-worker."
        )
    try:
        return gpus_of_workers(workers, each)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _given(workers: int | None, args: tuple[str, ...]) -> int:
    if workers is not None:
        return workers
    raise click.UsageError(
        "Missing option '-n', the number of workers to start on this machine."
        f"{workers_behind(args)} Only where srun or mpirun starts several gradcomp, it is not "
        "needed."
    )


def workers_behind(args: Sequence[str]) -> str:
    """What to say where the number of workers is among the program's own arguments."""
    return "" if {"-n", "--workers"}.isdisjoint(args) else " It goes before the program."


def _refuse_nested_start() -> None:
    if "HOROVOD_RANK" in os.environ:
        raise click.UsageError(
            "HOROVOD_RANK is set already, so this process is itself a rank of some job; start the "
            "program without gradcomp run."
        )
    if "TF_CONFIG" in os.environ:
        raise click.UsageError(
            "TF_CONFIG is set already, so this process is itself a worker of some job; start the "
            "program without gradcomp run, or unset TF_CONFIG first (env -u TF_CONFIG gradcomp "
            "run ...)."
        )


def program_command(program: str, module: bool) -> list[str]:
    """What follows the interpreter on a worker's command line."""
    if module:
        return ["-m", program]
    if not any(path.is_file() for path in (Path(program), Path(program, "__main__.py"))):
        raise click.UsageError(
            f"There is no program {program!r} here; expected a file, or -m and a module."
        )
    return [f"./{program}" if program.startswith("-") else program]


def thread_settings(
    threads: int | str | None, workers: int, place: Rank | None = None
) -> dict[str, str]:
    """The environment variables that give each worker so many threads.

    Args:
        threads: Their number; `"auto"` to share the cores out; None to leave it to TensorFlow.
        workers: How many are started from here.
        place: What a scheduler says of this process. It may have given ranks cores of their own, or
            some to several of them, or none.
    """
    if threads is None:
        return {}
    if threads == "auto":
        threads = len(os.sched_getaffinity(0)) // workers
        if place is not None:
            threads = min(threads, (os.cpu_count() or 1) // place.here)
        threads = max(1, threads)
    # Not TF_NUM_INTEROP_THREADS: a collective that waits for the others occupies such a thread.
    return {"TF_NUM_INTRAOP_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}


class _StopRequests:
    """Signals that asked gradcomp to end, kept until there is a job to pass them to.

    Where a job should have ended and has not, its output may be waiting for a reader: then it goes
    nowhere.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._job: LocalJob | None = None
        self._shown: WorkerOutput | None = None
        self._early: list[int] = []
        self._stops = False

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGALRM:
            leave_what_nobody_reads()
            return
        _alarm_in(0 if self._stops else self._grace)
        self._stops = True
        if signum == signal.SIGHUP:
            leave_terminal()
        if self._job is None:
            self._early.append(signum)
        else:
            self._stop(signum)

    def pass_to(self, job: LocalJob, shown: WorkerOutput) -> None:
        self._job, self._shown = job, shown
        for signum in self._early:
            self._stop(signum)

    def _stop(self, signum: int) -> None:
        if self._job and self._shown:
            self._shown.stopping()
            self._job.stop(signum)


def _alarm_in(seconds: float) -> None:
    """SIGALRM once, and then every second, for all that is still to be written."""
    signal.setitimer(signal.ITIMER_REAL, min(max(seconds, 0.1), _LONGEST), 1)


@contextmanager
def _stop_requests(grace: float, timeout: float | None) -> Iterator[_StopRequests]:
    """Takes Ctrl-C, SIGTERM and the closing of the terminal as requests to stop the job."""
    requests = _StopRequests(grace)
    before = {signum: signal.getsignal(signum) for signum in (*_STOP_SIGNALS, signal.SIGALRM)}
    for signum, handler in before.items():
        # Ignored on purpose: by nohup, or by a shell that runs this in the background.
        if handler is not signal.SIG_IGN:
            signal.signal(signum, requests)
    if timeout is not None:
        _alarm_in(timeout + grace)
    try:
        yield requests
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def report_end(result: JobResult, *, shown_tails: bool) -> None:
    """Says which worker failed first, with its last lines unless they have been shown."""
    first = result.first_failure
    if first is not None and first.index != 0 and not shown_tails:
        for line in first.stderr_tail[-_TAIL_LINES:]:
            echo(f"[worker {first.index}] {line}", err=True)
    for line in result.summary():
        click.secho(f"gradcomp: {line}", err=True, fg="red" if first is not None else None)
