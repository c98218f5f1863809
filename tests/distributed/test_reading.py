"""Each batch of a `PyDataset` and of a Python generator is used once, and by all workers alike."""

import functools
from pathlib import Path

import numpy as np
import pytest

from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs/reading.py"


@functools.cache
def seen():
    return [result(worker) for worker in run_workers(PROGRAM, 2)]


@pytest.fixture(params=range(2))
def report(request):
    return seen()[request.param]


def numbers(report):
    return [int(number) for number in report["numbers"]]


def batches(epoch, start=0, stop=12):
    return [100 * epoch + i for i in range(start, stop)]


@pytest.mark.parametrize("way", range(5))
def test_each_batch_of_a_py_dataset_is_trained_on_once_in_an_order_that_workers_share(way):
    first, second = (numbers(report["py_datasets"]["ways"][way]) for report in seen())
    assert first == second
    # Keras ends an epoch before the first one, and before each validation.
    trained, validated, trained_next, validated_next = (first[i : i + 12] for i in range(0, 48, 12))
    assert sorted(trained) == batches(1) != trained
    assert sorted(trained_next) == batches(2) != trained_next
    assert [*validated, *validated_next] == [*batches(1), *batches(3)]
    assert len(first) == 48


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_each_batch_of_a_py_dataset_is_evaluated_and_predicted_once(report, call):
    assert sorted(numbers(report["py_datasets"][call])) == batches(0 if call == "predict" else 1)


def test_evaluate_and_predict_equal_one_process(report):
    found = report["py_datasets"]
    assert found["evaluate"]["returned"] == np.mean(batches(1))
    assert found["predict"]["returned"] == np.repeat(2 * np.arange(12), 2).tolist()


@pytest.mark.parametrize("call", ["parts", "endless"])
def test_epochs_of_a_part_of_a_py_dataset_continue_after_the_last_one(report, call):
    # batches that were read ahead belong to an earlier epoch
    assert [index % 100 for index in numbers(report["py_datasets"][call])] == batches(0)


def test_several_calls_share_the_batches_of_a_generator(report):
    found = report["generators"]
    assert [numbers(call) for call in found["fits"]] == [batches(0, *part) for part in FITS]
    assert [numbers(call) for call in found["single steps"]] == [[12], [13], [14]]
    evaluations = found["evaluations"]
    assert [numbers(call) for call in evaluations] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [call["returned"] for call in evaluations] == [1.0, 4.0, 7.0]


FITS = [(0, 3), (3, 9), (9, 12)]


def test_validation_by_a_generator_loses_nothing_between_epochs(report):
    # Keras looks at two batches of a generator, and begins every pass with them.
    parts = [*[0, 1, 2], *[0, 1, 2], *[3, 4, 5], *[0, 1, 3], *[6, 7, 8], *[0, 1, 4]]
    assert numbers(report["generators"]["validation"]) == parts
    finite = [*[0, 1, 2], *[0, 1, 2, 3, 4], *[3, 4, 5], *[0, 1]]
    assert numbers(report["generators"]["finite"]) == finite
