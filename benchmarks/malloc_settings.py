"""Measures what settings of malloc do to training: time, page faults and peak memory.

    python benchmarks/malloc_settings.py
    python benchmarks/malloc_settings.py --program dense --repeats 1

Two workers run each program under each setting, in turns. Ratios are to the C library's defaults.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time

import click
import rich
from machine import processor
from rich.progress import track
from rich.table import Table

from tf_gradcomp.launch import LocalJob, malloc

KEEP = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1000000000000"
SETTINGS = {
    "default": {malloc.TUNABLES: ""},
    "hugetlb": {malloc.TUNABLES: "glibc.malloc.hugetlb=1"},
    "and kept": {malloc.TUNABLES: f"glibc.malloc.hugetlb=1:{KEEP}"},
    "tuned": malloc.settings({}),
}
PROGRAMS = ("dense", "adacomp", "mapped", "growing", "predict", "checkpoint")
STEPS = 8
BATCH = 32


def work(program: str) -> None:
    """Trains on one worker; prints what its steps took as JSON."""
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
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        train()
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "seconds": seconds / STEPS,
                "cpu": (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
                / STEPS,
                "faults": (after.ru_minflt - before.ru_minflt) / STEPS,
                "peak": after.ru_maxrss * 1024,
            }
        )
    )


def measured(program: str, setting: str) -> dict[str, float]:
    """Runs a program once; returns the means over its two workers."""
    found: list[dict[str, float]] = []

    def take(_worker: int, stream: str, line: str) -> None:
        if stream == "stdout" and line.startswith("{"):
            found.append(json.loads(line))

    env = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **SETTINGS[setting]}
    with LocalJob([sys.executable, __file__, program], 2, env=env, on_line=take) as job:
        result = job.run()
    if result.exit_code:
        raise SystemExit("\n".join(result.summary()))
    return {name: statistics.mean(of_one[name] for of_one in found) for name in found[0]}


@click.command(help=__doc__)
@click.option("--program", "programs", type=click.Choice(PROGRAMS), multiple=True, default=PROGRAMS)
@click.option("--setting", "settings", type=click.Choice(list(SETTINGS)), multiple=True)
@click.option("--repeats", default=3, show_default=True)
def main(programs: tuple[str, ...], settings: tuple[str, ...], repeats: int) -> None:
    """Prints the table of all programs and settings."""
    settings = settings or tuple(SETTINGS)
    table = Table(title=f"Two workers on {processor()}; medians of {repeats} runs")
    for name in ("program", "malloc", "time", "CPU time", "page faults a step", "peak memory, GB"):
        table.add_column(name, justify="left" if name in ("program", "malloc") else "right")
    runs = [(p, s) for p in programs for _ in range(repeats) for s in settings]
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    for program, setting in track(runs, "measuring"):
        results.setdefault((program, setting), []).append(measured(program, setting))
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
    rich.print(table)


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        work(sys.argv[1])
    else:
        main()
