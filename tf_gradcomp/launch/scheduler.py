"""Finds this process' rank in a job that `srun` or `mpirun` has started.

Slurm's variables list the hosts of all tasks. MPI launchers tell a process only its rank and the
number of ranks, so the ranks exchange their addresses by mpi4py.

TensorFlow's own `SlurmClusterResolver` cannot be used: it would import TensorFlow, needs a GPU for
each task, and gives all jobs the same ports.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tf_gradcomp.launch.resources import ReservedPorts

# Ports of Slurm's jobs: below the ports that Linux gives to outgoing connections.
_FIRST_PORT, _PORTS, _PORTS_OF_JOB = 20000, 12000, 60


# The variables with a process' rank, the number of ranks, and the number on a machine. MPI is asked
# first: in an allocation of Slurm's, `mpirun` starts its daemons by `srun`, and they have its
# variables.
_VARIABLES = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)


@dataclass(frozen=True)
class Rank:
    """The rank of this process in a scheduler's job."""

    scheduler: str  # `"srun"` or `"mpirun"`
    rank: int
    size: int  # the number of ranks
    is_on_one_machine: bool  # all ranks are

    @property
    def is_alone(self) -> bool:
        """True if the scheduler has started only this process, as by `srun -n 1`."""
        return self.size == 1

    @property
    def description(self) -> str:
        """How this process was started, for messages."""
        return f"{self.scheduler} has started this process as rank {self.rank} of {self.size}"


def find_rank(env: Mapping[str, str] = os.environ) -> Rank | None:
    """Returns the rank of this process; None if no scheduler has started it."""
    for scheduler, rank, size, local_size in _VARIABLES:
        if rank in env and size in env and local_size in env:
            is_on_one_machine = env[local_size] == env[size]
            return Rank(scheduler, int(env[rank]), int(env[size]), is_on_one_machine)
    return None


@contextlib.contextmanager
def addresses_of_ranks(rank: Rank, env: Mapping[str, str] = os.environ) -> Iterator[list[str]]:
    """The addresses of the job's workers, in the order of ranks.

    Within the context, no other process on this machine gets the port of this process's worker by
    chance.

    Raises:
        RuntimeError: If the addresses cannot be found.
    """
    if rank.scheduler == "srun":
        yield slurm_addresses(env)
        return
    host = env.get("PMIX_HOSTNAME") or env.get("PMI_HOSTNAME") or socket.gethostname()
    ports = ReservedPorts(["localhost" if rank.is_on_one_machine else host])
    try:
        yield _gather_by_mpi(ports.addresses[0], rank.size)
    finally:
        ports.release()


def slurm_addresses(env: Mapping[str, str]) -> list[str]:
    """Returns the addresses of the tasks of a Slurm step; ports follow from job and step."""
    hosts = expand_hosts(env["SLURM_STEP_NODELIST"])
    counts = expand_counts(env["SLURM_STEP_TASKS_PER_NODE"])
    job, step = int(env.get("SLURM_JOB_ID", 0)), int(env.get("SLURM_STEP_ID", 0))
    first = _FIRST_PORT + (job + 7 * step) * _PORTS_OF_JOB % _PORTS
    workers = [
        (host, first + index)
        for host, count in zip(hosts, counts, strict=True)
        for index in range(count)
    ]
    expected, actual = workers[int(env["SLURM_PROCID"])][0], env.get("SLURMD_NODENAME")
    if actual is not None and actual != expected:
        raise RuntimeError(
            f"Task {env['SLURM_PROCID']} of this step runs on {actual} and not on {expected}: "
            "start it with srun --distribution=block, so that each machine has consecutive tasks."
        )
    return [f"{host}:{port}" for host, port in workers]


def expand_hosts(text: str) -> list[str]:
    """`"a[1-2,05],b"` as `["a1", "a2", "a05", "b"]`."""
    hosts = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            ends = [plain] if plain else _numbers(ranges)
            names = [name + end for name in names for end in ends]
        hosts += names
    return hosts


def _numbers(ranges: str) -> list[str]:
    names = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        names += [str(n).zfill(len(low)) for n in range(int(low), int(high or low) + 1)]
    return names


def expand_counts(text: str) -> list[int]:
    """`"2(x3),1"` as `[2, 2, 2, 1]`."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]


def _gather_by_mpi(address: str, size: int) -> list[str]:
    """Returns the addresses of all ranks, in their order."""
    try:
        import mpi4py

        mpi4py.rc.finalize = False  # see `end_rank`
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter without a library of MPI
        raise RuntimeError(
            f"Under mpirun, gradcomp needs mpi4py, which cannot be loaded ({error}): "
            "pip install mpi4py."
        ) from error
    addresses = MPI.COMM_WORLD.allgather(address)
    if len(addresses) != size:
        raise RuntimeError(
            f"mpirun has started {size} ranks, and mpi4py sees {len(addresses)}: it was built for "
            "another MPI."
        )
    return addresses


def end_rank() -> None:
    """Ends this rank well: `mpirun` ends all ranks if one of them exits without this."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        mpi.Finalize()
