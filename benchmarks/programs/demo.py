"""Trains the digits network twice on worker processes of this machine: dense, and compressed.

    python demo.py
    python demo.py --malloc both

Prints accuracy, loss, bytes and time side by side, and draws the loss over steps and over bytes.
Both runs train digits_cnn.py with the same steps, settings and seed. `--malloc` selects the
workers' settings of malloc: see docs/malloc.md.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import click
import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tf_gradcomp.environment import MALLOC
from tf_gradcomp.launch import LocalJob
from tf_gradcomp.launch.resources import DEFAULT, TUNED, malloc_settings

PROGRAM = Path(__file__).with_name("digits_cnn.py")
RESULTS = Path(__file__).resolve().parents[1] / "results"  # a folder that git ignores
NAMES = {"no_compression": "dense", "adacomp": "AdaComp"}
LAST_EPOCHS = 5
SETTINGS = (DEFAULT, TUNED)

Record = dict[str, Any]


def train(
    compressor: str, setting: str, workers: int, args: list[str], folder: Path, progress: Progress
) -> Record:
    """Runs the program on local workers under a setting of malloc; returns its records."""
    file = folder / f"demo-{compressor}-{setting}.json"
    command = [sys.executable, str(PROGRAM), "--compressor", compressor]
    command += [*args, "--history", str(file)]
    name = f"{NAMES[compressor]}, {setting} malloc"
    bar = progress.add_task(f"{name}: starting {workers} workers")

    def on_line(worker: int, _stream: str, line: str) -> None:
        if worker != 0:
            return
        if epoch := re.match(r"Epoch (\d+)/(\d+)$", line):
            done, total = int(epoch[1]) - 1, int(epoch[2])
            progress.update(bar, completed=done, total=total)
        if accuracy := re.search(r"val_accuracy: (\S+)", line):
            description = f"{name}: test accuracy {float(accuracy[1]):.1%}"
            progress.update(bar, description=description, advance=1)

    # TensorFlow's start-up messages would hide the progress bar.
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
    env |= malloc_settings({**env, MALLOC: setting})
    with LocalJob(command, workers, env=env, on_line=on_line) as job:
        result = job.run()
    if result.exit_code:
        tail = result.first_failure.stderr_tail if result.first_failure else ()
        raise click.ClickException("\n".join([*tail, *result.summary()]))
    return json.loads(file.read_text())


def dense_ring_bytes(record: Record) -> float:
    """Bytes that each worker would send in a dense ring all-reduce per step."""
    workers = record["workers"]
    return 2 * (workers - 1) / workers * 4 * record["weights"]


def sent_bytes_by_epoch(record: Record) -> np.ndarray:
    """Bytes sent by a worker in a step, as the mean of each epoch."""
    return np.array(record["history"]["sent_bytes"])


def measures(record: Record) -> dict[str, float]:
    """Returns the values of a run in the table."""
    history, traffic = record["history"], record["traffic"]
    dense = 4 * record["weights"]
    payload = traffic["payload_bytes"] / traffic["exchanges"]
    sent = float(sent_bytes_by_epoch(record).mean())
    return {
        "accuracy": statistics.mean(history["val_accuracy"][-LAST_EPOCHS:]),
        "test_loss": statistics.mean(history["val_loss"][-LAST_EPOCHS:]),
        "loss": statistics.mean(history["loss"][-LAST_EPOCHS:]),
        "payload": payload,
        "sent": sent,
        "payload_ratio": dense / payload,
        "wire_ratio": dense_ring_bytes(record) / sent,
        "seconds": statistics.median(history["seconds_per_step"]),
    }


def comparison(all_records: dict[str, dict[str, Record]]) -> Table:
    """The runs side by side; runs with different settings of malloc differ only in time."""
    records = next(iter(all_records.values()))
    first_record = next(iter(records.values()))
    steps = first_record["steps_per_epoch"] * len(first_record["history"]["loss"])
    table = Table(
        title=f"Digits on {first_record['workers']} workers, {steps} steps, same seed", min_width=66
    )
    table.add_column("")
    for compressor in records:
        table.add_column(NAMES[compressor], justify="right")
    columns = [measures(record) for record in records.values()]
    for label, name, form in (
        (f"test accuracy, mean of the last {LAST_EPOCHS} epochs", "accuracy", ".2%"),
        ("test loss", "test_loss", ".4f"),
        ("training loss", "loss", ".4f"),
        ("payload, bytes per step", "payload", ",.0f"),
        ("bytes sent per step and worker", "sent", ",.0f"),
        ("payload ratio", "payload_ratio", ",.0f"),
        ("wire ratio", "wire_ratio", ",.0f"),
    ):
        table.add_row(label, *(f"{column[name]:{form}}" for column in columns))
    for setting, setting_records in all_records.items():
        times = [1e3 * measures(record)["seconds"] for record in setting_records.values()]
        label = f"time per step, {setting} malloc"
        table.add_row(label, *(f"{milliseconds:.1f} ms" for milliseconds in times))
    return table


def verdict_on_time(dense: Record, compressed: Record) -> str:
    """Explains the time of a step."""
    dense_measures, compressed_measures = measures(dense), measures(compressed)
    extra = compressed_measures["seconds"] - dense_measures["seconds"]
    if extra <= 0:
        return f"A compressed step was {-1e3 * extra:.1f} ms faster than a dense one."
    saved = dense_measures["sent"] - compressed_measures["sent"]
    break_even = 8 * saved / extra / 1e6
    return (
        f"A compressed step was {1e3 * extra:.1f} ms slower than a dense one: over the loopback "
        "of one machine, sending the gradients of such a small network costs almost nothing. The "
        f"{saved:,.0f} bytes saved are worth it on links slower than about {break_even:,.0f} "
        "Mbit/s. docs/benchmarks/links.md shows what large gradients gain."
    )


def plot(records: dict[str, Record], path: Path) -> None:
    """Draws the loss over steps and over bytes sent."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for colour, (compressor, record) in zip(("C0", "C1"), records.items(), strict=True):
        history = record["history"]
        steps = record["steps_per_epoch"] * np.arange(1, len(history["loss"]) + 1)
        sent = np.cumsum(sent_bytes_by_epoch(record)) * record["steps_per_epoch"] / 1e6
        for axis, x in ((left, steps), (right, sent)):
            axis.plot(x, history["loss"], color=colour, label=f"{NAMES[compressor]}, training")
            axis.plot(x, history["val_loss"], ":", color=colour, label=f"{NAMES[compressor]}, test")
    left.set(xlabel="steps", ylabel="loss", yscale="log", title="Loss over steps")
    right.set(xlabel="MB sent by each worker", xscale="log", title="Loss over bytes sent")
    left.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


@click.command(context_settings={"show_default": True})
@click.option("--workers", default=2, type=click.IntRange(min=2))
@click.option("--epochs", default=30)
@click.option("--optimizer", type=click.Choice(["adam", "sgd"]), default="adam")
@click.option("--seed", default=0)
@click.option("--malloc", "choice", default=TUNED, type=click.Choice([*SETTINGS, "both"]))
@click.option("--results", default=str(RESULTS), metavar="FOLDER", help="Where the picture goes.")
def main(workers: int, epochs: int, optimizer: str, seed: int, choice: str, results: str) -> None:
    """Train dense and compressed, and compare."""
    args = ["--epochs", str(epochs), "--optimizer", optimizer, "--seed", str(seed)]
    columns = (TextColumn("{task.description:<48}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as progress:
        all_records = {
            setting: {
                name: train(name, setting, workers, args, Path(results), progress) for name in NAMES
            }
            for setting in (SETTINGS if choice == "both" else (choice,))
        }
    console = Console()
    console.print(comparison(all_records))
    records = next(iter(all_records.values()))
    console.print(verdict_on_time(records["no_compression"], records["adacomp"]))
    picture = Path(results) / "demo.png"
    plot(records, picture)
    console.print(f"Loss over steps and over bytes sent: {picture}", soft_wrap=True)


if __name__ == "__main__":
    main()
