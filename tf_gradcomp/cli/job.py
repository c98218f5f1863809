"""Runs the workers of a job for a command, shows their output and reports how the job ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import click

from tf_gradcomp.cli import quiet
from tf_gradcomp.cli.output import WorkerOutput, echo, table_width
from tf_gradcomp.cli.stop_requests import stop_requests
from tf_gradcomp.environment import MALLOC, PREFIX
from tf_gradcomp.launch import (
    THIS_MACHINE,
    Connection,
    JobResult,
    LocalJob,
    Rank,
    addresses_of_all,
    malloc,
)
from tf_gradcomp.proxies import bypass, proxy_variable
from tf_gradcomp.tf_config import VARIABLE as TF_CONFIG
from tf_gradcomp.tf_config import host_of, make_tf_config

GRACE = 5.0  # seconds
_TAIL_LINES = 10


def run_job(
    command: Sequence[str],
    workers: int,
    env: Mapping[str, str],
    output: str,
    grace: float = GRACE,
    timeout: float | None = None,
    worker_env: Sequence[Mapping[str, str]] | None = None,
    part: Rank | None = None,
    connections: Sequence[Connection] | None = None,
    *,
    tf_config: bool = True,
    all_to_stderr: bool = False,
    verbose: bool = False,
) -> JobResult:
    """Runs a job to its end, or until Ctrl-C, and shows its output.

    `output` is `"all"`, or `"chief"` for worker 0 alone. `part` is the place of the job's only
    worker in a larger job. `connections` lead to the workers' hosts; they get
    only those variables that differ from this process's, and those of `gradcomp`. `verbose`
    shows the lines that `Quiet` would omit. `LocalJob` explains the other arguments.
    """
    of_all = part.size if part else workers
    env = {**env, **_malloc_settings(env, tell=verbose)}
    is_quiet = quiet.wanted(verbose)
    if is_quiet:
        env = {quiet.LEVEL: "1", **env}
    if part is None and sys.stdout is not None and sys.stdout.isatty():
        env = {**env, "COLUMNS": str(table_width(of_all))}
    if tf_config:
        addresses = [connection.address for connection in connections or ()]
        hosts = [host_of(address) for address in addresses] or [THIS_MACHINE]
        env |= _bypass_of_proxy(hosts, env, log=True)
    if connections is not None:
        env = {name: env[name] for name in env if _is_for_hosts(name, env[name])}
        worker_env = [
            {**more, TF_CONFIG: make_tf_config(addresses, index)}
            for index, more in enumerate(worker_env or [{}] * workers)
        ]
    with (
        stop_requests(grace, timeout) as requests,
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
            connections=connections,
            first=part.rank if part else 0,
            on_line=shown.line,
            on_progress=shown.progress,
            grace=grace,
            timeout=timeout,
        ) as job,
    ):
        requests.pass_to(job, shown)
        while job.step():
            shown.show_suppressed()
        return job.run()  # reads the rest of the pipes


def _is_for_hosts(name: str, value: str) -> bool:
    return name.startswith(PREFIX) or value != os.environ.get(name)


def _malloc_settings(env: Mapping[str, str], *, tell: bool) -> dict[str, str]:
    try:
        settings = malloc.settings(env)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    for name, value in settings.items() if tell else ():
        echo(f"gradcomp: the workers get {name}={value} ({MALLOC}=default: none)", err=True)
    return settings


def _bypass_of_proxy(hosts: Sequence[str], env: Mapping[str, str], *, log: bool) -> dict[str, str]:
    settings = bypass(hosts, env)
    for name, value in settings.items() if log else ():
        reason = f"so that they do not connect to each other through {proxy_variable(env)}"
        echo(f"gradcomp: the workers get {name}={value}, {reason}.", err=True)
    return settings


@contextmanager
def addresses_of(place: Rank) -> Iterator[Sequence[str]]:
    """The addresses of a scheduler's job; see `addresses_of_all`."""
    with ExitStack() as stack:
        try:
            addresses = stack.enter_context(addresses_of_all(place))
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
        yield addresses


def run_rank(
    place: Rank,
    addresses: Sequence[str],
    timeout: float | None = None,
    *,
    command: Sequence[str],
    env: Mapping[str, str],
    output: str,
    grace: float = GRACE,
    all_to_stderr: bool = False,
    verbose: bool = False,
) -> JobResult:
    """Runs this process' worker of a scheduler's job."""
    hosts = [host_of(address) for address in addresses]
    return run_job(
        command,
        1,
        {**env, **_bypass_of_proxy(hosts, env, log=place.rank == 0)},
        output,
        grace,
        timeout,
        [{TF_CONFIG: make_tf_config(addresses, place.rank)}],
        place,
        tf_config=False,
        all_to_stderr=all_to_stderr,
        verbose=verbose,
    )


def report_end(result: JobResult, *, shown_tails: bool) -> None:
    """Prints which worker failed first, with its last lines unless they have been shown."""
    first = result.first_failure
    if first is not None and first.index != 0 and not shown_tails:
        tail = [line for line in first.stderr_tail if not quiet.is_noise(line)]
        for line in tail[-_TAIL_LINES:]:
            echo(f"[worker {first.index}] {line}", err=True)
    for line in result.summary():
        click.secho(f"gradcomp: {line}", err=True, fg="red" if first is not None else None)
