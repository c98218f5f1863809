"""Runs a program by the Keras optimizer alone, in one process, on the sums of gradients."""

from __future__ import annotations

import collections
from collections.abc import Sequence, Set
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc
from tests.net.program import (
    Gradient,
    Job,
    Program,
    Slices,
    Step,
    dense,
    gradients_of,
    initial,
)
from tf_gradcomp.policy import GradientSpec


def inner_optimizer(program: Program) -> keras.optimizers.Optimizer:
    """The optimizer that a program wraps."""
    return getattr(keras.optimizers, program.optimizer)(**program.settings)


class Plain:
    """A program run by the inner optimizer alone, without any loss scaling.

    Gradients of a skipped step that replicas keep are applied in the next step that is not skipped.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.variables = [
            keras.Variable(value, name="embeddings" if i in program.tables else f"kernel{i}")
            for i, value in enumerate(initial(program))
        ]
        self.optimizer = inner_optimizer(program.without("loss_scale_factor"))
        self.optimizer.build(self.variables)
        self.kept: dict[int, np.ndarray] = {}

    def update(self, job: Job, steps: Sequence[Step], keeps: bool) -> None:
        """Takes the steps of an update; with `keeps`, gradients of a skipped update are kept."""
        bad = bad_of(steps)
        if not bad:
            for step in steps:
                self._apply(job, step)
            return
        for _ in steps[1:]:
            self._average()
        if keeps:
            for variable, mean in means(self.program, job, steps, without=bad).items():
                if not self.program.stays_sparse(variable):
                    self.kept[variable] = self.kept.get(variable, 0) + mean

    def _apply(self, job: Job, step: Step) -> None:
        all_gradients = [gradients_of(self.program, step, r) for r in range(job.replicas)]
        gradients = []
        for variable, replica_gradients in zip(
            step.given, zip(*all_gradients, strict=True), strict=True
        ):
            total = self._total(job, variable, replica_gradients)
            if variable in self.kept:
                total = dense(total) + self.kept.pop(variable) * self.program.micro_steps
            gradients.append(_tensor(total))
        self.optimizer.apply(gradients, [self.variables[i] for i in step.given])

    def _average(self) -> None:
        """Does what else Keras does on a step that accumulates."""
        optimizer = self.optimizer
        if not optimizer.use_ema:
            return
        optimizer._update_model_variables_moving_average(self.variables)
        every = optimizer.ema_overwrite_frequency
        if every and (int(optimizer.iterations) + 1) % every == 0:
            optimizer._overwrite_model_variables_with_average_value(self.variables)

    def _total(self, job: Job, variable: int, gradients: Sequence[Gradient]) -> Gradient:
        if variable not in self.program.tables:
            return np.sum(gradients, 0, dtype=np.float32)
        joined = Slices(
            np.concatenate([gradient.values for gradient in gradients]),
            np.concatenate([gradient.indices for gradient in gradients]),
            self.program.shapes[variable],
        )
        gathered = gc.compressors.get(job.compressor).slices_dtype is not None
        whole = job.replicas == 1 or gathered or self.program.stays_sparse(variable)
        return joined if whole else joined.merged()


def means(
    program: Program, job: Job, steps: Sequence[Step], without: Set[int] = frozenset()
) -> dict[int, np.ndarray]:
    """Returns the mean of the replicas' sums over the steps of one update, by variable."""
    total: dict[int, np.ndarray] = collections.defaultdict(lambda: np.float64(0))
    for step in steps:
        for replica in set(range(job.replicas)) - without:
            gradients = gradients_of(program, step, replica)
            for variable, gradient in zip(step.given, gradients, strict=True):
                total[variable] = total[variable] + dense(gradient) / program.micro_steps
    return total


def bad_of(steps: Sequence[Step]) -> set[int]:
    """The replicas with a gradient that is not finite."""
    return {replica for step in steps for replica in step.bad}


def keeps_gradients(job: Job, exchanges: int) -> bool:
    """Tells whether a replica keeps its gradient of a step that is skipped by another's fault.

    Args:
        job: Whose step it is.
        exchanges: How many there were before, which tells whether the job is warming up.
    """
    compressor = gc.compressors.get(job.compressor)
    while compressor.warmup and exchanges < compressor.warmup_steps:
        compressor = compressor.warmup
    state = compressor.state(GradientSpec("any", (1,), "float32", "dense"))
    return job.replicas > 1 and "residual" in state


def _tensor(gradient: Gradient) -> Any:
    if not isinstance(gradient, Slices):
        return tf.constant(gradient, tf.float32)
    return tf.IndexedSlices(
        tf.constant(gradient.values),
        tf.constant(gradient.indices, tf.int64),
        tf.constant(gradient.shape, tf.int64),
    )
