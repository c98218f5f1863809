"""Orders in which two workers read data that a program shuffles without a seed, or with its own."""

import functools
import itertools
import tempfile

import pytest

from tests.workers import results, run_workers

ROWS, BATCH, EPOCHS = 48, 4, 2  # so many batches that random orders are hardly ever equal
PROGRAM = f"""
    import sys

    import keras
    import numpy as np
    import tensorflow as tf

    import tf_gradcomp as gc
    from tests.ranks import argument, report

    FOLDER, WAY = argument(1), argument(2)
    ROWS, BATCH, EPOCHS = {ROWS}, {BATCH}, {EPOCHS}
    if WAY == "seeded":
        tf.random.set_seed(5)
    strategy = gc.MultiWorkerMirroredStrategy()
    x, y = np.arange(ROWS, dtype="float32")[:, np.newaxis], np.zeros((ROWS, 1), "float32")
    rows, begun = [], []


    class Noting(keras.layers.Layer):
        def call(self, x, training=False):
            tf.numpy_function(lambda x: rows.append(x[:, 0].astype(int).tolist()), [x], [])
            return x


    class Epochs(keras.callbacks.Callback):
        def __init__(self, ends_after=None):
            super().__init__()
            self.seen, self.ends_after = [], ends_after

        def on_epoch_begin(self, epoch, logs=None):
            rows.clear()
            begun.append(epoch)

        def on_epoch_end(self, epoch, logs=None):
            self.seen.append([*rows])
            if epoch == self.ends_after:
                raise KeyboardInterrupt


    class Parts(keras.utils.PyDataset):
        def __len__(self):
            return ROWS // BATCH

        def __getitem__(self, index):
            return x[index * BATCH : index * BATCH + BATCH], y[:BATCH]


    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), Noting(), keras.layers.Dense(1)])
        model.compile(gc.CompressedOptimizer(keras.optimizers.SGD(0.0)), "mse")


    def fit(data, y=None, *callbacks, ends_after=None, **settings):
        epochs = Epochs(ends_after)
        settings = {{"epochs": EPOCHS, "verbose": 0, "callbacks": [*callbacks, epochs]}} | settings
        try:
            model.fit(data, y, **settings)
        except KeyboardInterrupt:
            pass
        return epochs.seen


    def dataset(**settings):
        data = tf.data.Dataset.from_tensor_slices((x, y))
        return data.shuffle(ROWS, **settings).batch(BATCH)


    def evaluated():
        rows.clear()
        model.evaluate(dataset(), verbose=0)
        return [[*rows]]


    def augmented():
        data = tf.data.Dataset.range(4).map(lambda _: tf.random.uniform([]))
        return [[float(value) for value in data] for _ in range(2)]


    def own_part(context):
        return dataset().unbatch().batch(BATCH // 2)


    def seeded():
        keras.utils.set_random_seed(5)
        return {{"dataset": fit(dataset()), "arrays": fit(x, y, batch_size=BATCH)}}


    if WAY == "seeded":
        report({{"kept": fit(dataset()), "set": tf.random.set_seed(5) or fit(dataset())}})
        sys.exit()
    backup = keras.callbacks.BackupAndRestore(FOLDER)
    report(
        {{
            "shuffled": {{
                "arrays": fit(x, y, batch_size=BATCH),
                "arrays in batches": fit(x, y, batch_size=BATCH, shuffle="batch"),
                "arrays by steps": fit(x, y, batch_size=BATCH, steps_per_epoch=ROWS // BATCH),
                "dataset": fit(dataset()),
                "dataset, shuffled once": fit(dataset(reshuffle_each_iteration=False)),
                "PyDataset": fit(Parts()),
                "evaluated": evaluated(),
                "resumed": fit(dataset(), None, backup, ends_after=0),
            }},
            "epoch of the resumed job": begun[-1],
            "own parts": fit(strategy.distribute_datasets_from_function(own_part)),
            "augmented": augmented(),
            "drawn": tf.random.uniform([]).numpy(),
            "seeded": [seeded(), seeded()],
        }}
    )
"""
SHUFFLED = [
    *("arrays", "arrays in batches", "arrays by steps", "dataset", "dataset, shuffled once"),
    *("PyDataset", "evaluated", "resumed"),
]


@functools.cache
def jobs():
    """Two runs without a seed; the second resumes what the first has not ended."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [folder, "unseeded"]
        return [results(run_workers(PROGRAM, 2, arguments)) for _ in range(2)]


def batches(workers, name):
    """The rows of each batch of all workers, in each epoch."""
    first, second = (worker["shuffled"][name] for worker in workers)
    return [
        [[*one, *other] for one, other in zip(*epoch, strict=True)]
        for epoch in zip(first, second, strict=True)
    ]


@pytest.mark.parametrize("run", [0, 1])
@pytest.mark.parametrize("name", SHUFFLED)
def test_each_row_is_used_once_in_an_epoch(name, run):
    epochs = batches(jobs()[run], name)
    assert len(epochs) == (1 if name in ("evaluated", "resumed") else EPOCHS)
    for epoch in epochs:
        rows = list(itertools.chain.from_iterable(epoch))
        assert sorted(rows) == list(range(ROWS))
        assert rows != list(range(ROWS))


@pytest.mark.parametrize("name", SHUFFLED[:-2])
def test_each_epoch_has_an_order_of_its_own(name):
    first, second = batches(jobs()[0], name)
    assert (first == second) == ("once" in name)


def test_the_second_run_has_resumed_the_first():
    assert [worker["epoch of the resumed job"] for worker in jobs()[0] + jobs()[1]] == [0, 0, 1, 1]


def test_arrays_in_batches_change_places_within_a_batch():
    for epoch in batches(jobs()[0], "arrays in batches"):
        starts = [min(rows) for rows in epoch]
        assert [sorted(rows) for rows in epoch] == [[*range(s, s + BATCH)] for s in starts]


@pytest.mark.parametrize("name", SHUFFLED)
def test_each_run_has_orders_of_its_own(name):
    assert batches(jobs()[0], name) != batches(jobs()[1], name)


def test_workers_shuffle_data_of_their_own_in_other_orders():
    first, second = (worker["own parts"] for worker in jobs()[0])
    assert first != second


def test_other_random_numbers_stay_without_a_seed():
    first, second = jobs()[0]
    for worker in (first, second):
        assert worker["augmented"][0] != worker["augmented"][1]  # in another epoch
    assert first["augmented"] != second["augmented"]
    assert first["drawn"] != second["drawn"]


def test_a_seed_that_the_program_sets_later_wins():
    # The resumed job trains for fewer epochs.
    runs = [[worker["seeded"] for worker in workers] for workers in jobs()]
    for run in runs:
        for one, again in run:
            assert one == again
    for kind in ("dataset", "arrays"):
        orders = [[seeded[0][kind][0] for seeded in run] for run in runs]
        assert orders[0] == orders[1]


def test_a_seed_that_the_program_has_set_before_is_kept():
    with tempfile.TemporaryDirectory() as folder:
        for worker in results(run_workers(PROGRAM, 2, [folder, "seeded"])):
            assert worker["kept"] == worker["set"]
