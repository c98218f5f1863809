"""Trainings and timings of learners in one process: what they depend on, and their records."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import keras
import numpy as np
import tensorflow as tf
from output import processor
from pool import Work
from records import rounded
from trainings import DIGITS, LARGE_TRANSFORMER, TEXT, TRANSFORMER, Task

import tf_gradcomp as gc
from tf_gradcomp import compressors
from tf_gradcomp.advice.codec_speed import CodecSpeed
from tf_gradcomp.compressors import StepInputs
from tf_gradcomp.exchange.replica import ReplicaStep
from tf_gradcomp.exchange.state import handles, new_state
from tf_gradcomp.policy import DENSE as DENSE_LAYER
from tf_gradcomp.policy import GradientSpec

sys.path.append(str(Path(__file__).resolve().parent / "programs"))

import char_lstm
import common
import digits_cnn
import texts
import transformer_lm

WORTH_TRACING = 25  # exchanges of each learner
FAINT = 0.001  # by which a loss is multiplied
DATA = "GRADCOMP_DATA"
DENSE = "no_compression"
EPOCH = 22  # steps in which each of the digits is seen once
EVALUATIONS = 4  # of tasks that take longer to evaluate
SIDE = 512  # of the square matrix whose compression is timed
WARM_UP, REPEATS = 10, 31  # from an empty residual ten times as much is sent

Rows = tuple[np.ndarray, np.ndarray]
Made = tuple[keras.Model, Rows, Rows]


@dataclasses.dataclass(frozen=True)
class Training:
    """One training: all that its result depends on.

    Attributes:
        task: Name of the workload.
        learners: The number of learners; 1 for dense training, which is equal for all numbers.
        seed: Seed of the weights and the order of the rows.
        steps: The number of steps.
        compressor: The method, as `gc.compressors.get` takes it.
        optimizer: `"adam"`, `"sgd"` with momentum, or `"muon"`; a Transformer has AdamW for Adam.
        batch_size: Rows of a step, of all learners together; None is the task's own.
        rate: How many times the learning rate is.
        knows_layers: Whether the policy reads the layers from the model.
        similarity: Whether to measure how alike the learners are, at each evaluation.
    """

    task: str
    learners: int
    seed: int
    steps: int
    compressor: str = DENSE
    optimizer: str = "adam"
    batch_size: int | None = None
    rate: float = 1.0
    knows_layers: bool = False
    similarity: bool = False

    @property
    def name(self) -> str:
        """The training's name, and its record's: all that is not as usual is in it."""
        parts = [self.task, f"{self.learners}learners", slug(self.compressor)]
        parts += [self.optimizer] if self.optimizer != "adam" else []
        parts += [f"batch{self.batch_size}"] if self.batch_size else []
        parts += [f"rate{self.rate:g}"] if self.rate != 1 else []
        parts += ["layers"] if self.knows_layers else []
        parts += ["similarity"] if self.similarity else []
        return "-".join([*parts, f"{self.steps}steps", f"seed{self.seed}"])

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.batch_size or WORKLOADS[self.task].reading.batch_size


@dataclasses.dataclass(frozen=True)
class Encoding:
    """The time of a method on one matrix, with gradients as in `kernels.py`.

    Attributes:
        compressor: The method, as `gc.compressors.get` takes it.
        learners: The number of learners, whose payloads are decoded.
        seed: Of the gradients.
    """

    compressor: str
    learners: int
    seed: int

    @property
    def name(self) -> str:
        """The name, and the record's."""
        return f"encoding-{self.learners}learners-{slug(self.compressor)}-seed{self.seed}"

    def measure(self) -> dict[str, Any]:
        """Returns the medians over steps, in milliseconds of a learner.

        The learner is answered at once, as if all learners had sent the same.
        """
        tf.random.set_seed(self.seed)
        method = compressors.get(self.compressor)
        specs = [GradientSpec("layer/kernel", (SIDE, SIDE), "float32", DENSE_LAYER)]
        variables = new_state(method, specs)
        state = handles(variables)
        mean = tf.random.normal([SIDE, SIDE], stddev=0.02)
        gradient, step = tf.Variable(mean), tf.Variable(0, dtype=tf.int64)

        def draw() -> None:
            gradient.assign(mean + tf.random.normal([SIDE, SIDE], stddev=0.3))
            step.assign_add(1)

        def next_step() -> ReplicaStep:
            gradients, step_index = [gradient.read_value()], step.read_value()
            finite = tf.constant(True)
            inputs = StepInputs(specs, gradients, state, step_index, finite, 0, self.learners)
            return ReplicaStep.new(inputs)

        speed = CodecSpeed(method, next_step, draw)
        speed.run(WARM_UP)
        work = speed.measure(REPEATS)
        return {
            "encode_ms": 1e3 * work.encode,
            "decode_ms": 1e3 * work.decode,
            "elements": SIDE * SIDE,
            "processor": processor(),
        }


Run: TypeAlias = Training | Encoding


def slug(compressor: str) -> str:
    """Returns a compressor's text as a part of a file's name."""
    return re.sub(r"[^\w.=+-]+", "_", compressor).strip("_")


def _images(name: str, training: Training) -> Made:
    train, test = common.load_images(name, training.seed)
    optimizer = _optimizer(training, digits_cnn)
    return digits_cnn.compiled_model(train[0].shape[1:], optimizer), train, test


def _optimizer(training: Training, program: Any) -> keras.optimizers.Optimizer:
    if training.optimizer == "muon":
        rate = training.rate * program.LEARNING_RATES["adam"]
        return keras.optimizers.Muon(rate, exclude_layers=["logits"])
    rate = training.rate * program.LEARNING_RATES[training.optimizer]
    return program.make_optimizer(training.optimizer, rate)


def _lstm(file: str | None, training: Training, **sizes: int) -> Made:
    text, held_out = texts.load(file and str(Path(os.environ[DATA], file)))
    model = char_lstm.compiled_model(_optimizer(training, char_lstm), **sizes)
    return model, texts.sequences(text), texts.sequences(held_out)


def _faint_lstm(training: Training) -> Made:
    """A small LSTM with gradients so small that Adam's epsilon, and errors in it, count."""
    model, rows, held_out = _lstm(None, training, width=64)
    metrics = [texts.bits_per_character]
    model.compile(model.optimizer, model.loss, loss_weights=FAINT, metrics=metrics)
    return model, rows, held_out


def _transformer(size: str, training: Training) -> Made:
    text, held_out = texts.load(None)
    rate = training.rate * transformer_lm.LEARNING_RATE
    name = {"adam": "adamw"}.get(training.optimizer, training.optimizer)
    optimizer = transformer_lm.make_optimizer(name, training.steps, rate)
    model = transformer_lm.compiled_model(optimizer, transformer_lm.SIZES[size])
    return model, texts.sequences(text), texts.sequences(held_out)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A task to train.

    Attributes:
        make: Returns the model, compiled, and the rows to train with and to validate on.
        reading: How to read the task's quality from the held-out metric.
        file: Its file in the folder of data, if it needs one.
    """

    make: Callable[[Training], Made]
    reading: Task
    file: str | None = None


_SHAKESPEARE = "shakespeare.txt.gz"
WORKLOADS = {
    "digits": Workload(functools.partial(_images, "digits"), DIGITS),
    "mnist": Workload(functools.partial(_images, "mnist"), dataclasses.replace(DIGITS, last=1)),
    "shakespeare": Workload(functools.partial(_lstm, _SHAKESPEARE), TEXT, _SHAKESPEARE),
    "shakespeare-2layers": Workload(
        functools.partial(_lstm, _SHAKESPEARE, layers=2), TEXT, _SHAKESPEARE
    ),
    "python": Workload(functools.partial(_lstm, None), TEXT),
    "python-small": Workload(functools.partial(_lstm, None, width=64), TEXT),
    "python-faint": Workload(_faint_lstm, TEXT),
    "transformer": Workload(functools.partial(_transformer, "small"), TRANSFORMER),
    "large-transformer": Workload(functools.partial(_transformer, "large"), LARGE_TRANSFORMER),
}


_START_SECONDS = 4.0  # of a process
_ENCODING_SECONDS = 0.3  # of each learner
_SECONDS = {  # of a row's gradient, and of a learner's part of a step, on one core
    "digits": (0.0001, 0.008),
    "mnist": (0.0005, 0.014),
    "shakespeare": (0.0008, 0.08),
    "shakespeare-2layers": (0.001, 0.12),
    "python": (0.0008, 0.08),
    "python-small": (0.0004, 0.012),
    "transformer": (0.004, 0.03),
    "large-transformer": (0.07, 0.1),
}


def expected_seconds(run: Run) -> float:
    """Returns about how long a run takes on one core."""
    if isinstance(run, Encoding):
        return _START_SECONDS + _ENCODING_SECONDS * run.learners
    row_seconds, learner_seconds = _SECONDS[run.task]
    return _START_SECONDS + run.steps * (run.rows * row_seconds + run.learners * learner_seconds)


def steps_between_evaluations(run: Training) -> int:
    """Returns the number of steps between two points of a run's curve."""
    return EPOCH if run.task == "digits" else -(-run.steps // EVALUATIONS)


def check_data(tasks: Iterable[str]) -> None:
    """Refuses tasks whose data is not there.

    Raises:
        click.UsageError: If a file is missing.
    """
    for task in tasks:
        file = WORKLOADS[task].file
        if file and not Path(os.environ.get(DATA, ""), file).is_file():
            raise click.UsageError(
                f"{task} reads {file} in the folder that the environment's {DATA} names, and it is "
                f"not in {os.environ.get(DATA)!r}. Set {DATA}, or choose other tasks by --only."
            )


def train(
    training: Training, every: int, local_steps: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Trains; returns the record.

    Args:
        training: Which training.
        every: After so many steps the model is evaluated, and settings are planned if they can be.
        local_steps: A config of `gc.LocalSteps`.

    Returns:
        Curves of what was measured at each evaluation, the quality at the end, bytes of a mean step
        and learner, and the traffic of the second half by variable.
    """
    workload = WORKLOADS[training.task]
    keras.backend.clear_session()
    keras.utils.set_random_seed(training.seed)
    model, rows, held_out = workload.make(training)
    exchanges = training.steps
    if local_steps:
        exchanges = training.steps / local_steps["steps"] + local_steps["warmup_steps"]
    learners = gc.simulation.Learners(
        model,
        training.learners,
        training.compressor,
        policy=gc.Policy.from_model(model) if training.knows_layers else None,
        graph=exchanges > WORTH_TRACING * training.learners,
        local_steps=local_steps,
    )
    batches = (
        tf.data.Dataset.from_tensor_slices(rows)
        .shuffle(len(rows[0]), seed=training.seed)
        .repeat()
        .batch(training.rows)
    )
    autoencoder = gc.callbacks.AutoencoderTraining()
    metric = workload.reading.metric.removeprefix("val_")
    reports, periods = [], []
    start = time.perf_counter()
    traffic = learners.exchange.traffic()
    for step, (x, y) in enumerate(batches.take(training.steps), 1):
        ends = step % every == 0 or step == training.steps
        reports.append(learners.train_on_batch(x, y, similarity=ends and training.similarity))
        autoencoder.train(learners.exchange)
        if step == training.steps // 2:
            traffic = learners.exchange.traffic()
        if ends:
            learners.synchronize()
            learners.exchange.plan_settings()
            seen = model.evaluate(*held_out, batch_size=500, verbose=0, return_dict=True)
            periods.append({"step": step, "curve": seen[metric], **_measures(reports, periods)})
    curves = {name: [period[name] for period in periods] for name in periods[0]}
    return {
        **curves,
        "quality": workload.reading.scale
        * statistics.mean(curves["curve"][-workload.reading.last :]),
        "dense_bytes": reports[0].dense_bytes,
        "payload_bytes": statistics.mean(report.payload_bytes for report in reports),
        "sent_bytes": statistics.mean(report.sent_bytes for report in reports),
        "traffic": common.traffic_by_variable(learners.exchange, traffic),
        "seconds": time.perf_counter() - start,
        "processor": processor(),
    }


def _measures(
    reports: list[gc.simulation.StepReport], periods: list[dict[str, Any]]
) -> dict[str, float]:
    """Returns what is told of a period that has just ended, and of its last step."""
    period_reports = reports[periods[-1]["step"] if periods else 0 :]
    similarity = period_reports[-1].similarity
    return {
        "period_payload_bytes": statistics.mean(report.payload_bytes for report in period_reports),
        "residual_norm": period_reports[-1].residual_norm,
        **(dataclasses.asdict(similarity) if similarity else {}),
    }


def _measure(run: Run) -> dict[str, Any]:
    timed = isinstance(run, Encoding)
    measured = run.measure() if timed else train(run, steps_between_evaluations(run))
    return {**dataclasses.asdict(run), **rounded(measured)}


def _summary(record: dict[str, Any]) -> str:
    if "quality" in record:
        return f"{record['quality']:.3f}, {record['seconds']:.0f} s"
    return f"{record['encode_ms']:.1f} and {record['decode_ms']:.1f} ms"


WORK = Work(_measure, expected_seconds, _summary)
