"""Measures the effect of malloc's settings on training: time, page faults and peak memory.

    python benchmarks/malloc_settings.py
    python benchmarks/malloc_settings.py --program dense --repeats 1
    python benchmarks/malloc_settings.py --allocator .../libmimalloc.so

Two workers run each program under each setting, in turns. Ratios are to the C library's defaults.
`--allocator` adds a row for the malloc of another library, such as the package cmeel-mimalloc.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import click
from machine import processor
from mallocs import SETTINGS
from output import print_table
from reports import means, reports_of
from rich.progress import track
from rich.table import Table
from used import Used

from tf_gradcomp.launch.resources import DEFAULT, TUNABLES, TUNED

KEEP = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1000000000000"
BETWEEN = {
    "hugetlb": {TUNABLES: "glibc.malloc.hugetlb=1"},
    "and kept": {TUNABLES: f"glibc.malloc.hugetlb=1:{KEEP}"},
}
ALL = {DEFAULT: SETTINGS[DEFAULT], **BETWEEN, TUNED: SETTINGS[TUNED]}
PROGRAMS = ("dense", "adacomp", "mapped", "growing", "predict", "checkpoint")
STEPS = 8
BATCH = 32


def work(program: str) -> None:
    """Trains on one worker; prints the times of its steps as JSON."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_gradcomp as gc

    layers = keras.layers
    random = np.random.default_rng(0)
    with gc.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential(
            [
                keras.Input((None, None, 3)),
                layers.Conv2D(64, 3, activation="relu", padding="same"),
                layers.Conv2D(64, 3, activation="relu", strides=2),
                layers.Conv2D(256, 3, activation="relu", strides=2),
                layers.Conv2D(512, 3, activation="relu", strides=2),
                layers.GlobalAveragePooling2D(),
                layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.SGD(0.01)
        if program != "dense":
            optimizer = gc.CompressedOptimizer(optimizer)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss=loss)
    images = random.random((8 * BATCH, 32, 32, 3), "float32")
    data = tf.data.Dataset.from_tensor_slices((images, np.arange(len(images)) % 10)).repeat()
    if program == "mapped":
        data = data.map(lambda x, y: (tf.image.random_flip_left_right(x), y), 8)
    data = data.batch(BATCH)
    if program == "growing":
        sizes = tf.data.Dataset.from_tensor_slices([16, 24, 32, 40]).repeat()
        data = tf.data.Dataset.zip((data, sizes)).map(
            lambda xy, size: (tf.image.resize(xy[0], (size, size)), xy[1])
        )
    data = data.prefetch(2)

    with tempfile.TemporaryDirectory() as folder:

        def train() -> None:
            model.fit(data, steps_per_epoch=STEPS, verbose=0)
            if program == "predict":
                model.predict(images, verbose=0)
            if program == "checkpoint":
                model.save_weights(gc.worker_path(f"{folder}/a.weights.h5"))

        train()
        before, start = Used.now(), time.perf_counter()
        train()
        seconds, used = time.perf_counter() - start, Used.now().since(before)
    print(
        json.dumps(
            {
                "seconds": seconds / STEPS,
                "cpu": used.cpu / STEPS,
                "faults": used.page_faults / STEPS,
                "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


def measured(program: str, variables: Mapping[str, str]) -> dict[str, float]:
    """Runs a program once; returns the means over its two workers."""
    return means(reports_of(__file__, program, variables=variables))


@click.command(help=__doc__)
@click.option("--program", "programs", type=click.Choice(PROGRAMS), multiple=True, default=PROGRAMS)
@click.option("--setting", "names", type=click.Choice(list(ALL)), multiple=True, default=list(ALL))
@click.option(
    "--allocator",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A library with another malloc; workers load it by LD_PRELOAD.",
)
@click.option("--repeats", default=3, show_default=True)
def main(
    programs: tuple[str, ...], names: tuple[str, ...], allocator: Path | None, repeats: int
) -> None:
    """Prints the table of programs and settings."""
    settings = {name: ALL[name] for name in names}
    if allocator:
        preload = {"LD_PRELOAD": str(allocator.resolve())}
        settings[allocator.name] = {**ALL[DEFAULT], **preload}
    table = Table(title=f"Two workers on {processor()}; medians of {repeats} runs")
    for name in ("program", "malloc", "time", "CPU time", "page faults a step", "peak memory, GB"):
        table.add_column(name, justify="left" if name in ("program", "malloc") else "right")
    runs = [(p, s) for p in programs for _ in range(repeats) for s in settings]
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    for program, setting in track(runs, "measuring"):
        results.setdefault((program, setting), []).append(measured(program, settings[setting]))
    for program in programs:
        base: dict[str, float] | None = None
        for setting in settings:
            of_all = results[program, setting]
            one = {name: statistics.median(run[name] for run in of_all) for name in of_all[0]}
            base = base or one
            table.add_row(
                program,
                setting,
                f"{one['seconds'] / base['seconds']:.2f}",
                f"{one['cpu'] / base['cpu']:.2f}",
                f"{one['faults']:,.0f}",
                f"{one['peak'] / 1e9:.2f}",
            )
    print_table(table)


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        work(sys.argv[1])
    else:
        main()
