"""A program run by `gc.CompressedOptimizer`, on replicas in this process."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc
from tests.net.plain import inner_optimizer
from tests.net.program import (
    CHECKPOINT,
    STORE,
    Gradient,
    Job,
    Program,
    Slices,
    Step,
    gradients_of,
    initial,
)
from tests.replicas import collective, copies, mirrored, per_replica
from tf_gradcomp.advice import probe as probing
from tf_gradcomp.advice.cost_model import Prediction, ProbeResult

SCALER = {"initial_scale": 8.0, "dynamic_growth_steps": 3}

strategies = functools.cache(mirrored)
workers = functools.cache(gc.MultiWorkerMirroredStrategy)


class Holder(keras.layers.Layer):
    """A layer with one variable."""

    def __init__(self, value: np.ndarray, weight: str, name: str) -> None:
        super().__init__(name=name)
        self.held, self.weight = value, weight

    def build(self, input_shape: Any) -> None:
        initializer = lambda shape, dtype: tf.constant(self.held)  # noqa: E731
        self.add_weight(shape=self.held.shape, initializer=initializer, name=self.weight)

    def call(self, inputs: Any) -> Any:
        return inputs


class Running:
    """A job of a program, from the state of the one before, if any."""

    def __init__(self, program: Program, job: Job) -> None:
        self.program, self.job = program, job
        self.strategy = _strategy(job)
        with self.strategy.scope():
            self.model = keras.Sequential([keras.Input((1,)), *_layers(program)], name="net")
            self.compressed, self.outer = _optimizers(program, job)
            self.model.compile(self.outer)
            with _choosing_the_first():
                self.outer.build(self.model.trainable_variables)
        self.variables = self.model.trainable_variables
        self.said: list[str] = []
        self._traced: dict[tuple[int, ...], Any] = {}

    def step(self, step: Step) -> None:
        scale = np.float32(self.outer.scale_loss(tf.constant(1.0)))
        replicas = self.job.replicas
        gradients = [gradients_of(self.program, step, replica) for replica in range(replicas)]
        tensors = [
            tf.nest.map_structure(
                lambda *values: per_replica(self.strategy, values) if replicas > 1 else values[0],
                *[_tensors(gradient, scale) for gradient in copies],
            )
            for copies in zip(*gradients, strict=True)
        ]
        with self._listening():
            self._run(step.given)(tensors)

    def weights(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self.variables]

    def slots(self) -> list[keras.Variable]:
        """The variables of the optimizer that updates."""
        return _core(self.compressed).variables

    def left(self) -> list[np.ndarray]:
        """Returns the part of each variable's gradients that is not applied yet."""
        exchange = self.compressed.exchange
        if not self.keeps_residuals():
            return [np.zeros(shape) for shape in self.program.shapes]
        scales = exchange.facts.residual_scale.numpy()
        pairs = zip(exchange.residuals, scales, strict=True)
        return [np.float64(residual.numpy()) / scale for residual, scale in pairs]

    def keeps_residuals(self) -> bool:
        """Tells whether it keeps residuals."""
        return bool(self.compressed.exchange.residuals)

    def unequal(self) -> list[str]:
        """Returns the names of variables whose values differ among the replicas."""
        outer = [self.outer] if self.outer is not self.compressed else []
        local = [
            v for optimizer in outer for v in (optimizer.dynamic_scale, optimizer.step_counter)
        ]
        found = []
        for variable in [*self.variables, *self.compressed.inner_optimizer.variables, *local]:
            first, *others = copies(self.strategy, variable)
            if any(other.tobytes() != first.tobytes() for other in others):
                found.append(variable.path)
        return found or self._unequal_on_workers()

    def _unequal_on_workers(self) -> list[str]:
        if not _in_real_job():
            return []
        values = [*self.variables, *self.compressed.inner_optimizer.variables]
        digest = zlib.crc32(b"".join(copies(self.strategy, v)[0].tobytes() for v in values))
        counts = self.strategy.gather(
            self.strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant([digest], tf.int64)
            ),
            axis=0,
        )
        return ["some, on another worker"] if len(set(counts.numpy())) > 1 else []

    def resume(self, before: Running) -> None:
        """Takes over all state."""
        with self._listening():
            if self.job.resumes == STORE:
                _by_stores(before, self)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    form = _by_checkpoint if self.job.resumes == CHECKPOINT else _by_weights
                    form(before, self, pathlib.Path(folder))

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Appends the log's warnings to `said` within this context."""
        original = tf.get_logger().warning
        tf.get_logger().warning = lambda text, *args: self.said.append(text % args)
        try:
            yield
        finally:
            tf.get_logger().warning = original

    def _run(self, given: tuple[int, ...]) -> Any:
        variables = [self.variables[i] for i in given]

        def on_replica(*tensors: Any) -> None:
            gradients = map(_gradient, tensors, variables)
            self.outer.apply(list(gradients), variables)

        def run(tensors: Any) -> None:
            if self.job.replicas == 1:
                on_replica(*tensors)
            else:
                self.strategy.run(on_replica, args=tuple(tensors))

        if not self.job.graph:
            return run
        if given not in self._traced:
            self._traced[given] = tf.function(run, autograph=False, reduce_retracing=True)
        return self._traced[given]


def jobs_of(program: Program) -> Iterator[tuple[Running, Running | None]]:
    """Each job before its first step, and the one that it has taken over from."""
    before = None
    for job in program.jobs:
        running = Running(program, job)
        if before is not None:
            running.resume(before)
        yield running, before
        before = running


def _strategy(job: Job) -> tf.distribute.Strategy:
    if _in_real_job():
        return workers()
    if job.replicas == 1:
        return tf.distribute.get_strategy()
    return collective() if job.collective else strategies(job.replicas)


def _in_real_job() -> bool:
    return "TF_CONFIG" in os.environ


def _layers(program: Program) -> list[Holder]:
    return [
        Holder(value, "embeddings" if i in program.tables else "kernel", f"layer{i}")
        for i, value in enumerate(initial(program))
    ]


def _optimizers(program: Program, job: Job) -> tuple[gc.CompressedOptimizer, Any]:
    scaled = keras.optimizers.LossScaleOptimizer
    inner = inner_optimizer(program)
    method = gc.compressors.Auto([job.compressor, job.rival]) if job.rival else job.compressor
    compressed = gc.CompressedOptimizer(
        scaled(inner, **SCALER) if program.scaler == "inside" else inner,
        method,
        gc.Policy(max_dense_elements=program.max_dense_elements),
        precondition=job.precondition,
    )
    return compressed, scaled(compressed, **SCALER) if program.scaler == "around" else compressed


@contextlib.contextmanager
def _choosing_the_first() -> Iterator[None]:
    """Within it, `Auto` predicts its first candidate to be the fastest."""

    def predicted(group: Any, specs: Any, candidates: Any, effort: Any) -> ProbeResult:
        return ProbeResult([Prediction("", 0, i, 0, 0, 0, 0, 0) for i, _ in enumerate(candidates)])

    original, probing.probe = probing.probe, predicted
    try:
        yield
    finally:
        probing.probe = original


def _core(optimizer: Any) -> Any:
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _chain(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "inner_optimizer", None)
    return [optimizer, *(_chain(inner) if inner is not None else [])]


def _by_stores(before: Running, after: Running) -> None:
    for old, new in zip(before.variables, after.variables, strict=True):
        new.assign(old.numpy())
    for old, new in zip(_chain(before.outer), _chain(after.outer), strict=True):
        store: dict[str, Any] = {}
        old.save_own_variables(store)
        new.load_own_variables(store)


def _by_weights(before: Running, after: Running, folder: pathlib.Path) -> None:
    before.model.save_weights(folder / "net.weights.h5")
    after.model.load_weights(folder / "net.weights.h5")


def _by_checkpoint(before: Running, after: Running, folder: pathlib.Path) -> None:
    saved = tf.train.Checkpoint(model=before.model, optimizer=before.outer)
    path = saved.write(str(folder / "checkpoint"))
    status = tf.train.Checkpoint(model=after.model, optimizer=after.outer).read(path)
    status.expect_partial()


def _tensors(gradient: Gradient, scale: np.float32) -> tuple[tf.Tensor, ...]:
    if isinstance(gradient, Slices):
        return tf.constant(gradient.values * scale), tf.constant(gradient.indices, tf.int64)
    return (tf.constant(gradient * scale),)


def _gradient(tensors: tuple[tf.Tensor, ...], variable: keras.Variable) -> Any:
    if len(tensors) == 1:
        return tensors[0]
    return tf.IndexedSlices(*tensors, tf.constant(tuple(variable.shape), tf.int64))
