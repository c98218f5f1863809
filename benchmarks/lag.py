"""Records how far compressed training is behind dense training, for a test in CI.

    python benchmarks/lag.py    # writes lags.json: bits per character, for each seed

A small LSTM trains for a few steps on the text that Python has with it. Its loss is multiplied by a
small number, so that Adam's epsilon counts: epsilon is where a delay of small gradients once crept
in. The text differs between versions of Python, and so does the loss; the lag behind dense training
on the same batches differs no more than between seeds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from pathlib import Path

import simulated
from simulated import Training

FILE = Path(__file__).with_name("lags.json")
DENSE = Training("python-faint", 1, 0, 60)
SEEDS = 6
EVERY = 20  # steps between evaluations


def lag(seed: int) -> float:
    """Trains dense, and by AdaComp with two learners; returns by how many bits AdaComp is behind.

    This is the mean over all evaluations.
    """
    compressed = dataclasses.replace(DENSE, seed=seed, learners=2, compressor="adacomp")
    reached = simulated.train(compressed, EVERY)["curve"]
    return statistics.mean(reached) - statistics.mean(dense_curve(seed))


@functools.cache
def dense_curve(seed: int) -> list[float]:
    """Trains dense once; returns the bits per character of all evaluations."""
    return simulated.train(dataclasses.replace(DENSE, seed=seed), EVERY)["curve"]


def limit() -> float:
    """Returns the largest lag that passes: four deviations above the mean of those recorded.

    Other texts and other orders of rounding change a lag about as much as another seed.
    """
    recorded = json.loads(FILE.read_text())
    return statistics.mean(recorded) + 4 * statistics.stdev(recorded)


def compare() -> str | None:
    """Trains again; returns what is wrong if AdaComp lags more than when that was recorded."""
    measured = lag(0)
    found = f"AdaComp is {measured:+.3f} bits per character behind dense training"
    print(f"{found}; up to {limit():+.3f} were allowed by what is recorded.")
    if measured <= limit():
        return None
    return (
        f"{found}; expected at most {limit():+.3f}. Find what delays gradients, or record the new "
        "lags: python benchmarks/lag.py"
    )


if __name__ == "__main__":
    FILE.write_text(json.dumps([round(lag(seed), 4) for seed in range(SEEDS)]) + "\n")
