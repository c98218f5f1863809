"""Tests the figures that benchmarks/layerwise.py computes from its runs' files."""

import layerwise
import pytest
from trainings import DIGITS

from tests.bounds import assert_close
from tf_gradcomp.compressors.base import GRADIENT_SUM


def record(method, kind, payloads, seed=0, metric=0.9, plans=()):
    epoch = {"metric": metric, "dense": 1000.0, "steps": 10.0, "plan_ratio": 4.0, "at_bound": 2}
    return {
        "method": method,
        "kind": kind,
        "learners": 4,
        "seed": seed,
        "epochs": [{**epoch, "payload": float(p), "sent": 3.0 * p} for p in payloads],
        "step_seconds": 0.02,
        "plan_seconds": list(plans),
    }


def test_the_table_has_ratios_to_the_default_and_the_share_of_planning():
    uniform = [100] * 8
    records = [
        record("no_compression", "no_compression", [1000] * 8, metric=0.92),
        record("top_k", "top_k, default", uniform),
        record("lower", "top_k, lower bound", [10] * 8),
        record("planned", "top_k, L-GreCo", [100] * 3 + [25] * 5, plans=[9, 0.008, 0.008, 0.008]),
    ]
    header, _, *rows = layerwise.markdown(records, DIGITS).splitlines()
    cells = [
        dict(zip(header.strip("| ").split(" | "), row[2:].split(" | "), strict=True))
        for row in rows
    ]
    assert [one["accuracy, %"] for one in cells] == ["92.00", "90.00", "90.00", "90.00"]
    assert cells[3]["difference from dense"] == "-2.00"
    assert [one["payload ratio"] for one in cells] == ["1.0", "10.0", "100.0", "40.0"]
    assert cells[3]["whole run's ratio"] == f"{8000 / 425:.1f}"
    assert cells[3]["sent, bytes a step"] == f"{3 * 425 / 8:.0f}"
    assert cells[2]["times fewer bytes than the default: in the end"] == "10.00"
    assert [cells[3][name] for name in ("in all", "of the plan")] == [f"{800 / 425:.2f}", "4.00"]
    assert float(cells[3]["planning, % of a learner's steps"].strip("| ")) == 2.0  # 8 of 400 ms


def test_sums_of_the_last_steps_of_a_period():
    training = layerwise.Training(layerwise.Job("digits", 2, "lgreco(method='qsgd')", "", 0))
    given = []
    train = training.learners.train_on_batch

    def noting(x, y):
        before = [
            total.numpy() for total in training.learners.exchange.replica().state()[GRADIENT_SUM]
        ]
        train(x, y)
        after = training.learners.exchange.replica().state()[GRADIENT_SUM]
        given.append([a.numpy() - b for a, b in zip(after, before, strict=True)])

    training.learners.train_on_batch = noting
    whole, tails = layerwise.sums_of(training, 4, [1, 3])
    assert list(tails) == [1, 3]
    for last, total in [(4, whole), (1, tails[1]), (3, tails[3])]:
        expected = [sum(of_one) for of_one in zip(*given[-last:], strict=True)]
        for actual, wanted in zip(total, expected, strict=True):
            assert_close(actual, wanted, terms=8)


@pytest.mark.parametrize("workload", ["digits", "resnet"])
def test_batches_and_held_out_images_fit_the_model(workload):
    task = layerwise.WORKLOADS[workload].make(64, 0)
    shape = task.model.input_shape[1:]
    x, _ = next(iter(task.batches))
    assert x.shape == (64, *shape)
    held_out, labels = task.validation_data
    assert held_out.shape == (len(labels), *shape)
