"""Compares LGC with its honest baseline, ScaleCom in few bits, and with dense gradients.

A network is trained by learners in one process, by each method in turn. All sparse methods choose
the same part of the entries of the same variables, and send the first layer and vectors dense.
Counted are the bytes that a learner gives to be sent, as `gradcomp simulate` counts them: in the
last epoch, and in the whole run with dense steps, training and weights.

    python benchmarks/learned.py --seeds 3 --learners 4 --learners 8 --optimizer sgd
    python benchmarks/learned.py --workload resnet --epochs 15
    python benchmarks/learned.py --variants --seeds 3 # LGC with different settings
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import keras
import matplotlib
import numpy as np
import resnet_digits
from machine import processor
from trainings import DIGITS, TEXT, Task

import tf_gradcomp as gc
from tf_gradcomp.compressors import LGC, NoCompression, ScaleCom

sys.path.append(str(Path(__file__).resolve().parents[1] / "keras_examples"))

import char_lstm
import digits_cnn

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BITS = (32, 16, 8, 4, 1)
INNOVATIONS = (0.01, 0.1, 0.3)  # parts of the chosen entries
MORE_TRAINING = 3  # times the steps, in the variant with more
WORKLOADS: dict[str, tuple[Callable[..., gc.simulation.Task], Task]] = {
    "digits": (digits_cnn.simulation_task, DIGITS),
    "resnet": (resnet_digits.simulation_task, DIGITS),
    "text": (char_lstm.simulation_task, TEXT),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of all runs."""

    workload: str
    epochs: int
    density: float
    dense_steps: int
    training_steps: int
    guard: float
    scalecom_dense_steps: int


def dense_paths(settings: Settings) -> list[str]:
    """The variables that LGC sends dense."""
    keras.backend.clear_session()  # so that layers have the names that they will have
    make, reading = WORKLOADS[settings.workload]
    model = make(reading.batch_size).model
    policy = gc.Policy.from_model(model)
    specs = [
        policy.spec(variable.path, variable.shape, variable.dtype)
        for variable in model.trainable_variables
    ]
    return [specs[place].path for place in _lgc(settings).layout(specs).whole]


def methods(settings: Settings) -> dict[str, gc.compressors.Compressor]:
    """Returns the methods to compare, by name."""
    rate = round(1 / settings.density)
    rates = dict.fromkeys(("convolution", "dense", "recurrent"), rate)
    rates |= dict.fromkeys(("embedding", "vector"))
    overrides = {f"^{re.escape(path)}$": None for path in dense_paths(settings)}
    scalecom = {
        f"ScaleCom, {bits} bits": ScaleCom(
            rates,
            value_bits=bits,
            overrides=overrides,
            warmup_steps=settings.scalecom_dense_steps,
        )
        for bits in BITS
    }
    lgc = {
        f"LGC, {pattern}": _lgc(settings, pattern=pattern)
        for pattern in ("all_reduce", "parameter_server")
    }
    return {"dense": NoCompression(), **scalecom, **lgc}


def variants(settings: Settings) -> dict[str, gc.compressors.Compressor]:
    """Returns LGC's default, and variants where its specification is open, by name."""
    sizes = [list(layer) for layer in LGC().architecture.encoder]
    fewer = [*sizes[:-1], [sizes[-1][0] // 2, *sizes[-1][1:]]]
    changed: dict[str, dict[str, Any]] = {
        "default": {},
        "in order of index": {"order": "index"},
        "in order of magnitude": {"order": "magnitude"},
        "latents of 16 bits": {"latent_dtype": "float16"},
        "half as many latents": {"autoencoder": {"encoder": fewer}},
        "a linear autoencoder": {"autoencoder": {"slope": 1.0}},
        "more training": {"training_steps": MORE_TRAINING * settings.training_steps},
    }
    for share in INNOVATIONS:
        of_one = {"pattern": "parameter_server", "innovation": share}
        changed[f"parameter_server, innovation {share:.0%}"] = of_one
    return {f"LGC, {name}": _lgc(settings, **of_one) for name, of_one in changed.items()}


def _lgc(settings: Settings, **changed: Any) -> LGC:
    given = {
        "density": settings.density,
        "dense_steps": settings.dense_steps,
        "training_steps": settings.training_steps,
        "guard": settings.guard,
    }
    return LGC(**{**given, **changed})


def run(
    method: Any, learners: int, optimizer: str, seed: int, settings: Settings
) -> dict[str, Any]:
    """Trains once and returns the measurements."""
    keras.backend.clear_session()
    make, reading = WORKLOADS[settings.workload]
    task = make(reading.batch_size, seed, optimizer)
    policy = gc.Policy.from_model(task.model)
    group = gc.simulation.Learners(task.model, learners, method, policy)
    reports: list[gc.simulation.StepReport] = []
    start = time.perf_counter()
    history = group.fit(task.batches, settings.epochs, task.validation_data, reports.append)
    payloads = [report.payload_bytes for report in reports]
    dense = reports[0].dense_bytes
    return {
        "quality": reading.scale * float(np.mean(history[reading.metric][-reading.last :])),
        "qualities": history[reading.metric],
        "last ratio": dense / payloads[-1],
        "whole ratio": dense * len(payloads) / sum(payloads),
        "whole bytes": sum(payloads),
        "seconds of a step": (time.perf_counter() - start) / len(payloads),
        "steps": len(payloads),
        "lgc_phase": history.get("lgc_phase", [0])[-1],
        "autoencoder_error": history.get("autoencoder_error", [0.0])[-1],
    }


def table(rows: Sequence[dict[str, Any]], reading: Task) -> list[str]:
    """The rows as Markdown, means over seeds."""
    digits = reading.digits
    lines = [
        f"| learners | optimizer | method | {reading.label} | last ratio | whole-run ratio | "
        "s a step | error of the autoencoder |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["learners"], row["optimizer"], row["method"]), []).append(row)
    for key, of_one in groups.items():

        def mean(name: str, of_one: list[dict[str, Any]] = of_one) -> float:
            return float(np.mean([row[name] for row in of_one]))

        spread = np.ptp([row["quality"] for row in of_one]) / 2
        fell_back = any(row["lgc_phase"] in (2, 4) for row in of_one)
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]}{' (not in use in the end)' if fell_back else ''} | "
            f"{mean('quality'):.{digits}f} ± {spread:.{digits}f} | {mean('last ratio'):.0f} | "
            f"{mean('whole ratio'):.1f} | {mean('seconds of a step'):.2f} | "
            f"{mean('autoencoder_error'):.2f} |"
        )
    return lines


def plot(rows: Sequence[dict[str, Any]], reading: Task, path: Path) -> None:
    """Quality over the bytes of the whole run."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys(row["method"] for row in rows):
        of_one = [row for row in rows if row["method"] == name]
        axes.scatter(
            [row["whole bytes"] / 1e6 for row in of_one],
            [row["quality"] for row in of_one],
            label=name,
        )
    axes.set(xscale="log", xlabel="MB given by a learner in the whole run", ylabel=reading.label)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--workload", type=click.Choice(list(WORKLOADS)), default="digits")
@click.option("--seeds", default=3, help="How many: 0, 1, ...")
@click.option("--learners", multiple=True, default=[4], type=int)
@click.option("--optimizer", multiple=True, default=["sgd"], type=click.Choice(["sgd", "adam"]))
@click.option("--variants", "of_lgc", is_flag=True, help="Compare settings of LGC alone.")
@click.option("--method", multiple=True, help="By default all; see the table for their names.")
@click.option("--epochs", default=40, help="Epochs of 22 steps; the text has 200 steps.")
@click.option("--density", default=0.01)
@click.option("--dense-steps", default=44, help="Of LGC.")
@click.option("--training-steps", default=132, help="Of LGC.")
@click.option("--guard", default=0.5, help="Of LGC.")
@click.option("--scalecom-dense-steps", default=0, help="Of ScaleCom.")
@click.option("--results", type=click.Path(path_type=Path), default=Path("results/learned"))
def main(
    seeds: int,
    learners: Sequence[int],
    optimizer: Sequence[str],
    of_lgc: bool,
    method: Sequence[str],
    results: Path,
    **of_all: Any,
) -> None:
    settings = Settings(**of_all)
    _, reading = WORKLOADS[settings.workload]
    results.mkdir(parents=True, exist_ok=True)
    rows = []
    known = variants(settings) if of_lgc else methods(settings)
    wrong = set(method) - set(known)
    if wrong:
        raise click.BadParameter(f"{', '.join(wrong)}; expected some of {', '.join(known)}")
    for count in learners:
        for name in optimizer:
            for label in method or known:
                for seed in range(seeds):
                    facts = {"learners": count, "optimizer": name, "method": label, "seed": seed}
                    measured = run(known[label], count, name, seed, settings)
                    rows.append({**facts, **measured})
                    print(facts, f"{reading.label} {measured['quality']:.3f}", flush=True)
                    record = {"settings": dataclasses.asdict(settings), "rows": rows}
                    (results / "rows.json").write_text(json.dumps(record, indent=1) + "\n")
    lines = table(rows, reading)
    (results / "table.md").write_text("\n".join(lines) + "\n")
    plot(rows, reading, results / "over-bytes.png")
    print(f"{processor()}, {settings}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
