"""`gradcomp advise`: predicts whether compression pays for a program."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tf_gradcomp.advice import STEPS, STEPS_BEFORE, VARIABLE
from tf_gradcomp.advice.cost_model import WIDTH
from tf_gradcomp.cli.options import Workers, json_option, print_json
from tf_gradcomp.cli.run import (
    NOT_UNDER_SCHEDULER,
    NOT_WITH_HOSTS,
    hosts_of_job,
    misplaced_workers_hint,
    needed_paths,
    program_command,
    refuse,
    shown_errors,
)
from tf_gradcomp.launch import (
    Host,
    Rank,
    addresses_of_ranks,
    connected,
    end_rank,
    find_rank,
    take_file,
)
from tf_gradcomp.launch.job import report_end, run_job
from tf_gradcomp.launch.output import echo
from tf_gradcomp.tf_config import VARIABLE as TF_CONFIG
from tf_gradcomp.tf_config import read_tf_config

_HERE = Host("this machine", 1, "localhost", is_local=True)
_LOOPBACK = "Measured over this machine's loopback: on your network, the gain will differ."
_NEXT = "On several machines: gradcomp advise -H host1,host2 train.py   More: --details"
_NOT_MENTIONED = (
    "gradcomp: {} does not mention tf_gradcomp. The program must train with gc.CompressedOptimizer "
    "under gc.MultiWorkerMirroredStrategy, or there is nothing to measure."
)


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Measure whether compression pays for a training program.",
)
@click.option(
    "-n",
    "--workers",
    type=Workers(min=1),
    help="Number of workers to start on this machine. The command then measures this machine's "
    "loopback, and not the network of a cluster. Leave this out under srun and mpirun, and if "
    "TF_CONFIG is set.",
)
@click.option(
    "-H",
    "--hosts",
    metavar="HOST[:N],...",
    help="Start the workers by ssh: one on each host, or N with HOST:N. The command then measures "
    "the network between the hosts.",
)
@click.option(
    "--details",
    is_flag=True,
    help="Print also the parts of each predicted step: computing, encoding, the latency and the "
    "transfer of collectives, and decoding.",
)
@click.option("-m", "--module", is_flag=True, help="Run PROGRAM as a module, as `python -m` does.")
@json_option
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def advise(
    workers: int | None,
    hosts: str | None,
    details: bool,
    module: bool,
    as_json: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run the first steps of PROGRAM, and predict its steps with several compressors.

    The program trains with gc.CompressedOptimizer. The program takes its first steps without
    compression. Then all workers end, and the command prints a recommendation and a table.

    -H measures the network between hosts that ssh reaches. Under srun, mpirun or TF_CONFIG, start
    the command once for each worker.

    \b
    Examples:
      gradcomp advise -n 2 train.py --batch-size 64     # this machine's loopback
      gradcomp advise -H host1,host2 train.py --batch-size 64
      srun -N 2 gradcomp advise train.py --batch-size 64
      mpirun -H host1,host2 gradcomp advise train.py --batch-size 64
    """  # noqa: D301
    has_tf_config = TF_CONFIG in os.environ
    rank = None if has_tf_config else find_rank()
    if has_tf_config and (workers is not None or hosts is not None):
        raise click.UsageError(
            "TF_CONFIG is set, so this process is one worker of a cluster: leave out -n and -H to "
            "measure the cluster, or unset TF_CONFIG to start workers."
        )
    if rank is not None and rank.is_alone:
        rank, workers = None, workers or 1
    if rank is not None:
        refuse({"-n": workers, "-H": hosts}, NOT_UNDER_SCHEDULER, rank.description)
    host_list: list[Host] = []
    if hosts is not None:
        refuse({"-n": workers}, NOT_WITH_HOSTS, "-H")
        host_list = hosts_of_job(hosts)
        workers = sum(host.workers for host in host_list)
    elif rank is None and workers is None and not has_tf_config:
        raise click.UsageError(
            "Say how many workers to start on this machine (gradcomp advise -n 2 train.py), or on "
            f"which hosts (-H host1,host2).{misplaced_workers_hint(args)} Under srun, mpirun or "
            "TF_CONFIG, start gradcomp once for each worker, without -n."
        )
    command = [
        sys.executable,
        *program_command(program, module, is_here=not host_list),
        *args,
    ]
    paths = needed_paths(program, module)
    if not module and not _mentions_us(Path(program)):
        echo(_NOT_MENTIONED.format(program), err=True)
    advice = f"/tmp/gradcomp-advice-{uuid.uuid4().hex}.json"
    with contextlib.ExitStack() as stack:
        addresses = connections = None
        with shown_errors((ConnectionError, RuntimeError)):
            if rank is not None:
                addresses = stack.enter_context(addresses_of_ranks(rank))
            if host_list:
                connections = stack.enter_context(connected(host_list, paths))
        if has_tf_config:
            rank = _rank_by_tf_config()
        result = run_job(
            command,
            workers or 1,
            {**os.environ, VARIABLE: advice},
            output="chief",
            rank=rank,
            addresses=addresses,
            connections=connections,
            tf_config=not has_tf_config,
            all_to_stderr=as_json,
        )
        report_end(result, shown_tails=False)
        if result.exit_code:
            sys.exit(result.exit_code)
        if rank is None or rank.rank == 0:
            with shown_errors(ConnectionError):
                text = take_file(host_list[0] if host_list else _HERE, advice)
            is_loopback = not host_list and (workers or 1) > 1
            _show(_parsed(text), details, as_json, is_loopback)
        end_rank()


def _mentions_us(program: Path) -> bool:
    """False if neither a program nor a module beside it mentions this package."""
    paths = [program, *program.parent.glob("*.py")] if program.is_file() else []
    return not paths or any(b"tf_gradcomp" in path.read_bytes() for path in paths if path.is_file())


def _rank_by_tf_config() -> Rank:
    """Returns the rank of this process among the workers of TF_CONFIG."""
    try:
        config = read_tf_config()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if config is None or config.rank is None:
        raise click.UsageError(
            "TF_CONFIG says that this process does not train: expected a worker."
        )
    return Rank(TF_CONFIG, config.rank, config.num_workers, is_on_one_machine=False)


def _parsed(advice: str | None) -> dict[str, Any]:
    if advice is None:
        raise click.ClickException(
            "The program ended before the measurement was complete: it must train for at least "
            f"{STEPS_BEFORE + STEPS} steps, with gc.CompressedOptimizer."
        )
    return dict(json.loads(advice))


def _show(advice: dict[str, Any], details: bool, as_json: bool, is_loopback: bool) -> None:
    if as_json:
        print_json(advice)
        return
    lines: Sequence[str] = [
        textwrap.fill(advice["verdict"], WIDTH),
        _LOOPBACK if is_loopback else "",
        advice["table"],
        advice["details"] if details else "",
        _NEXT if is_loopback else "" if details else "More: --details",
    ]
    click.echo("\n".join(filter(None, lines)))
