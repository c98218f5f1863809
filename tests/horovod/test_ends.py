"""A job ends when a rank is killed or fails."""

import os
import signal
import subprocess
import sys

from tests.horovod.jobs import needs_horovod, run_ranks
from tests.workers import python_path

pytestmark = needs_horovod

# Rank 1 kills itself.
_KILLED = """
    import os
    import signal

    import keras

    from tests.horovod.common import compiled, fit
    from tests.ranks import RANK, compressed, data


    def die(batch, logs):
        if RANK == 1 and batch == 4:
            os.kill(os.getpid(), signal.SIGKILL)


    model = compiled(lambda: compressed(keras.optimizers.SGD(0.1)))
    fit(model, *data(8), callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=die)])
"""


def test_the_others_end_with_an_error_when_a_rank_is_killed():
    survivor, dead = run_ranks(_KILLED, 2, check=False)
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, None)
    assert "Horovod" in survivor.stderr


def test_gradcomp_run_starts_ranks_and_ends_as_the_first_that_fails(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "rank = int(os.environ['HOROVOD_RANK'])\n"
        "print(rank, os.environ['HOROVOD_SIZE'], 'TF_CONFIG' in os.environ)\n"
        "sys.exit(3 if rank else 0)\n"
    )
    args = ["run", "--horovod", "-n", "2", str(program)]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", "from tf_gradcomp.cli.main import main; main()", *args],
        env={**environment, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[worker 0] 0 2 False", "[worker 1] 1 2 False"]
    assert "worker 1 died first" in done.stderr
