"""The harness that the multi-worker tests stand on."""

import signal

import numpy as np
import pytest

from tests.cli.test_launch import wait_until_dead
from tests.workers import Job, result, results, run_workers


def test_results_come_back_in_order():
    workers = run_workers(
        """
        import json, os, sys
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        print("out", *sys.argv[1:])
        print("err", os.environ["SHARED"], os.environ.get("OWN"), file=sys.stderr)
        json.dump({"index": index}, open(os.environ["RESULT_PATH"] + ".json", "w"))
        """,
        n=3,
        args=["a", 1],
        env={"SHARED": "s"},
        per_worker_env=[{}, {"OWN": "o"}, {}],
    )
    assert results(workers) == [{"index": index} for index in range(3)]
    assert [worker.stdout for worker in workers] == ["out a 1"] * 3
    assert [worker.stderr for worker in workers] == ["err s None", "err s o", "err s None"]
    assert [worker.returncode for worker in workers] == [0, 0, 0]


def test_arrays_come_back(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nimport numpy as np\nnp.savez(os.environ['RESULT_PATH'], w=np.arange(3))\n"
    )
    (worker,) = run_workers(program, n=1)
    np.testing.assert_array_equal(result(worker)["w"], [0, 1, 2])


def test_the_package_is_importable():
    run_workers("import tf_gradcomp.tf_config\nassert tf_gradcomp.tf_config.read_tf_config()")


def test_a_failed_worker_fails_the_test_with_the_output_of_all():
    program = """
    import json, os
    print("before")
    assert json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0, "wrong place"
    """
    with pytest.raises(AssertionError) as error:
        run_workers(program)
    assert "worker 1 died first" in str(error.value)
    assert "AssertionError: wrong place" in str(error.value)
    assert str(error.value).count("\nbefore") == 2


def test_failures_can_be_looked_at():
    workers = run_workers("import sys\nsys.exit(4)", check=False)
    assert [worker.returncode for worker in workers] == [4, 4]
    with pytest.raises(AssertionError, match="worker 1 reported nothing"):
        result(workers[1])


def test_nothing_outlives_the_deadline():
    program = """
    import os, signal, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("still here", os.getpid(), flush=True)
    time.sleep(3600)
    """
    with Job(program, deadline=240) as job:
        lines = [job.wait_for_line(index, "still here", timeout=200) for index in (0, 1)]
        with pytest.raises(AssertionError, match=r"(?s)after the start.*still here"):
            job.wait(deadline=0.5)
        for line in lines:
            wait_until_dead(int(line.split()[-1]))


WAITING = """
import json, os, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
print("up", index, flush=True)
time.sleep(3600 if index else 0.5)
"""


def test_a_worker_can_be_killed_at_a_line():
    seen = []
    with Job(WAITING, deadline=240, on_line=lambda *line: seen.append(line)) as job:
        assert job.wait_for_line(1, "up", timeout=200) == "up 1"
        job.kill(1)
        workers = job.wait()
    assert [worker.returncode for worker in workers] == [0, -signal.SIGKILL]
    assert (1, "up 1") in seen


def test_a_killed_worker_is_gone_with_what_it_has_started():
    program = """
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    print("pids", os.getpid(), child.pid, flush=True)
    time.sleep(3600)
    """
    with Job(program, 1, deadline=240) as job:
        pids = job.wait_for_line(0, "pids").split()[1:]
        job.kill(0)
        for pid in pids:
            wait_until_dead(int(pid))


def test_processes_started_by_a_worker_end_with_it():
    program = """
    import subprocess, sys
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid)
    """
    (worker,) = run_workers(program, 1)
    wait_until_dead(int(worker.stdout))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGABRT])
def test_a_worker_that_a_signal_ends_is_seen_to_have(signum):
    (worker,) = run_workers(f"import os; os.kill(os.getpid(), {int(signum)})", 1, check=False)
    assert worker.returncode == -signum


def test_an_interruption_reaches_the_worker():
    program = """
    import time
    try:
        print("up", flush=True); time.sleep(3600)
    except KeyboardInterrupt:
        print("saved")
    """
    with Job(program, 1, deadline=240) as job:
        job.wait_for_line(0, "up")
        job.kill(0, signal.SIGINT)
        (worker,) = job.wait()
    assert (worker.returncode, worker.stdout) == (0, "up\nsaved")


def test_workers_draw_and_hash_like_separate_processes():
    program = "import random, numpy; print(hash('a'), random.random(), numpy.random.random())"
    drawn = [worker.stdout.split() for worker in run_workers(program, 2)]
    drawn += [worker.stdout.split() for worker in run_workers(program, 2)]
    hashes, python_values, numpy_values = (set(values) for values in zip(*drawn, strict=True))
    assert (len(hashes), len(python_values), len(numpy_values)) == (2, 4, 4)


def test_waiting_in_vain_ends():
    with Job(WAITING, deadline=240) as job:
        with pytest.raises(AssertionError, match="worker 0 to print 'never'"):
            job.wait_for_line(0, "never", timeout=200)  # The worker ends earlier.
        with pytest.raises(AssertionError, match="worker 1 to print 'never'"):
            job.wait_for_line(1, "never", timeout=0.5)


def test_nothing_is_printed_when_all_is_well(capfd):
    run_workers("print('quiet')")
    assert capfd.readouterr() == ("", "")
