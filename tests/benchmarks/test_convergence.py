"""Tests the figures that benchmarks/convergence.py computes from its runs' files."""

import convergence
import numpy as np
import pytest


def record(accuracies, *, compressed):
    """Two epochs of ten steps with 1,000 weights: a kernel of 900 and a bias of 100."""
    history = {"val_accuracy": accuracies}
    traffic = None
    if compressed:
        history["sent_bytes"] = [300.0, 100.0]
        traffic = {
            "exchanges": 20,
            "payload_bytes": 20 * 160,
            "sent_bytes": 20 * 200,
            "dense_bytes": 20 * 4000,
            "tensor_bytes": {"kernel": 20 * (8 + 86), "bias": 20 * (8 + 10)},
            "variables": {
                "kernel": {"kind": "convolution", "elements": 900},
                "bias": {"kind": "vector", "elements": 100},
            },
        }
    return {"history": history, "traffic": traffic, "weights": 1000, "steps_per_epoch": 10}


@pytest.fixture
def runs():
    def run(compressor, seed, accuracies):
        return convergence.Run(
            convergence.DIGITS,
            workers=4,
            optimizer="adam",
            compressor=compressor,
            seed=seed,
            record=record(accuracies, compressed=compressor != "no_compression"),
        )

    return [
        run("no_compression", 0, [0.5, 0.9]),
        run("adacomp", 0, [0.5, 0.8]),
        run("no_compression", 1, [0.5, 0.7]),
        run("adacomp", 1, [0.5, 0.7]),
    ]


def test_ratios(runs):
    dense, compressed = runs[:2]
    assert (dense.payload_ratio, dense.wire_ratio, dense.paper_ratio()) == (1, 1, 1)
    assert compressed.payload_ratio == 4000 / 160
    assert compressed.wire_ratio == (2 * 3 / 4 * 4000) / 200
    assert compressed.paper_ratio() == 4000 / (86 + 4 + 10 + 4)
    assert compressed.paper_ratio("convolution") == 3600 / (86 + 4)


def test_bytes_over_steps(runs):
    dense, compressed = runs[:2]
    np.testing.assert_array_equal(dense.steps, [10, 20])
    np.testing.assert_array_equal(dense.sent_bytes, [60_000, 120_000])
    np.testing.assert_array_equal(compressed.sent_bytes, [3_000, 4_000])


def test_comparison(runs):
    (row,) = convergence.compare(convergence.DIGITS, runs, "no_compression", "adacomp")
    assert (row["workers"], row["optimizer"], row["seeds"]) == (4, "adam", 2)
    assert row["dense"] == pytest.approx((65.0, np.std([70, 60], ddof=1)))
    assert row["difference"][0] == pytest.approx(np.mean([-5, 0]))
    lines = convergence.markdown(convergence.DIGITS, [row], "adacomp")
    assert lines[2].startswith("| 4 | adam | 2 | 65.00 ± 7.07 | 62.50 ± 3.54 | -2.50 ± 3.54 | 25 ")


def test_one_seed_has_no_deviation_and_the_first_epoch_is_a_third_of_two(runs):
    (row,) = convergence.compare(convergence.DIGITS, runs[:2], "no_compression", "adacomp")
    lines = convergence.markdown(convergence.DIGITS, [row], "adacomp")
    assert lines[2].startswith("| 4 | adam | 1 | 70.00 | 65.00 | -5.00 | 25 ")
    assert row["curve"]["no_compression at 1/3"] == pytest.approx(50)
    assert row["curve"]["no_compression at 3/3"] == pytest.approx(90)
