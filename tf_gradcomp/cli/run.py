"""`gradcomp run`: trains on several worker processes, also under `srun` or `mpirun`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from tf_gradcomp.cli.methods import CompressorText
from tf_gradcomp.cli.options import Seconds, Workers, print_json
from tf_gradcomp.environment import COMPRESSOR
from tf_gradcomp.launch import (
    Host,
    JobResult,
    addresses_of_ranks,
    connected,
    end_rank,
    find_rank,
    gpus_of_workers,
    horovod_ranks,
    parse_hosts,
)
from tf_gradcomp.launch.job import GRACE, report_end, run_job, run_with_restarts
from tf_gradcomp.launch.output import echo
from tf_gradcomp.launch.preload import Preloaded

# The options that a job cannot have, each with the reason or the way out.
NOT_UNDER_SCHEDULER = {
    "-n": "each process starts one worker",
    "-H": "the scheduler knows the hosts",
    "--max-restarts": "a loop in the job's script starts it again (docs/clusters.md#lost-workers)",
    "--gpus-per-worker": "srun --gpus-per-task gives each worker its own GPUs",
    "--horovod": "ranks of Horovod need no gradcomp run; start the program itself, by python",
}
NOT_WITH_HOSTS = {
    "-n": "each host has a number of workers, as in host1:2",
    "--horovod": "start ranks of Horovod on hosts by horovodrun --gloo -H",
    "--gpus-per-worker": "start one worker on each host; it takes all GPUs of its host",
    "--preload": "modules are imported in advance only on this machine",
}
_NOT_WITH_HOROVOD = {"--gpus-per-worker": "ranks choose their GPU by hvd.local_rank()"}


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
    help="Start the workers by ssh: one on each host, or N with HOST:N. Each host needs this "
    "Python, its packages, and the program, in the same folders as here.",
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
    "--preload",
    metavar="MODULE,...",
    help="Import these modules in advance for a restart, in a process for each worker. Restarted "
    "workers do not wait for the import, and find what the modules then read from the environment. "
    "Usually: --preload keras,tf_gradcomp.",
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
    type=CompressorText(),
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
    preload: str | None,
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
    options = {
        "-n": workers,
        "-H": hosts,
        "--max-restarts": max_restarts,
        "--preload": preload,
        "--gpus-per-worker": gpus_per_worker,
        "--horovod": horovod,
    }
    modules = _modules_in(preload, max_restarts)
    rank = find_rank()
    if rank and not rank.is_alone:
        refuse(options, NOT_UNDER_SCHEDULER, rank.description)
        workers = 1
    if horovod:
        refuse(options, _NOT_WITH_HOROVOD, "--horovod")
    exported = _exported_variables(export, hosts)
    host_list = []
    if hosts is not None:
        refuse(options, NOT_WITH_HOSTS, "-H")
        host_list = hosts_of_job(hosts)
        workers = sum(host.workers for host in host_list)
    if workers is None and rank:
        workers = 1
    if workers is None:
        raise click.UsageError(
            "Missing option '-n', the number of workers to start on this machine."
            f"{misplaced_workers_hint(args)} Only jobs with hosts (-H), and jobs started by srun "
            "or mpirun, do not need it."
        )
    worker_env: Sequence[Mapping[str, str]] = [exported] * workers
    if gpus_per_worker:
        with shown_errors(ValueError, "%s", click.UsageError):
            worker_env = gpus_of_workers(workers, gpus_per_worker)
    command = [sys.executable, *program_command(program, module, is_here=not host_list), *args]
    paths = needed_paths(program, module)
    env = dict(os.environ)
    if compressor is not None:
        env[COMPRESSOR] = compressor

    def run_once(seconds: float | None, variables: Mapping[str, str]) -> JobResult:
        ranks = connections = addresses = None
        with contextlib.ExitStack() as stack:
            with shown_errors((ConnectionError, ImportError, RuntimeError)):
                if horovod:
                    ranks = stack.enter_context(horovod_ranks(workers))
                if host_list:
                    connections = stack.enter_context(connected(host_list, paths))
                if rank and not rank.is_alone:
                    addresses = stack.enter_context(addresses_of_ranks(rank))
            if not addresses:
                where = f" on {hosts}" if hosts else ""
                echo(f"gradcomp: starting {workers} worker{'s' * (workers > 1)}{where}", err=True)
            return run_job(
                command,
                workers,
                {**env, **variables},
                output=output,
                grace=grace,
                timeout=seconds,
                worker_env=ranks or worker_env,
                rank=rank if addresses else None,
                addresses=addresses,
                connections=connections,
                preloaded=preloaded,
                tf_config=not horovod,
                all_to_stderr=as_json,
                verbose=verbose,
            )

    shown_tails = output == "all"
    with Preloaded(modules, workers) if modules else contextlib.nullcontext() as preloaded:
        results = run_with_restarts(run_once, max_restarts, timeout, shown_tails=shown_tails)
    report_end(results[-1], shown_tails=shown_tails)
    if as_json:
        runs = [
            {name: result.as_dict()[name] for name in ("exit_code", "first_failure")}
            for result in results
        ]
        print_json({**results[-1].as_dict(), "restarts": len(runs) - 1, "runs": runs})
    if results[-1].exit_code == 0:
        end_rank()
    sys.exit(results[-1].exit_code)


def _modules_in(preload: str | None, max_restarts: int) -> list[str]:
    """Returns the modules of the option `--preload`."""
    if preload is None:
        return []
    if not max_restarts:
        raise click.UsageError("--preload is for restarts; give --max-restarts, too.")
    modules = preload.split(",")
    for module in modules:
        package = module.partition(".")[0]
        if not package or importlib.util.find_spec(package) is None:
            raise click.UsageError(f"--preload: there is no module {module!r} here.")
    return modules


def refuse(options: Mapping[str, object], refused: Mapping[str, str], reason: str) -> None:
    """Ends the command if it has an option that the job cannot have."""
    for option, instead in refused.items():
        if options.get(option):
            raise click.UsageError(f"{reason}: leave out {option}; {instead}.")


@contextlib.contextmanager
def shown_errors(
    errors: type[Exception] | tuple[type[Exception], ...],
    message: str = "%s",
    shown: type[click.ClickException] = click.ClickException,
) -> Iterator[None]:
    """Ends the command with an error's message alone."""
    try:
        yield
    except errors as error:
        raise shown(message % error) from error


def hosts_of_job(text: str) -> list[Host]:
    """Returns the hosts of the option `-H`."""
    with shown_errors(ValueError, "-H: %s.", click.UsageError):
        return parse_hosts(text)


def _exported_variables(export: Sequence[str], hosts: str | None) -> dict[str, str]:
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


def needed_paths(program: str, module: bool) -> list[str]:
    """Returns the folder and the program, which each host of a job needs at the same paths."""
    return [os.getcwd(), *([] if module else [os.path.abspath(program)])]


def program_command(program: str, module: bool, *, is_here: bool = True) -> list[str]:
    """Returns the interpreter's arguments that start the program, which may have to be here."""
    if module:
        return ["-m", program]
    if is_here and not any(
        path.is_file() for path in (Path(program), Path(program, "__main__.py"))
    ):
        raise click.UsageError(
            f"There is no program {program!r} here; expected a file, or -m and a module."
        )
    return [f"./{program}" if program.startswith("-") else program]
