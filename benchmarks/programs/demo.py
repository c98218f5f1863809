"""Trains the digits network twice on workers of this machine: uncompressed, and with AdaComp.

    python demo.py
    GRADCOMP_MALLOC=default python demo.py     # see docs/memory.md

Prints accuracy, loss, bytes and time side by side, and draws the test loss over the bytes sent.
Both runs train digits_cnn.py with the same steps, settings and seed.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))

import pictures

PROGRAM = Path(__file__).with_name("digits_cnn.py")
RESULTS = Path(__file__).resolve().parents[2] / "results"  # a folder that git ignores
NAMES = {"no_compression": "uncompressed", "adacomp": "AdaComp"}
LAST_EPOCHS = 5

Record = dict[str, Any]


def train(
    compressor: str, workers: int, args: list[str], folder: Path, progress: Progress
) -> Record:
    """Runs the program on local workers; returns its records."""
    file = folder / f"demo-{compressor}.json"
    command = [sys.executable, "-m", "tf_gradcomp.cli", "run", "-n", str(workers)]
    command += [str(PROGRAM), "--compressor", compressor, *args, "--history", str(file)]
    name = NAMES[compressor]
    bar = progress.add_task(f"{name}: starting {workers} workers")
    # TensorFlow's start-up messages would hide the progress bar.
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
    with tempfile.TemporaryFile("w+") as errors:
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        for line in job.stdout:
            if epoch := re.search(r"Epoch (\d+)/(\d+)$", line):
                done, total = int(epoch[1]) - 1, int(epoch[2])
                progress.update(bar, completed=done, total=total)
            if accuracy := re.search(r"val_accuracy: (\S+)", line):
                description = f"{name}: test accuracy {float(accuracy[1]):.1%}"
                progress.update(bar, description=description, advance=1)
        if job.wait():
            errors.seek(0)
            raise click.ClickException(errors.read())
    return json.loads(file.read_text())


def ring_bytes(record: Record) -> float:
    """Bytes that each worker would send in an uncompressed ring all-reduce per step."""
    workers = record["workers"]
    return 2 * (workers - 1) / workers * 4 * record["weights"]


def measures(record: Record) -> dict[str, float]:
    """Returns the values of a run in the table."""
    history = record["history"]
    sent = statistics.mean(history["sent_bytes"])
    return {
        "accuracy": statistics.mean(history["val_accuracy"][-LAST_EPOCHS:]),
        "test_loss": statistics.mean(history["val_loss"][-LAST_EPOCHS:]),
        "loss": statistics.mean(history["loss"][-LAST_EPOCHS:]),
        "sent": sent,
        "fewer": ring_bytes(record) / sent,
        "milliseconds": 1e3 * statistics.median(history["seconds_per_step"]),
    }


def comparison(records: dict[str, Record]) -> Table:
    """The runs side by side."""
    first = next(iter(records.values()))
    steps = first["steps_per_epoch"] * len(first["history"]["loss"])
    title = f"Digits on {first['workers']} workers, {steps} steps, same seed"
    table = Table(title=title, min_width=66)
    table.add_column("")
    for compressor in records:
        table.add_column(NAMES[compressor], justify="right")
    columns = [measures(record) for record in records.values()]
    for label, name, form in (
        (f"test accuracy, mean of the last {LAST_EPOCHS} epochs", "accuracy", ".2%"),
        ("test loss", "test_loss", ".4f"),
        ("training loss", "loss", ".4f"),
        ("bytes sent per step and worker", "sent", ",.0f"),
        ("times fewer bytes sent", "fewer", ",.0f"),
        ("time per step, ms", "milliseconds", ".1f"),
    ):
        table.add_row(label, *(f"{column[name]:{form}}" for column in columns))
    return table


def verdict_on_time(dense: Record, compressed: Record) -> str:
    """Explains the time of a step."""
    before, after = measures(dense), measures(compressed)
    extra = after["milliseconds"] - before["milliseconds"]
    if extra <= 0:
        return f"A compressed step was {-extra:.1f} ms faster than an uncompressed one."
    saved = before["sent"] - after["sent"]
    return (
        f"A compressed step was {extra:.1f} ms slower than an uncompressed one: over the loopback "
        "of one machine, sending the gradients of such a small network costs almost nothing. The "
        f"{saved:,.0f} bytes saved are worth it on links slower than about "
        f"{8e-3 * saved / extra:,.0f} Mbit/s. docs/benchmarks/links.md shows what large gradients "
        "gain."
    )


def draw(records: dict[str, Record], optimizer: str, path: Path) -> None:
    """Draws the test loss over the bytes sent."""
    workers = next(iter(records.values()))["workers"]
    names = ("val_loss", "sent_bytes")
    runs = {
        compressor: {
            "steps_per_epoch": record["steps_per_epoch"],
            **{name: record["history"][name] for name in names},
        }
        for compressor, record in records.items()
    }
    pictures.loss_over_bytes(runs, f"Digits network, {workers} workers, {optimizer}", path)


@click.command(context_settings={"show_default": True})
@click.option("--workers", default=2, type=click.IntRange(min=2))
@click.option("--epochs", default=30)
@click.option("--optimizer", type=click.Choice(["adam", "sgd"]), default="adam")
@click.option("--seed", default=0)
@click.option("--results", default=str(RESULTS), metavar="FOLDER", help="Where the picture goes.")
def main(workers: int, epochs: int, optimizer: str, seed: int, results: str) -> None:
    """Train uncompressed and compressed, and compare."""
    args = ["--epochs", str(epochs), "--optimizer", optimizer, "--seed", str(seed)]
    columns = (TextColumn("{task.description:<36}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as progress:
        records = {name: train(name, workers, args, Path(results), progress) for name in NAMES}
    console = Console()
    console.print(comparison(records))
    console.print(verdict_on_time(records["no_compression"], records["adacomp"]))
    picture = Path(results) / "demo.png"
    draw(records, optimizer, picture)
    console.print(f"Test loss over the bytes sent: {picture}", soft_wrap=True)


if __name__ == "__main__":
    main()
