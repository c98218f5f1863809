"""Trains for long under `gradcomp run --max-restarts`, and kills workers at random times.

    python benchmarks/soak.py                                  # ten minutes, for release notes
    python benchmarks/soak.py --minutes 120 --kills 30

The workers check after each epoch, and where they resume, that applied plus unsent gradients equal
what was given (`conserved.py`). This program checks that each restart resumes from the last save,
that no process is left, and that memory does not grow in the second half of the time. The records
that TensorFlow keeps of all collectives are not counted as growth. The program prints its findings
as a table, and ends with exit code 1 if anything was wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import conserved
from memory_growth import RECORD, Samples, Slope, anonymous_kilobytes, slopes

GRADCOMP = (sys.executable, "-m", "tf_gradcomp.cli")
PROGRAM = Path(conserved.__file__)
_POLL_SECONDS = 0.1  # seconds between two looks at the job
_RUN = 180.0  # seconds that a run may take to start, to save and to end
_LAUNCHER = "gradcomp run"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arguments of a soak test."""

    minutes: float
    kills: int
    seed: int
    workers: int

    @property
    def half(self) -> float:
        """Half of the time, in seconds."""
        return 30 * self.minutes


@dataclasses.dataclass
class Found:
    """Results of a soak test.

    Attributes:
        kills: The number of workers that were killed.
        restarts: The number of times that `gradcomp run` started the job again.
        epochs: The number of epochs that the job trained.
        checks: How many times the workers found that nothing was lost.
        slopes: Of memory, by the kind of process; kinds that could not be judged are missing.
        faults: Everything that was wrong.
    """

    kills: int = 0
    restarts: int = 0
    epochs: int = 0
    checks: int = 0
    slopes: dict[str, Slope] = dataclasses.field(default_factory=dict)
    faults: list[str] = dataclasses.field(default_factory=list)


class Log:
    """The lines that the workers have written.

    Attributes:
        lines: All of them.
        pids: The process of each worker in the latest run.
        collectives: The number of collectives of each of these processes.
        saved: Whether the latest run has saved.
        problem: Whether a worker has found that something was lost.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / conserved.LOG
        self._read = 0
        self.lines: list[dict[str, Any]] = []
        self.pids: dict[int, int] = {}
        self.collectives: dict[int, int] = {}
        self.saved = self.problem = False

    def read(self) -> None:
        """Reads the lines that are complete since the last call."""
        if not self._path.exists():
            return
        with open(self._path) as file:
            file.seek(self._read)
            text = file.read()
        complete = text[: text.rfind("\n") + 1]
        self._read += len(complete)
        for line in complete.splitlines():
            self.take(json.loads(line))

    def take(self, line: dict[str, Any]) -> None:
        """Takes one line."""
        self.lines.append(line)
        self.problem = self.problem or "problem" in line
        if "pid" in line:
            self.pids[line["worker"]] = line["pid"]
            self.collectives.pop(line["pid"], None)  # of an earlier process with this number
            self.saved = False
        if "collectives" in line and line["worker"] in self.pids:
            self.collectives[self.pids[line["worker"]]] = line["collectives"]
        self.saved = self.saved or "saved" in line


class Killer:
    """Kills workers at random times in the first half of the test.

    A kill restarts all workers. In the second half, in which memory is judged, they all live on.

    `gradcomp run` ends a job whose runs die twice without a save. If the previous run died without
    a save, the next kill therefore waits until the present run has saved.
    """

    def __init__(self, plan: Plan) -> None:
        chance = random.Random(plan.seed)
        self._times = sorted(chance.uniform(0, plan.half) for _ in range(plan.kills))
        self._victims = [chance.randrange(plan.workers) for _ in range(plan.kills)]
        self._workers = plan.workers
        self._spared = False  # whether the run before this one died without a save
        self.killed = 0

    @property
    def is_done(self) -> bool:
        """True if all kills were made."""
        return self.killed == len(self._times)

    def look(self, seconds: float, log: Log) -> None:
        """Kills a worker if it is time to."""
        due = self.killed
        if self.is_done or seconds < self._times[due]:
            return
        running = len(log.pids) == self._workers
        if running and (log.saved or not self._spared):
            with contextlib.suppress(ProcessLookupError):  # the job has failed by itself
                os.kill(log.pids[self._victims[due]], signal.SIGKILL)
            self.killed += 1
            self._spared = not log.saved
            log.pids.clear()


class Processes:
    """The processes of the job, and their memory.

    After a process has ended, the kernel may give its number to another program. Memory is
    therefore read of workers of the present run only, and a file that stands for each process tells
    whether it has ended.

    Args:
        launcher: The number of the process of `gradcomp run`.

    Attributes:
        samples: The samples of all processes.
    """

    def __init__(self, launcher: int) -> None:
        self.samples = [Samples(_LAUNCHER)]
        self._launcher = launcher
        self._present = {launcher: self.samples[0]}
        self._files: list[tuple[int, int]] = []  # the number of each worker, and its file

    def sample(self, seconds: float, log: Log) -> None:
        """Takes a sample of each process of the present run."""
        workers = {pid: worker for worker, pid in log.pids.items()}
        for pid in self._present.keys() - workers.keys() - {self._launcher}:
            del self._present[pid]
        for pid in workers.keys() - self._present.keys():
            with contextlib.suppress(ProcessLookupError):  # it has just been killed
                self._files.append((pid, os.pidfd_open(pid)))
                self._present[pid] = Samples(f"worker {workers[pid]}")
                self.samples.append(self._present[pid])
        for pid, samples in self._present.items():
            if pid == self._launcher or pid in log.collectives:  # it has ended an epoch
                _sample(samples, pid, seconds, log.collectives.get(pid, 0))

    def left(self) -> list[int]:
        """Returns the workers that have not ended."""
        return [pid for pid, file in self._files if not select.select([file], [], [], 0)[0]]

    def close(self) -> None:
        """Closes the files."""
        for _, file in self._files:
            os.close(file)


def _sample(samples: Samples, pid: int, seconds: float, collectives: int) -> None:
    size = anonymous_kilobytes(pid)
    if size is not None:
        samples.times.append(seconds)
        samples.megabytes.append(size / 1024)
        samples.records.append(collectives * RECORD / 2**20)


def soak(
    plan: Plan, gradcomp: Sequence[str] = GRADCOMP, env: Mapping[str, str] | None = None
) -> Found:
    """Runs a soak test.

    Args:
        plan: Its arguments.
        gradcomp: How to start the `gradcomp` command.
        env: More environment for it.
    """
    with tempfile.TemporaryDirectory(prefix="gradcomp-soak-") as name:
        folder = Path(name)
        command = [*gradcomp, "run", "-n", str(plan.workers), "--max-restarts", str(plan.kills)]
        command += ["--json", str(PROGRAM), name]
        with open(folder / "stdout", "w") as stdout, open(folder / "stderr", "w") as stderr:
            job = subprocess.Popen(
                command, env={**os.environ, **(env or {})}, stdout=stdout, stderr=stderr
            )
            try:
                found = _watch(plan, job, folder)
            finally:
                if job.poll() is None:
                    job.send_signal(signal.SIGTERM)
                    job.wait()
        _judge_end(found, job.returncode, folder)
        return found


def _watch(plan: Plan, job: subprocess.Popen, folder: Path) -> Found:
    """Kills workers and takes samples until the job has ended, or should have."""
    log, killer, processes = Log(folder), Killer(plan), Processes(job.pid)
    started = time.monotonic()
    length = 60 * plan.minutes
    limit = length + _RUN * (plan.kills + 1)
    taken = -1.0
    while job.poll() is None and (seconds := time.monotonic() - started) < limit:
        log.read()
        if log.problem:
            break
        if seconds >= length and killer.is_done and log.saved:
            (folder / conserved.STOP).touch()
        killer.look(seconds, log)
        if seconds >= taken + 1:
            taken = seconds
            processes.sample(seconds, log)
        time.sleep(_POLL_SECONDS)
    log.read()
    found = Found(kills=killer.killed, slopes=slopes(processes.samples, plan.half))
    if job.poll() is None:
        found.faults.append(f"the job did not end, after {found.kills} of {plan.kills} kills")
    _judge_log(found, log.lines)
    surviving = processes.left()
    processes.close()
    if job.poll() is not None and surviving:
        found.faults.append(f"workers are left: {surviving}")
    return found


def _judge_log(found: Found, lines: Sequence[Mapping[str, Any]]) -> None:
    found.faults += [line["problem"] for line in lines if "problem" in line]
    saved = 0
    for line in lines:
        if "resumed" in line and line["resumed"] < saved:
            found.faults.append(f"resumed at epoch {line['resumed']}, although {saved} were saved")
        saved = line.get("saved", saved)
    found.epochs = saved
    found.checks = sum("saved" in line or "resumed" in line for line in lines)
    found.faults += [
        f"the memory of {kind} grows: {slope.per_hour:+.1f} MB per hour"
        for kind, slope in found.slopes.items()
        if not slope.is_flat
    ]


def _judge_end(found: Found, returncode: int, folder: Path) -> None:
    try:
        end = json.loads((folder / "stdout").read_text())
    except ValueError:
        end = {"exit_code": None, "restarts": 0}
    found.restarts = end["restarts"]
    if returncode or end["exit_code"]:
        said = (folder / "stderr").read_text().splitlines()[-20:]
        found.faults.append("\n".join([f"gradcomp run ended with exit code {returncode}:", *said]))
    elif found.restarts != found.kills:
        found.faults.append(f"{found.kills} kills, and {found.restarts} restarts")


def markdown(plan: Plan, found: Found) -> str:
    """Returns the table of a soak test."""
    rows = {
        "minutes": f"{plan.minutes:g}",
        "workers": str(plan.workers),
        "workers killed": str(found.kills),
        "restarts": str(found.restarts),
        "epochs, steps": f"{found.epochs:,}, {found.epochs * conserved.STEPS:,}",
        "checks that nothing was lost": f"{found.checks:,}",
    }
    for kind in (_LAUNCHER, *(f"worker {index}" for index in range(plan.workers))):
        slope = found.slopes.get(kind)
        rows[f"memory of {kind}"] = (
            f"{slope.megabytes:.0f} MB, {slope.per_hour:+.1f} ± {slope.error:.1f} MB per hour"
            f" besides {slope.records:.1f} of TensorFlow's records"
            if slope
            else "not judged: no process lived long enough"
        )
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["| soak test | |", "|---|---|", *lines])


@click.command(context_settings={"show_default": True})
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    help="Train for so long, and until all kills were made.",
)
@click.option("--kills", type=click.IntRange(min=0), default=5, help="Workers to kill.")
@click.option("--seed", default=0, help="Seed of the times of kills and of the choice of workers.")
@click.option(
    "--workers",
    type=click.Choice(["2", "4", "8"]),
    default="2",
    help="A power of two, so that a share of a residual is exact.",
)
def main(workers: str, **arguments: Any) -> None:
    """Train for some minutes while workers are killed."""
    plan = Plan(workers=int(workers), **arguments)
    found = soak(plan)
    print(markdown(plan, found))
    for fault in found.faults:
        click.secho(f"soak: {fault}", err=True, fg="red")
    sys.exit(bool(found.faults))


if __name__ == "__main__":
    main()
