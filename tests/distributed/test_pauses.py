"""Tests workers that pause and continue, as in a virtual machine that is migrated."""

import re

import pytest

from tests.workers import results, run_workers

# Trains; one worker stops for some seconds in the second epoch.
PROGRAM = """
    import os
    import subprocess
    import sys

    import keras
    from tests.distributed.common import Setup, dense_model, digits

    from tests.ranks import RANK, digest, report


    class Pause(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            paused, seconds = sys.argv[1:]
            if epoch == 1 and int(paused) == RANK:
                stop = f"kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
                subprocess.run(["sh", "-c", stop], check=True)


    setup = Setup("optimizer", "top_k(density=0.1)")
    model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.Adam(0.01)))
    model.fit(*digits(640), batch_size=16, epochs=4, verbose=0, callbacks=[Pause()])
    report([digest(value) for value in model.get_weights()])
"""
TENSORFLOWS_TIMEOUT = 10  # seconds


STALL_AFTER = 4  # seconds
NO_ANSWER = "its process is there but does not answer, so it is paused or blocked."


def train(paused, seconds, timeout, check=True):
    env = {
        "GRADCOMP_HEARTBEAT_TIMEOUT": str(timeout),
        "GRADCOMP_STALL_AFTER": str(STALL_AFTER),
    }
    return run_workers(PROGRAM, 2, [paused, seconds], env=env, check=check)


@pytest.fixture(scope="module")
def without_a_pause():
    return results(train(1, 0, timeout=60))


@pytest.mark.parametrize("paused", [0, pytest.param(1, marks=pytest.mark.oldest)])
def test_a_pause_beyond_tensorflows_timeout_changes_nothing(without_a_pause, paused):
    workers = train(paused, TENSORFLOWS_TIMEOUT + 2, timeout=60)
    assert results(workers) == without_a_pause
    stderr = workers[1 - paused].stderr
    assert stderr.count(NO_ANSWER) == 1
    assert re.search(rf"Worker {paused} \(localhost:\d+\) has not arrived: {NO_ANSWER}", stderr)
    assert NO_ANSWER not in workers[paused].stderr


@pytest.mark.oldest
def test_a_pause_beyond_the_given_timeout_ends_the_job():
    survivor = train(1, 8, timeout=2, check=False)[0]
    assert survivor.returncode != 0
    assert "Collective ops is aborted" in survivor.stderr
