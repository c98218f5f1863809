"""Tests reports of late workers; `test_pauses.py` tests workers that do not answer."""

import re

import pytest

from tests.workers import results, run_workers

# Trains in several ways: FOLDER REPLICAS WAY...
PROGRAM = '''
    import sys
    import time
    from pathlib import Path

    import keras
    import tensorflow as tf
    from tests.distributed.common import Setup, dense_model, digits, say

    from tests.ranks import RANK, report
    from tf_gradcomp.private import tensorflow as tf_private

    FOLDER, REPLICAS, WAYS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if REPLICAS > 1:
        tf_private.use_logical_cpus(REPLICAS)
    setup = Setup("optimizer", "top_k(density=0.1)")
    strategy = setup.strategy


    def be_late(way):
        if RANK == 1:
            say(f"late: {way}")
            until = time.monotonic() + 120
            while not (FOLDER / way).exists() and time.monotonic() < until:
                time.sleep(0.02)


    class Late(keras.callbacks.Callback):
        def __init__(self, way):
            super().__init__()
            self.way = way

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 4:
                be_late(self.way)


    def fit(way, wrap=setup.wrap, **settings):
        model = setup.model(dense_model, lambda: wrap(keras.optimizers.Adam(0.01)), **settings)
        model.fit(*digits(128), batch_size=16, verbose=0, callbacks=[Late(way)])


    def loop():
        """A custom training loop, whose steps add up something."""
        step = tf.function(lambda: strategy.run(lambda: tf.constant(1.0)))
        total = tf.function(lambda: strategy.reduce("SUM", step(), axis=None))
        for index in range(3):
            if index == 2:
                be_late("loop")
            total()


    TRAIN = {
        "start": lambda: be_late("start"),
        "fit": lambda: fit("fit"),
        "executions": lambda: fit("executions", steps_per_execution=2),
        "dense": lambda: fit("dense", lambda optimizer: optimizer),
        "rounds": lambda: fit("rounds", lambda optimizer: setup.wrap(optimizer, local_steps=2)),
        "loop": loop,
    }
    for way in WAYS:
        TRAIN[way]()
    report(strategy.progress.position())
'''
WAYS = {  # to train, by the number of replicas in a worker
    1: ["start", "fit", "executions", "dense", "rounds", "loop"],
    2: ["fit", "dense"],
}
AFTER = "1.5"  # seconds


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.oldest), 2])
def stalls(request, tmp_path_factory):
    """Returns the first report in each way to train, and both workers."""
    folder = tmp_path_factory.mktemp("stalls")
    late, reports = [], {}

    def hear(worker, line):
        if line.startswith("late: "):
            late.append(line.removeprefix("late: "))
        elif "has not arrived" in line and late:
            (folder / late[-1]).touch()
            reports.setdefault(late[-1], (worker, line))

    env = {"GRADCOMP_STALL_AFTER": AFTER}
    ways = WAYS[request.param]
    workers = run_workers(PROGRAM, 2, [folder, request.param, *ways], env=env, on_line=hear)
    assert [*reports] == ways
    return reports, workers


def test_the_worker_that_waits_names_the_one_that_is_late(stalls):
    for way, (reporter, line) in stalls[0].items():
        assert reporter == 0
        where = "before the first step" if way == "start" else r"in step \d+"
        late = rf"Worker 1 \(localhost:\d+\) has not arrived: it runs, {where}\."
        assert re.search(rf"tf_gradcomp: Waiting for {AFTER} seconds, {where}\. {late}$", line), way


def test_workers_count_their_steps_and_collectives_alike(stalls):
    first, second = results(stalls[1])
    assert first == second
    assert first[0] % 2 == 0


def test_the_end_of_a_wait_is_reported(stalls):
    # After the last one, the program ends before it is.
    assert stalls[1][0].stderr.count("Continues after") >= len(stalls[0]) - 1
