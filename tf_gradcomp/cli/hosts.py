"""The options of `gradcomp run` that start workers on hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from tf_gradcomp.environment import REGROUP, REGROUPED
from tf_gradcomp.launch import Host, JobResult, LocalJob, Survey, parse_hosts, survey_hosts

_LOOK_AGAIN = 30.0  # seconds between two looks at absent hosts


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

    def survey(self, program: str, module: bool, hosts: Sequence[Host] | None = None) -> Survey:
        """Checks which hosts can run the program: all, or some of them."""
        return survey_hosts(
            hosts or self.hosts,
            program,
            module=module,
            forward=list(self.values),
            env=self.values,
        )


class Regroup:
    """Looks during a run whether absent hosts have returned, and then asks the workers to end.

    The workers end before their next epoch if they have `gc.callbacks.BackupAndRestore`.

    Args:
        look: Surveys the absent hosts.
    """

    def __init__(self, look: Callable[[], Survey]) -> None:
        self._look = look
        self._looking: threading.Thread | None = None
        self._next = time.monotonic()
        self._found = False

    @contextlib.contextmanager
    def asking(self) -> Iterator[dict[str, str]]:
        """The environment variables with which workers notice that they are asked."""
        with tempfile.TemporaryDirectory(prefix="gradcomp-regroup-") as folder:
            self._file = Path(folder, "regroup")
            yield {REGROUP: str(self._file)}

    def watch(self, _job: LocalJob) -> None:
        """Looks from time to time; called often while the workers run."""
        if self._found and not self._file.exists():
            self._file.touch()
        if self._looking is not None and self._looking.is_alive():
            return
        if time.monotonic() >= self._next and not self._found:
            self._next = time.monotonic() + _LOOK_AGAIN
            self._looking = threading.Thread(target=self._look_once, daemon=True)
            self._looking.start()

    def judge(self, result: JobResult) -> JobResult:
        """Returns the result, marked if the workers ended because they were asked to."""
        codes = {end.returncode for end in result.ends if not end.ended_by_launcher}
        asked = self._found and codes == {REGROUPED}
        return dataclasses.replace(result, regrouped=True) if asked else result

    def _look_once(self) -> None:
        self._found = bool(self._look().slots)


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
