"""Tables train as in one process, whether their lookups depend on the batch or not."""

import functools

import pytest

from tests.bounds import assert_close
from tests.optimizer.cases import OPTIMIZERS, label
from tests.workers import results, run_workers

# Trains two tables by lookups of positions and of words, with each optimizer: WAY.
PROGRAM = '''
    import importlib

    import keras
    import numpy as np
    import tensorflow as tf

    import tf_gradcomp as gc
    from tests.ranks import RANK, SIZE, argument, report

    ROWS, LENGTH, WIDTH, STEPS = 4, 6, 4, 8  # the rows of all workers
    strategy = (
        tf.distribute.get_strategy() if argument(1) == "plain" else gc.MultiWorkerMirroredStrategy()
    )
    cases = importlib.import_module("tests.optimizer.cases")  # creates optimizers
    PART = slice(RANK * ROWS // SIZE, (RANK + 1) * ROWS // SIZE)


    def batch(step):
        """Returns this worker's rows: the gradients of each row's lookups, and its words."""
        generator = np.random.default_rng(step)
        gradients = np.round(64 * generator.normal(size=(ROWS, LENGTH, WIDTH))) / 64
        words = generator.choice(LENGTH // 2, (ROWS, LENGTH))
        words[:] = words[:1]  # the same on all workers, as padding and marks of a beginning are
        return gradients[PART].astype("float32"), words[PART].astype("int32")


    def trained(inner, wrapped):
        start = np.random.default_rng(0).normal(size=(LENGTH, WIDTH)).astype("float32")
        with strategy.scope():
            tables = [keras.Variable(start, name=name) for name in ("positions", "words")]
            optimizer = cases.copy_of(inner)
            if wrapped:
                optimizer = gc.CompressedOptimizer(optimizer, "no_compression")
            optimizer.build(tables)

        def step(gradients, words):
            with tf.GradientTape() as tape:
                found = tf.gather(tables[0].value, tf.range(LENGTH))
                found += tf.gather(tables[1].value, words)
                loss = tf.reduce_sum(gradients * found)
            optimizer.apply(tape.gradient(loss, [table.value for table in tables]), tables)

        run = tf.function(lambda *parts: strategy.run(step, parts) and None, autograph=False)
        for index in range(STEPS):
            run(*map(tf.constant, batch(index)))
        return [table.numpy() for table in tables]


    seen = {}
    for i, inner in enumerate(cases.OPTIMIZERS):
        for way in ("wrapped", "bare") if strategy.num_replicas_in_sync > 1 else ("bare",):
            seen[f"{i} {cases.label(inner)} {way}"] = trained(inner, way == "wrapped")
    report(seen)
'''
NAMES = [f"{i} {label(optimizer)}" for i, optimizer in enumerate(OPTIMIZERS)]


@functools.cache
def job(workers, way="strategy"):
    return results(run_workers(PROGRAM, workers, [way]))


@pytest.mark.parametrize("way", ["wrapped", "bare"])
@pytest.mark.parametrize("table", ["positions", "words"])
@pytest.mark.parametrize("optimizer", NAMES)
def test_workers_train_a_table_as_one_process(optimizer, table, way):
    index = ("positions", "words").index(table)
    (plain,) = job(1, "plain")
    for worker in job(2):
        # The optimizer gets the same numbers, so only its own operations round.
        actual, expected = worker[f"{optimizer} {way}"][index], plain[f"{optimizer} bare"][index]
        assert_close(actual, expected, terms=16, steps=8)
