"""Measures how far compressed training lags behind dense training, and compares with the record.

    python benchmarks/lag.py            # one seed, as the tests do
    python benchmarks/lag.py --record   # all seeds, for lags.json

A small LSTM trains on the text that Python has with it. That text differs between versions of
Python, and so does the loss; the lag behind dense training on the same batches hardly does.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import simulated
from simulated import Training

FILE = Path(__file__).with_name("lags.json")
DENSE = Training("python-small", 1, 0, 240)
METHODS = ("adacomp", "top_k")
LEARNERS = 2
SEEDS = 6
EVERY = 20  # steps between evaluations
LAST = 6  # evaluations over which the lag is averaged
DEVIATIONS = 4  # from the recorded mean, of the recorded seeds


def lags(seed: int, methods: Sequence[str] = METHODS) -> dict[str, float]:
    """Trains dense and by each method; returns the bits by which each method is behind."""
    dense = _bits(dataclasses.replace(DENSE, seed=seed))
    return {
        method: _bits(dataclasses.replace(DENSE, seed=seed, learners=LEARNERS, compressor=method))
        - dense
        for method in methods
    }


def _bits(training: Training) -> float:
    return statistics.mean(simulated.train(training, EVERY)["curve"][-LAST:])


def limits(recorded: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the largest lag that each method may have."""
    return {
        method: statistics.mean(of_seeds) + DEVIATIONS * statistics.stdev(of_seeds)
        for method, of_seeds in recorded.items()
    }


def too_late(measured: Mapping[str, float], recorded: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns a sentence on each method that lags more than it did."""
    most = limits(recorded)
    return [
        f"{method}: {lag:+.3f} bits behind dense, and when recorded "
        f"{statistics.mean(recorded[method]):+.3f} (at most {most[method]:+.3f}). Find what slows "
        "the training, or record the new lag: python benchmarks/lag.py --record"
        for method, lag in measured.items()
        if not lag <= most[method]
    ]


@click.command(help=__doc__)
@click.option("--record", is_flag=True, help="Write lags.json.")
@click.option("--seed", default=0, show_default=True, help="To compare with the record.")
def main(record: bool, seed: int) -> None:
    if record:
        of_seeds = [lags(number) for number in range(SEEDS)]
        found = {method: [round(one[method], 4) for one in of_seeds] for method in METHODS}
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        print(f"Recorded {found}; limits {limits(found)}.")
        return
    measured = lags(seed)
    print(measured)
    faults = too_late(measured, json.loads(FILE.read_text()))
    if faults:
        raise click.ClickException("\n".join(faults))


if __name__ == "__main__":
    main()
