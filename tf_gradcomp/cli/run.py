"""`gradcomp run`: trains on several worker processes, also under `srun` or `mpirun`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from tf_gradcomp.cli.job import GRACE, addresses_of, report_end, run_job, run_rank
from tf_gradcomp.cli.options import Seconds, Workers, print_json
from tf_gradcomp.cli.restarts import run_with_restarts
from tf_gradcomp.environment import COMPRESSOR
from tf_gradcomp.launch import (
    Connection,
    Host,
    JobResult,
    Rank,
    connected,
    gpus_of_workers,
    horovod_ranks,
    is_started_alone,
    parse_hosts,
    scheduled,
)

_OF_EACH_RUN = ("exit_code", "first_failure")


@click.command(
    # All arguments after the program belong to the program.
    context_settings={"allow_interspersed_args": False},
    short_help="Start the worker processes of a training program.",
)
@click.option(
    "-n",
    "--workers",
    type=Workers(min=1),
    help="Number of worker processes to start on this machine. Leave this out under srun and "
    "mpirun, which start one gradcomp for each worker.",
)
@click.option(
    "-H",
    "--hosts",
    metavar="HOST[:N],...",
    help="Start N workers on each of these hosts, or one, by ssh. Each host needs this Python, its "
    "packages, and the program, in the same folders as here.",
)
@click.option(
    "-x",
    "--export",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Pass an environment variable to the workers on hosts; repeat it for several. TF_CONFIG "
    "and all GRADCOMP_ variables are always passed.",
)
@click.option("-m", "--module", is_flag=True, help="Run PROGRAM as a module, as `python -m` does.")
@click.option(
    "--output",
    type=click.Choice(["all", "chief"]),
    default="all",
    show_default=True,
    help="Show the output of all workers, or only of worker 0. The last lines of a worker that "
    "fails, and warnings of workers that wait for others, are always shown.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Show all output of the workers: TensorFlow's information at start-up, the same error "
    "from several workers, and the tracebacks of Ctrl-C.",
)
@click.option(
    "--grace",
    type=Seconds(min=0),
    default=GRACE,
    show_default=True,
    metavar="SECONDS",
    help="How long the other workers may continue after a worker has failed, or after Ctrl-C.",
)
@click.option(
    "--timeout",
    type=Seconds(min=0, min_open=True),
    metavar="SECONDS",
    help="End the whole job after this time, with exit code 124.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="How many times to start the job again when a worker has died. The program must resume "
    "by itself, as with gc.callbacks.BackupAndRestore.",
)
@click.option(
    "--gpus-per-worker",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of GPUs that each worker gets for itself, by CUDA_VISIBLE_DEVICES. By default "
    "every worker sees all GPUs and uses all of them.",
)
@click.option(
    "--compressor",
    metavar="NAME|NAME(KEY=VALUE,...)",
    help="Exchange gradients by this method, in place of the program's own method. Sets "
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
    help="Print the job's result as one JSON object on stdout, and the workers' output on stderr.",
)
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int | None,
    hosts: str | None,
    export: tuple[str, ...],
    module: bool,
    output: str,
    verbose: bool,
    grace: float,
    timeout: float | None,
    max_restarts: int,
    gpus_per_worker: int | None,
    compressor: str | None,
    horovod: bool,
    as_json: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Start the worker processes of the Python program PROGRAM.

    Each worker runs `python PROGRAM ARGS` and finds in TF_CONFIG the addresses of all workers and
    its own index. When a worker fails, the other workers are ended, and the exit code is the first
    failed worker's exit code.

    On several machines, -H starts the workers by ssh. Or srun or mpirun starts one gradcomp for
    each worker, and tells it the worker's index and the other workers' addresses.

    With --horovod, the workers are ranks of Horovod, and find each other by `hvd.init()`.

    \b
    Examples:
      gradcomp run -n 4 train.py --epochs 10
      gradcomp run -H host1,host2:2 train.py --epochs 10
      srun -N 2 --kill-on-bad-exit gradcomp run train.py --epochs 10
      mpirun -H host1,host2 gradcomp run train.py --epochs 10
    """  # noqa: D301
    _refuse_nested_start()
    place = scheduled()
    check_scheduled(
        place, workers, horovod, gpus_per_worker is not None, hosts is not None, max_restarts > 0
    )
    exported = _exported(export, hosts)
    there = _hosts(hosts, workers, horovod, gpus_per_worker) if hosts is not None else []
    if there:
        workers = sum(host.workers for host in there)
    workers = 1 if place else _given(workers, args)
    gpus = _gpus(workers, gpus_per_worker, horovod) if gpus_per_worker else None
    command = [sys.executable, *program_command(program, module, here=not there), *args]
    env = dict(os.environ)
    needed_paths = [os.getcwd(), *([] if module else [os.path.abspath(program)])]
    if compressor is not None:
        env[COMPRESSOR] = compressor
    shown_tails = output == "all"

    def run_once(left: float | None, more: Mapping[str, str]) -> JobResult:
        with ExitStack() as stack:
            ranks = stack.enter_context(_ranks(workers)) if horovod else None
            connections = stack.enter_context(_connected(there, needed_paths)) if there else None
            return run_job(
                command,
                workers,
                {**env, **more},
                output,
                grace,
                left,
                ranks or gpus or [exported] * workers,
                connections=connections,
                tf_config=not horovod,
                all_to_stderr=as_json,
                verbose=verbose,
            )

    if place:
        with addresses_of(place) as addresses:
            result = run_rank(
                place,
                addresses,
                timeout,
                command=command,
                env=env,
                output=output,
                grace=grace,
                all_to_stderr=as_json,
                verbose=verbose,
            )
        results = [result]
    else:
        results = run_with_restarts(run_once, max_restarts, timeout, shown_tails=shown_tails)
    end = results[-1]
    report_end(end, shown_tails=shown_tails)
    if as_json:
        runs = [{key: run.as_dict()[key] for key in _OF_EACH_RUN} for run in results]
        print_json({**end.as_dict(), "restarts": len(runs) - 1, "runs": runs})
    sys.exit(end.exit_code)


def check_scheduled(
    place: Rank | None,
    workers: int | None,
    horovod: bool = False,
    gpus: bool = False,
    hosts: bool = False,
    restarts: bool = False,
) -> None:
    """Refuses options for one machine if a scheduler has started this process."""
    if place is None:
        return
    started = f"{place.scheduler} has started this process as rank {place.rank} of {place.size}"
    if workers is not None:
        raise click.UsageError(f"{started}, and each starts one worker: leave out -n.")
    if hosts:
        raise click.UsageError(f"{started}, on the hosts that it knows: leave out -H.")
    if restarts:
        raise click.UsageError(
            f"{started}: leave out --max-restarts, and start {place.scheduler} again "
            "(docs/lost_workers.md)."
        )
    if gpus:
        raise click.UsageError(
            f"{started}: leave out --gpus-per-worker, which divides the GPUs of one machine; srun "
            "--gpus-per-task gives each worker its own."
        )
    if horovod:
        raise click.UsageError(
            f"{started}: ranks of Horovod need no gradcomp run; start the program itself, by "
            "python."
        )


def _hosts(
    text: str, workers: int | None, horovod: bool, gpus_per_worker: int | None
) -> list[Host]:
    for value, option, instead in (
        (workers, "-n", "-H says how many workers each host has, as in host1:2"),
        (horovod, "--horovod", "start ranks of Horovod on hosts by horovodrun --gloo -H"),
        (
            gpus_per_worker,
            "--gpus-per-worker",
            "start one worker on each host, as in host1,host2; it takes all GPUs of its host",
        ),
    ):
        if value:
            raise click.UsageError(f"Leave out {option}: {instead}.")
    try:
        return parse_hosts(text)
    except ValueError as error:
        raise click.UsageError(f"-H: {error}.") from error


@contextmanager
def _connected(hosts: Sequence[Host], needed_paths: Sequence[str]) -> Iterator[list[Connection]]:
    with ExitStack() as stack:
        try:
            connections = stack.enter_context(connected(hosts, needed_paths))
        except ConnectionError as error:
            raise click.ClickException(str(error)) from error
        yield connections


def _exported(export: Sequence[str], hosts: str | None) -> dict[str, str]:
    """Returns the variables that `-x` passes to workers on hosts."""
    if export and hosts is None:
        raise click.UsageError("-x is for workers on hosts (-H); others get all variables.")
    variables = {}
    for text in export:
        name, is_given, value = text.partition("=")
        if not is_given and name not in os.environ:
            raise click.UsageError(f"-x: there is no variable {name} here; give it a value.")
        variables[name] = value if is_given else os.environ[name]
    return variables


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
    if is_started_alone():
        return 1
    raise click.UsageError(
        "Missing option '-n', the number of workers to start on this machine."
        f"{misplaced_workers_hint(args)} Only jobs with hosts (-H), and jobs started by srun or "
        "mpirun, do not need it."
    )


def misplaced_workers_hint(args: Sequence[str]) -> str:
    """Returns a hint if the number of workers is among the program's own arguments."""
    return "" if {"-n", "--workers"}.isdisjoint(args) else " Put -n before the program."


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


def program_command(program: str, module: bool, *, here: bool = True) -> list[str]:
    """Returns the interpreter's arguments that start the program, which may have to be here."""
    if module:
        return ["-m", program]
    if here and not any(path.is_file() for path in (Path(program), Path(program, "__main__.py"))):
        raise click.UsageError(
            f"There is no program {program!r} here; expected a file, or -m and a module."
        )
    return [f"./{program}" if program.startswith("-") else program]
