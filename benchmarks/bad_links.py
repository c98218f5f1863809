"""Trains over bad links, and reports which faults a job survives.

    python benchmarks/bad_links.py            # all cases, about ten minutes; prints a table

Two workers train in network namespaces (`links.py`), by the program of the soak test, which checks
that no gradient is lost. Links lose or delay packets, or are cut for some seconds. A job survives
if training continues. Otherwise every worker must end by itself within the timeout, and print a
reason. Needs root, and /dev/net/tun for loss and delay.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import conserved
import links
from soak import PROGRAM, Log

from tf_gradcomp.environment import HEARTBEAT_TIMEOUT
from tf_gradcomp.launch import LocalJob, WorkerEnd

_WATCHED = 10.0  # seconds of training before the cut
_START = 300.0  # seconds that the first epoch may take
_BEYOND = 60.0  # seconds after the heartbeat timeout, at which a worker counts as hanging
_CUT_OFF = 1  # the worker


@dataclasses.dataclass(frozen=True)
class Case:
    """A bad link.

    Attributes:
        loss: The share of packets that get lost.
        delay: The delay of packets in each direction, in seconds.
        cut: The seconds for which one worker is disconnected; infinity means permanently.
        timeout: The heartbeat timeout of the job, in seconds.
    """

    loss: float = 0.0
    delay: float = 0.0
    cut: float = 0.0
    timeout: float = 60.0

    @property
    def name(self) -> str:
        """A text for tables."""
        parts = [f"{100 * self.loss:g} % loss"] if self.loss else []
        parts += [f"{1000 * self.delay:g} ms of delay"] if self.delay else []
        if self.cut:
            parts.append("a cut for good" if math.isinf(self.cut) else f"a cut of {self.cut:g} s")
        return ", ".join(parts) or "a good link"


CASES = (
    Case(),
    Case(loss=0.01),
    Case(loss=0.05),
    Case(delay=0.02),
    Case(loss=0.05, delay=0.02),
    Case(cut=5),
    Case(cut=15),
    Case(cut=30, timeout=120),
    Case(cut=60),
    Case(cut=60, timeout=240),
    Case(cut=math.inf),
)


@dataclasses.dataclass
class Outcome:
    """The end of a job on a bad link.

    Attributes:
        case: The link.
        resumed_after: Seconds from the end of a cut to the next complete epoch; None if none came.
        ends: The workers that ended before the job was over.
        ended_after: Seconds from the start of the cut to the last of these ends.
        faults: Observed violations: a worker that hangs, or a gradient that is lost.
    """

    case: Case
    resumed_after: float | None = None
    ends: list[WorkerEnd] = dataclasses.field(default_factory=list)
    ended_after: float | None = None
    faults: list[str] = dataclasses.field(default_factory=list)

    @property
    def survived(self) -> bool:
        """True if training has continued."""
        return not self.ends and not self.faults

    @property
    def text(self) -> str:
        """A text for tables."""
        if self.faults:
            return "; ".join(self.faults)
        if self.ends:
            return f"all workers end, after {self.ended_after:.0f} s"
        if self.resumed_after is None:
            return "trains on"
        return f"trains on, {self.resumed_after:.0f} s after the cut"


class _Watch:
    """A running job and its log."""

    def __init__(self, job: LocalJob, folder: Path) -> None:
        self.log = Log(folder)
        self._job = job
        self.running = True

    @property
    def epochs(self) -> int:
        """The number of epochs that are complete."""
        return max((line["saved"] for line in self.log.lines if "saved" in line), default=0)

    def wait(self, seconds: float, epochs: float = float("inf")) -> bool:
        """Waits until a number of epochs is complete, the job is over, or the time has passed."""
        until = time.monotonic() + seconds
        while self.running and self.epochs < epochs and time.monotonic() < until:
            self.running = self._job.step()
            self.log.read()
        return self.epochs >= epochs


def endure(case: Case, workers: int = 2, watched: float = _WATCHED) -> Outcome:
    """Runs a job on a bad link.

    Args:
        case: The link.
        workers: The number of workers.
        watched: The seconds of training before the cut.
    """
    outcome = Outcome(case)
    with (
        tempfile.TemporaryDirectory(prefix="gradcomp-links-") as name,
        links.network(workers, case.delay, case.loss) as network,
        _job(case, network, name) as job,
    ):
        watch = _Watch(job, Path(name))
        if watch.wait(_START, epochs=1):
            watch.wait(watched)
            if case.cut and watch.running:
                _cut(outcome, watch, network)
        if watch.running:
            (Path(name) / conserved.STOP).touch()
            watch.wait(case.timeout + _BEYOND)
        else:
            outcome.ends = list(job.ends)
        _judge(outcome, watch, job, workers)
    return outcome


def _job(case: Case, network: links.Network, folder: str) -> LocalJob:
    settings = {HEARTBEAT_TIMEOUT: f"{case.timeout:g}", "TF_NUM_INTRAOP_THREADS": "1"}
    return LocalJob(
        [sys.executable, str(PROGRAM), folder],
        network.workers,
        env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **settings},
        worker_prefix=network.prefixes,
        hosts=network.hosts,
        grace=None,  # each worker must end by itself
    )


def _cut(outcome: Outcome, watch: _Watch, network: links.Network) -> None:
    case, began = outcome.case, time.monotonic()
    limit = 2 * case.timeout + _BEYOND
    network.cut(_CUT_OFF)
    watch.wait(min(case.cut, limit))
    if math.isfinite(case.cut):
        network.rejoin(_CUT_OFF)
        joined = time.monotonic()
        # Data in flight before the cut may complete one more epoch.
        if watch.wait(limit, watch.epochs + 2):
            outcome.resumed_after = time.monotonic() - joined
    if not watch.running:
        outcome.ended_after = time.monotonic() - began
    elif outcome.resumed_after is None:
        outcome.faults.append("neither trains on nor ends")


def _judge(outcome: Outcome, watch: _Watch, job: LocalJob, workers: int) -> None:
    outcome.faults += [line["problem"] for line in watch.log.lines if "problem" in line]
    if watch.running:
        outcome.faults.append(f"{workers - len(job.ends)} workers hang")
        return
    if not outcome.ends and any(end.returncode for end in job.ends):
        outcome.ends = list(job.ends)
    silent = [str(end.index) for end in outcome.ends if not end.error]
    if silent:
        outcome.faults.append(f"workers end without a reason: {', '.join(silent)}")


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Returns the table of outcomes."""
    rows = [
        f"| {outcome.case.name} | {outcome.case.timeout:g} s | {outcome.text} |"
        for outcome in outcomes
    ]
    return "\n".join(["| link | heartbeat timeout | outcome |", "|---|---|---|", *rows])


@click.command()
def main() -> None:
    """Train over bad links."""
    why_not = links.missing(delay=0.001)
    if why_not:
        raise click.ClickException(why_not)
    outcomes = []
    for case in CASES:
        outcomes.append(endure(case))
        click.echo(f"{case.name}: {outcomes[-1].text}", err=True)
        for end in outcomes[-1].ends:
            click.echo(f"  worker {end.index}: {end.how}: {end.error}", err=True)
    print(markdown(outcomes))
    sys.exit(any(outcome.faults for outcome in outcomes))


if __name__ == "__main__":
    main()
