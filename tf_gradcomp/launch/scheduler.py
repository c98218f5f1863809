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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tf_gradcomp.launch.ports import ReservedPorts

_THIS_MACHINE = "localhost"
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
    """This process' place in a scheduler's job."""

    scheduler: str  # `"srun"` or `"mpirun"`
    rank: int  # this process' rank
    size: int  # the number of ranks
    here: int  # the number of ranks on this machine


def scheduled(env: Mapping[str, str] = os.environ) -> Rank | None:
    """Returns the scheduler that started this process as one of several, or None."""
    place = _place(env)
    return place if place is not None and place.size > 1 else None


def is_started_alone(env: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a scheduler started this process alone, as by `srun -n 1`."""
    place = _place(env)
    return place is not None and place.size == 1


def _place(env: Mapping[str, str]) -> Rank | None:
    for scheduler, *names in _VARIABLES:
        if all(name in env for name in names):
            rank, size = (int(env[name]) for name in names[:2])
            return Rank(scheduler, rank, size, _ranks_here(rank, env[names[2]]))
    return None


def _ranks_here(rank: int, counts: str) -> int:
    """Returns the ranks on one rank's machine: `counts` has all machines, or that one alone."""
    of_each = [count for count in expand_counts(counts) for _ in range(count)]
    return of_each[min(rank, len(of_each) - 1)]


@contextlib.contextmanager
def addresses_of_all(place: Rank, env: Mapping[str, str] = os.environ) -> Iterator[Sequence[str]]:
    """The addresses of the job's workers, in the order of ranks.

    Within the context, no other process on this machine gets the port of this process's worker by
    chance.
    """
    if place.scheduler == "srun":
        yield slurm_addresses(env)
        return
    host = _THIS_MACHINE if place.here == place.size else _own_host(env)
    ports = ReservedPorts([host])
    try:
        yield _gather_by_mpi(ports.addresses[0], place.size)
    finally:
        ports.release()


def slurm_addresses(env: Mapping[str, str]) -> list[str]:
    """Returns the addresses of the tasks of a Slurm step; ports follow from job and step."""
    hosts = expand_hosts(env["SLURM_STEP_NODELIST"])
    counts = expand_counts(env["SLURM_STEP_TASKS_PER_NODE"])
    job, step = int(env.get("SLURM_JOB_ID", 0)), int(env.get("SLURM_STEP_ID", 0))
    first = _FIRST_PORT + (job + 7 * step) * _PORTS_OF_JOB % _PORTS
    places = [
        (host, first + place)
        for host, count in zip(hosts, counts, strict=True)
        for place in range(count)
    ]
    own, here = places[int(env["SLURM_PROCID"])][0], env.get("SLURMD_NODENAME")
    if here is not None and here != own:
        raise RuntimeError(
            f"Task {env['SLURM_PROCID']} of this step runs on {here} and not on {own}: start it "
            "with srun --distribution=block, so that each machine has consecutive tasks."
        )
    return [f"{host}:{port}" for host, port in places]


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
    numbers = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high or low) + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """`"2(x3),1"` as `[2, 2, 2, 1]`."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]


def _own_host(env: Mapping[str, str]) -> str:
    """The launcher's name for this machine."""
    return env.get("PMIX_HOSTNAME") or env.get("PMI_HOSTNAME") or socket.gethostname()


def _gather_by_mpi(address: str, size: int) -> list[str]:
    """Returns the addresses of all ranks, in their order."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter without a library of MPI
        raise RuntimeError(
            f"Under mpirun, gradcomp needs mpi4py, which cannot be loaded ({error}): "
            "pip install mpi4py."
        ) from error
    addresses = MPI.COMM_WORLD.allgather(address)
    MPI.Finalize()  # at the end of the process, it would wait for the other ranks
    if len(addresses) != size:
        raise RuntimeError(
            f"mpirun has started {size} ranks, and mpi4py sees {len(addresses)}: it was built for "
            "another MPI."
        )
    return addresses
