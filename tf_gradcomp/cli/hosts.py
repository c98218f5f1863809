"""The options of `gradcomp run` that start workers on hosts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import click

from tf_gradcomp.launch import Host, Placed, parse_hosts, place_workers


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The hosts that a user has named, and the variables that workers there get."""

    hosts: Sequence[Host]
    values: dict[str, str]  # the variables' values by name

    @property
    def workers(self) -> int:
        """Returns the number of workers."""
        return sum(host.workers for host in self.hosts)

    @property
    def most_on_one(self) -> int:
        """Returns the number of workers on the host that has most."""
        return max(host.workers for host in self.hosts)

    def place(self, program: str, module: bool) -> Placed:
        """Checks that all hosts can run the program, and gives each worker an address."""
        try:
            return place_workers(
                self.hosts,
                program,
                module=module,
                forward=list(self.values),
                env=self.values,
            )
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error


def hosts_of(
    text: str | None,
    export: Sequence[str],
    workers: int | None,
    horovod: bool,
    gpus_per_worker: int | None,
) -> Hosts | None:
    """Returns what `-H` and `-x` say; None without hosts."""
    if text is None:
        if export:
            raise click.UsageError("-x is for workers on hosts (-H); others get all variables.")
        return None
    for given, option, instead in (
        (workers, "-n", "-H says how many workers each host has, as in host1:2"),
        (horovod, "--horovod", "start ranks of Horovod on hosts by horovodrun --gloo -H"),
        (
            gpus_per_worker,
            "--gpus-per-worker",
            "start one worker on each host, as in host1,host2; it takes all GPUs of its host",
        ),
    ):
        if given:
            raise click.UsageError(f"Leave out {option}: {instead}.")
    try:
        return Hosts(parse_hosts(text), _values(export))
    except ValueError as error:
        raise click.UsageError(f"-H: {error}.") from error


def _values(export: Sequence[str]) -> dict[str, str]:
    values = {}
    for given in export:
        name, is_given, value = given.partition("=")
        if not is_given and name not in os.environ:
            raise click.UsageError(f"-x: there is no variable {name} here; give it a value.")
        values[name] = value if is_given else os.environ[name]
    return values
