"""Workers that read the same data in different orders, and batches with too few rows for all."""

import functools
import logging
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close
from tests.ranks import RANK, argument, report
from tests.workers import result, run_workers
from tf_gradcomp.groups import messages

PROGRAM = Path(__file__)  # each worker runs this file
ROWS = 65  # in batches of 16, the last has one row
x = np.arange(ROWS * 2, dtype="float32").reshape(ROWS, 2) / 100
y = np.arange(ROWS, dtype="float32")
policies = tf.data.experimental.AutoShardPolicy


class Heard(logging.Handler):
    def emit(self, record):
        heard.append(record.getMessage())


def told(run):
    """Returns the messages logged while `run` is called."""
    heard.clear()
    messages.forget()
    run()
    return [*heard]


def fit(data, y=None, **kwargs):
    return told(lambda: model.fit(data, y, verbose=0, **kwargs))


def dataset(seed=None, policy=None, rows=None, parts=None):
    data = tf.data.Dataset.from_tensor_slices((x[:64], y[:64]) if rows is None else rows)
    data = data.shuffle(64, seed=seed, reshuffle_each_iteration=parts).batch(16)
    if policy is None:
        return data
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return data.with_options(options)


def file_dataset(names):
    parsed = lambda line: (tf.strings.to_number(tf.strings.split([line], ",").values), 1.0)  # noqa: E731
    names = (
        names if isinstance(names, tf.data.Dataset) else tf.data.Dataset.from_tensor_slices(names)
    )
    lines = names.interleave(tf.data.TextLineDataset, cycle_length=2)
    return lines.map(parsed).map(lambda a, b: (tf.ensure_shape(a, [2]), b)).shuffle(64).batch(4)


def seen_by_the_chief(each):
    """A dataset whose first order is the same on all workers, and which the chief has used."""
    data = dataset(seed=3, parts=each)
    if RANK == 0:
        next(iter(data))
    return data


def augmented():
    data = tf.data.Dataset.from_tensor_slices((x[:64], y[:64]))
    return data.map(lambda a, b: (a + tf.random.uniform([2]), b)).batch(16)


def made_by_the_chief():
    """A dataset without a seed, after the chief has made one that other workers have not."""
    if RANK == 0:
        dataset()
    return dataset()


def shuffled_within():
    """A dataset with a function that shuffles, which no seed of the strategy reaches."""
    data = tf.data.Dataset.from_tensors((x[:64], y[:64]))
    rows = lambda a, b: tf.data.Dataset.from_tensor_slices((a, b)).shuffle(64)  # noqa: E731
    return data.flat_map(rows).batch(16)


def kept_whole():
    return dataset(policy=policies.OFF)


def orders():
    folder = Path(argument(1))
    names = [str(folder / f"{i}.csv") for i in range(int(argument(2)))]
    rotated = names[RANK:] + names[:RANK]
    unseeded = {
        "no seed": fit(dataset(), epochs=2),
        "no seed, DATA": fit(dataset(policy=policies.DATA)),
        "no seed, equal weights": fit(dataset().map(lambda a, b: (a, b, tf.ones_like(b)))),
        "no seed, shuffled once": fit(dataset(parts=False)),
        "arrays, no seed": fit(x[:64], y[:64]),
        "evaluated": told(lambda: model.evaluate(dataset(), verbose=0)),
        "files shuffled": fit(file_dataset(tf.data.Dataset.list_files(names))),
        "kept whole, evaluated": told(lambda: model.evaluate(kept_whole(), verbose=0)),
        "seed, shuffled once, seen by the chief": fit(seen_by_the_chief(each=False), epochs=2),
        "files": fit(file_dataset(names)),
        "files shuffled alike": fit(file_dataset(tf.data.Dataset.list_files(names, seed=1))),
        "augmented": fit(augmented()),
        "own data": fit(strategy.distribute_datasets_from_function(lambda _: dataset())),
        "arrays": fit(x[:64], y[:64], shuffle=False),
        "seed": fit(dataset(seed=3), epochs=2),
    }
    return {
        "seen by the chief": fit(seen_by_the_chief(each=True)),
        "other rows": fit(dataset(0, rows=(x[RANK : RANK + 64], y[RANK : RANK + 64]))),
        "shuffled within": fit(shuffled_within()),
        "files in other orders": fit(file_dataset(rotated)),
        "kept whole": fit(kept_whole()),
        "made by the chief": fit(made_by_the_chief()),
    }, unseeded


def one_row(data, labels=None, **kwargs):
    """Returns the state after training that ends with a batch of one row."""
    with strategy.scope():
        layers = [
            keras.Input((2,)),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(1),
        ]
        normalized = keras.Sequential(layers)
        normalized.compile(keras.optimizers.SGD(1e-3), "mse")
    args = {"verbose": 0, "shuffle": False, "validation_data": (x[:64], y[:64]), "epochs": 2}
    said = told(lambda: normalized.fit(data, labels, **args, **kwargs))
    return {
        "told": said,
        "history": normalized.history.history,
        "statistics": [
            np.asarray(v).tolist() for v in normalized.layers[0].non_trainable_variables
        ],
    }


FILES = 10
TOLD_OF_FILES = "list the files"
TOLD_OF_ROWS = ["set_random_seed(0)", "reshuffle_each_iteration=False"]
TOLD_OF_EQUAL_ROWS = ["AutoShardPolicy.OFF", "seed=rank"]


@functools.cache
def seen():
    with tempfile.TemporaryDirectory() as folder:
        # So many that two random orders of the files are hardly ever equal.
        for i in range(FILES):
            rows = [f"{i},{row}\n" for row in range(8)]
            (Path(folder) / f"{i}.csv").write_text("".join(rows))
        workers = run_workers(PROGRAM, 2, [folder, str(FILES)], deadline=300)
    return [{**result(worker), "stderr": worker.stderr} for worker in workers]


def test_the_chief_reports_different_orders_with_advice():
    logged = seen()[0]["orders"][0]
    for name, warnings in logged.items():
        assert len(warnings) == 1, name
        advice = {"files in other orders": [TOLD_OF_FILES], "kept whole": TOLD_OF_EQUAL_ROWS}
        for expected in advice.get(name, TOLD_OF_ROWS):
            assert expected in warnings[0], name


def test_equal_or_unknown_orders_are_not_reported():
    for worker in seen():
        assert set(map(tuple, worker["orders"][1].values())) == {()}


@pytest.mark.parametrize("data", ["arrays", "dataset"])
def test_statistics_stay_as_they_are_on_a_worker_without_rows(data):
    # The batches of two epochs, as far as they have rows of this worker: of 8, and a last one of 1.
    x = np.arange(130, dtype="float32").reshape(65, 2) / 100
    for rank, worker in enumerate(seen()):
        mean, variance = np.zeros(2), np.ones(2)
        for start in [0, 16, 32, 48, 64] * 2:
            rows = x[start : start + 16]
            size = -(-len(rows) // 2)
            if len(local := rows[rank * size : (rank + 1) * size]):
                mean, variance = mean / 2 + local.mean(0) / 2, variance / 2 + local.var(0) / 2
        found = worker[data]
        # Ten updates by statistics over at most eight rows, of numbers below 2.
        assert_close(found["statistics"], [mean, variance], terms=8 + 4, steps=10, scale=2)
        assert np.isfinite(found["history"]["val_loss"]).all()


def test_a_worker_with_an_empty_batch_warns_in_each_epoch():
    counts = [worker["stderr"].count("this worker got an empty batch") for worker in seen()]
    assert counts == [0, 4]  # the second replica's, twice by arrays and twice by a dataset


def test_a_short_last_batch_of_arrays_is_reported_before_training():
    chief, other = (worker["arrays"]["told"] for worker in seen())
    assert any("1 row for 2 replicas" in message for message in chief)
    assert other == []


if __name__ == "__main__":
    heard = []
    strategy = gc.MultiWorkerMirroredStrategy()
    logging.getLogger("tf_gradcomp").addHandler(Heard())
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    report(
        {
            "orders": orders(),
            "arrays": one_row(x, y, batch_size=16),
            "dataset": one_row(batches),
        }
    )
