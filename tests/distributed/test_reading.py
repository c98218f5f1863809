"""Each batch of a `PyDataset` and of a Python generator is used once, and by all workers alike."""

import functools
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.ranks import RANK, SIZE, report
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
BATCHES = 12


class Numbered(keras.utils.PyDataset):
    """Batches of one row for each worker; its numbers rise by 100 each time an epoch ends."""

    def __init__(self, seconds, *args):
        super().__init__(*args)
        self.seconds, self.epochs = seconds, 0

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        time.sleep(self.seconds * (index % 3))  # so that they end in another order
        x = np.full((SIZE, 1), index + 100 * self.epochs, "float32")
        return x, x.copy()

    def on_epoch_end(self):
        self.epochs += 1


class Endless(Numbered):
    num_batches = None


class Spy(keras.layers.Layer):
    """Notes the numbers that it is given in steps."""

    def call(self, x):
        tf.numpy_function(lambda rows: numbers.extend(rows[:, 0].tolist()), [x], [])
        return x


def noted(run):
    numbers.clear()
    returned = run()
    return {"numbers": [*numbers], "returned": returned}


def py_datasets():
    """Each way to read, in training and validation, and one of them in all that Keras offers."""
    found = {"ways": []}
    for way in WAYS:
        train, valid = Numbered(*way), Numbered(*way)
        fit = {"verbose": 0, "epochs": 2, "validation_data": valid}
        found["ways"].append(noted(lambda train=train, fit=fit: model.fit(train, **fit) and None))
    parts = {"verbose": 0, "shuffle": False, "epochs": 3, "steps_per_epoch": 4}
    found["parts"] = noted(lambda: model.fit(Numbered(*way), **parts) and None)
    found["evaluate"] = noted(lambda: model.evaluate(Numbered(*way), verbose=0))
    found["predict"] = noted(lambda: model.predict(Numbered(*way), verbose=0)[:, 0])
    found["endless"] = noted(lambda: model.fit(Endless(*way), **parts) and None)
    return found


# Seconds, threads or processes, which of them, and the size of the queue.
WAYS = [(0.001, 1, True, 10), (0.001, 3, True, 1), (0, 1), (0.002 * RANK, 4, False, 2), (0, 2)]


def generators():
    """Uses a generator in several calls; in the second call, one process is a little slower."""

    def batches(count=1000, seconds=0.0):
        for i in range(count):
            time.sleep(seconds)
            x = np.full((SIZE, 1), i, "float32")
            yield x, x

    train, valid, tested = batches(seconds=0.01 * RANK), batches(), batches(seconds=0.005)
    fit = {"verbose": 0, "steps_per_epoch": 3}
    found = {
        "fits": [
            noted(lambda kwargs=kwargs: model.fit(train, **fit, **kwargs) and None)
            for kwargs in ({}, {"epochs": 2}, {})
        ],
        "single steps": [
            noted(lambda: model.fit(train, verbose=0, steps_per_epoch=1) and None) for _ in range(3)
        ],
        "evaluations": [
            noted(lambda: model.evaluate(tested, steps=3, verbose=0)) for _ in range(3)
        ],
    }
    validated = {"validation_data": valid, "validation_steps": 3, "epochs": 3}
    found["validation"] = noted(lambda: model.fit(batches(), **fit, **validated) and None)
    finite = {"validation_data": batches(5), "epochs": 2}
    found["finite"] = noted(lambda: model.fit(batches(), **fit, **finite) and None)
    return found


@functools.cache
def seen():
    return results(run_workers(PROGRAM, 2))


@pytest.fixture(params=range(2))
def worker(request):
    return seen()[request.param]


def whole_numbers(call):
    return [int(number) for number in call["numbers"]]


def batches(epoch, start=0, stop=12):
    return [100 * epoch + i for i in range(start, stop)]


@pytest.mark.parametrize("way", range(5))
def test_each_batch_of_a_py_dataset_is_trained_on_once_in_an_order_that_workers_share(way):
    first, second = (whole_numbers(worker["py_datasets"]["ways"][way]) for worker in seen())
    assert first == second
    # Keras ends an epoch before the first one, and before each validation.
    trained, validated, trained_next, validated_next = (first[i : i + 12] for i in range(0, 48, 12))
    assert sorted(trained) == batches(1) != trained
    assert sorted(trained_next) == batches(2) != trained_next
    assert [*validated, *validated_next] == [*batches(1), *batches(3)]
    assert len(first) == 48


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_each_batch_of_a_py_dataset_is_evaluated_and_predicted_once(worker, call):
    assert sorted(whole_numbers(worker["py_datasets"][call])) == batches(
        0 if call == "predict" else 1
    )


def test_evaluate_and_predict_equal_one_process(worker):
    found = worker["py_datasets"]
    assert found["evaluate"]["returned"] == np.mean(batches(1))
    assert found["predict"]["returned"] == np.repeat(2 * np.arange(12), 2).tolist()


@pytest.mark.parametrize("call", ["parts", "endless"])
def test_epochs_of_a_part_of_a_py_dataset_continue_after_the_last_one(worker, call):
    # batches that were read ahead belong to an earlier epoch
    assert [index % 100 for index in whole_numbers(worker["py_datasets"][call])] == batches(0)


def test_several_calls_share_the_batches_of_a_generator(worker):
    found = worker["generators"]
    assert [whole_numbers(call) for call in found["fits"]] == [batches(0, *part) for part in FITS]
    assert [whole_numbers(call) for call in found["single steps"]] == [[12], [13], [14]]
    evaluations = found["evaluations"]
    assert [whole_numbers(call) for call in evaluations] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [call["returned"] for call in evaluations] == [1.0, 4.0, 7.0]


FITS = [(0, 3), (3, 9), (9, 12)]


def test_validation_by_a_generator_loses_nothing_between_epochs(worker):
    # Keras looks at two batches of a generator, and begins every pass with them.
    parts = [*[0, 1, 2], *[0, 1, 2], *[3, 4, 5], *[0, 1, 3], *[6, 7, 8], *[0, 1, 4]]
    assert whole_numbers(worker["generators"]["validation"]) == parts
    finite = [*[0, 1, 2], *[0, 1, 2, 3, 4], *[3, 4, 5], *[0, 1]]
    assert whole_numbers(worker["generators"]["finite"]) == finite


if __name__ == "__main__":
    numbers = []
    strategy = gc.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layers = [
            keras.Input((1,)),
            Spy(),
            keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(2)),
        ]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.0), "mae")
    report({"py_datasets": py_datasets(), "generators": generators()})
