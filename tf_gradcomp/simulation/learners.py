"""Learners that train one model in lockstep."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.compressors.settings import is_whole_number
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.gradients import check_no_overwriting, native
from tf_gradcomp.exchange.setup import Candidate, Method
from tf_gradcomp.exchange.sparse import is_large
from tf_gradcomp.exchange.step import Observe, StepResult
from tf_gradcomp.groups.communicator import Sent, measures_per_step
from tf_gradcomp.groups.lockstep import LockstepGroup
from tf_gradcomp.groups.slices import assuming_independent, is_independent
from tf_gradcomp.keras.callbacks.autoencoder_training import AutoencoderTraining
from tf_gradcomp.keras.common.inner import (
    clip,
    in_loss_scaler,
    warn_of_lost_zeros,
)
from tf_gradcomp.keras.common.second_moments import AUTO, preconditioner_for
from tf_gradcomp.keras.local.local_steps import (
    LocalSteps,
    Schedule,
    check_can_be_local,
    check_method,
)
from tf_gradcomp.keras_version import (
    IS_KERAS_2,
    install_patches,
    keras,
    keras_module,
    keras_private,
)
from tf_gradcomp.policy import LayerPolicy
from tf_gradcomp.private.tensorflow import counting_replicas
from tf_gradcomp.simulation.learner_state import LearnersMoments, LearnersRounds, traced
from tf_gradcomp.simulation.task import (
    Comparison,
    StepReport,
    check_model,
    checked_local_steps,
    checked_method,
    pair_of,
    shares,
)
from tf_gradcomp.strategy.random_numbers import drawing_as

adam = keras_module("adam")

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None  # None: the loss does not depend on it


class Learners:
    """Trains a Keras model as a job of several workers would, in one process.

    Each learner computes the gradient of its share of every batch and keeps its own residual.
    Learners exchange gradients by the compressor's own code, in lockstep. A job with the same
    number of workers and the same batches computes the same in every step, up to float32 rounding.
    (`BatchNormalization` differs, because one model sees the learners' shares of a batch one after
    another. `tf.random` draws other numbers.) A single learner therefore trains like Keras, because
    a job of one worker exchanges nothing.

    Use it to test a method with more learners than you have machines, up to hundreds.

    Args:
        model: Built, and compiled with a loss and a plain Keras optimizer.
        learners: The number of learners, at least 1.
        compressor: A compressor, its name or its config: see `gc.compressors.get`.
        policy: The layer kind of each variable; by default `gc.Policy()`.
        precondition: As for `gc.CompressedOptimizer`.
        graph: Whether the exchange of a step is traced, and then runs as a graph. This saves time
            over many steps with few learners; tracing takes longer with more learners.
        local_steps: As for `gc.CompressedOptimizer`, but not `gc.Gossip`.

    Raises:
        TypeError: If `policy` is not a `gc.Policy`.
        ValueError: If the model is not built or compiled, its optimizer is already compressed,
            scales losses or accumulates gradients, the compressor is a choice by the network
            (`"auto"`), the number of learners is not positive, or the model was created under a
            strategy.

    Attributes:
        model: The model.
        exchange: The exchange of all learners; `exchange.replica(i)` has the state of learner i.
        plans: The plans of settings that `fit` has made, one for each epoch.

    Example:
        ```python
        model.compile(optimizer="adam", loss="mse", metrics=["mae"])
        learners = gc.simulation.Learners(model, 64)
        history = learners.fit(dataset.batch(256, drop_remainder=True), epochs=3)
        ```
    """

    def __init__(
        self,
        model: keras.Model,
        learners: int,
        compressor: str | Mapping[str, Any] | compressors.Compressor = "adacomp",
        policy: LayerPolicy | None = None,
        precondition: str | None = AUTO,
        graph: bool = False,
        local_steps: LocalSteps | Mapping[str, Any] | Schedule | None = None,
    ) -> None:
        install_patches()
        check_model(model)
        if not is_whole_number(learners, 1, sys.maxsize):
            raise ValueError(
                f"Learners: expected a whole number of at least 1; received {learners!r}."
            )
        settings = checked_local_steps(local_steps)
        method = checked_method(compressors.get(compressor))
        if settings:
            check_can_be_local(model.optimizer, None, precondition)
            check_method(method)
            precondition = None
        self.model = model
        self.exchange = _new_exchange(model, learners, method, policy, precondition)
        receiver = settings.outer if settings else in_loss_scaler(model.optimizer)[-1]
        if learners > 1:
            warn_of_lost_zeros(receiver, [method])
        check_no_overwriting(model.trainable_variables, learners)
        self.plans: list[Any] = []
        self._size = learners
        self._optimizer = model.optimizer
        self._moments = LearnersMoments(model, self.exchange)
        # Whether a large table is summed whole depends on the step's gradients: not in a graph.
        most = self.exchange.policy.max_dense_elements
        graph = graph and not any(is_large(spec, most) for spec in self.exchange.specs)
        self._traced_reduce = traced(self._reduce) if graph else self._reduce
        self._residual_norm = traced(self._mean_residual_norm)
        self._gradients = traced(self._local_gradients)
        self._apply_local = traced(self._take_local_step)
        self._apply = traced(self._apply_reduced)
        keras_private.build(model.optimizer, model.trainable_variables)
        self._random_states: Any = []  # before the step
        self._independent: list[int] = []  # the tables with lookups of no batch
        self._rounds: LearnersRounds | None = None
        if settings and learners > 1:
            self._rounds = LearnersRounds(model, settings, self.exchange)

    def train_on_batch(self, x: Any, y: Any, *, similarity: bool = False) -> StepReport:
        """Takes one step of all learners.

        Afterwards, the learners keep Adam's second moments until the end of `fit`.

        Args:
            x: The inputs of one batch for all learners: an array, or a nest of arrays.
            y: The labels, in the same form.
            similarity: Whether to measure how alike the learners are; that ends a round of local
                steps.

        Raises:
            ValueError: If the batch cannot be divided equally, or the model was compiled again.
        """
        if self.model.optimizer is not self._optimizer:
            raise ValueError(
                "Learners: the model was compiled again, but these learners belong to its earlier "
                "optimizer; create new learners."
            )
        if self._rounds and not self._rounds.in_warmup:
            batch = shares(x, y, self._size)
            return self._step_locally(self._rounds, batch, similarity=similarity)
        losses, all_gradients = [], []
        variables = self.model.trainable_variables
        for learner, share in enumerate(shares(x, y, self._size)):
            loss, gradients = self._compute_gradients(learner, share)
            losses.append(loss)
            if self.exchange.setup.preconditioner:
                gradients = clip(self.model.optimizer, gradients, variables)
            all_gradients.append(gradients)
        self._moments.to_learners()
        comparison = Comparison(self.residuals) if similarity else None
        reduced = self._exchanged(all_gradients, comparison)
        if reduced.finite:
            self._apply(reduced.gradients, self.exchange.divided_gradients(variables))
        return self._report(losses, reduced, comparison, finite=bool(reduced.finite))

    def _step_locally(
        self, rounds: LearnersRounds, batch: list[Any], *, similarity: bool
    ) -> StepReport:
        losses = [
            rounds.step(
                learner,
                functools.partial(self._compute_gradients, learner, share),
                self._apply_local,
            )
            for learner, share in enumerate(batch)
        ]
        comparison = Comparison(self.residuals) if similarity else None
        exchange = functools.partial(self._exchanged, comparison=comparison)
        finite, reduced = rounds.advance(exchange, end_all=similarity)
        return self._report(losses, reduced, comparison, finite=finite)

    def _exchanged(
        self, all_gradients: list[list[Gradient]], comparison: Comparison | None
    ) -> StepResult:
        if comparison:
            return self._reduce(all_gradients, comparison.observe)
        return StepResult(*self._traced_reduce(all_gradients))

    def _report(
        self,
        losses: list[Any],
        reduced: StepResult | None,
        comparison: Comparison | None,
        *,
        finite: bool,
    ) -> StepReport:
        """Returns the report of a step; `reduced` is None if nothing was exchanged."""
        sent = reduced.sent if reduced else [Sent.nothing()]
        specs = self.exchange.specs
        # A round exchanges all variables, possibly in several steps.
        indices = _present(reduced.gradients) if reduced and not self._rounds else range(len(specs))
        return StepReport(
            loss=float(np.sum(losses)),
            finite=finite,
            payload_bytes=float(np.mean([local.payload_bytes for local in sent])),
            sent_bytes=float(np.mean([local.sent_bytes for local in sent])),
            dense_bytes=sum(4 * specs[i].elements for i in indices),
            residual_norm=float(self._residual_norm()),
            similarity=comparison.measure(reduced.gradients) if comparison and reduced else None,
        )

    def synchronize(self) -> None:
        """Ends a round of local steps now, so that the model has the common weights.

        `fit` does so at the end of each epoch.
        """
        if self._rounds:
            self._rounds.end_all(functools.partial(self._exchanged, comparison=None))

    def fit(
        self,
        batches: Iterable[tuple[Any, Any]],
        epochs: int = 1,
        validation_data: Any = None,
        on_step: Callable[[StepReport], None] = lambda report: None,
        training: AutoencoderTraining | None = None,
    ) -> dict[str, list[float]]:
        """Trains, and returns for each epoch the logs of Keras and of `CompressionMonitor`.

        The logs also have the measures of `Similarity`, of the last step of each epoch. If the
        method's settings can be planned, each epoch ends with a plan, and the logs have the values
        that `LayerwisePlan` adds. If the method is trained, that happens after each step. A single
        learner sends nothing, so its ratios are NaN.

        At the end, the model's optimizer has all state that Keras' own `fit` needs to continue.
        Weights are their averages if the optimizer keeps averages (`use_ema`).

        Args:
            batches: Pairs of inputs and labels for all learners; gone through once for
                each epoch, such as a batched `tf.data.Dataset`.
            epochs: The number of epochs.
            validation_data: As for `model.evaluate`: a dataset, or a pair of arrays.
            on_step: Called after each step.
            training: The callback for methods that are trained after each step; by default one with
                default settings.
        """
        try:
            history = self._epochs(batches, epochs, validation_data, on_step, training)
        finally:
            self._moments.to_optimizer()
        optimizer = self.model.optimizer
        if epochs and isinstance(optimizer, keras.optimizers.Optimizer):  # not legacy
            optimizer.finalize_variable_values(self.model.trainable_variables)
        return history

    def _epochs(
        self,
        batches: Iterable[tuple[Any, Any]],
        epochs: int,
        validation_data: Any,
        on_step: Callable[[StepReport], None],
        training: AutoencoderTraining | None,
    ) -> dict[str, list[float]]:
        history: dict[str, list[float]] = {}
        training = training or AutoencoderTraining()
        for _ in range(epochs):
            reports, rows = self._epoch(batches, on_step, training)
            if not reports:
                raise ValueError(
                    "Learners.fit: there are no batches; a dataset that can be iterated only once "
                    "is empty in the second epoch."
                )
            logs = self._summary(reports, rows)
            plan = self.exchange.plan_settings()
            if plan:
                self.plans.append(plan)
                logs |= plan.measures()
            logs |= training.measures(self.exchange)
            if validation_data is not None:
                seen = self._validate(validation_data)
                logs |= {f"val_{name}": float(value) for name, value in seen.items()}
            for name, value in logs.items():
                history.setdefault(name, []).append(value)
        return history

    def _validate(self, data: Any) -> dict[str, float]:
        arrays = data if isinstance(data, (tuple, list)) else (data,)
        names = ("x", "y", "sample_weight")
        if len(arrays) > len(names):
            raise ValueError(
                "Learners: validation_data must be a dataset, or inputs and labels, optionally "
                f"with sample weights; received {len(arrays)} parts."
            )
        arguments = dict(zip(names, arrays, strict=False))
        return self.model.evaluate(**arguments, verbose=0, return_dict=True)

    def _epoch(
        self,
        batches: Iterable[tuple[Any, Any]],
        on_step: Callable[[StepReport], None],
        training: AutoencoderTraining,
    ) -> tuple[list[StepReport], list[int]]:
        """Takes the steps of an epoch; returns the report and the number of rows of each.

        Similarity is measured in the last step only, because it ends a round of local steps.
        """
        reports, rows = [], []
        remaining = iter(batches)
        batch = next(remaining, None)
        while batch is not None:
            following = next(remaining, None)
            x, y = pair_of(batch)
            reports.append(self.train_on_batch(x, y, similarity=following is None))
            rows.append(len(tf.nest.flatten(x)[0]))
            training.train(self.exchange)
            on_step(reports[-1])
            batch = following
        return reports, rows

    def _summary(self, reports: list[StepReport], rows: list[int]) -> dict[str, float]:
        payload = float(np.mean([report.payload_bytes for report in reports]))
        sent = float(np.mean([report.sent_bytes for report in reports]))
        return {
            "loss": float(np.average([report.loss for report in reports], weights=rows)),
            **measures_per_step(self._size, payload, sent, reports[0].dense_bytes),
            "skipped_steps": float(self.exchange.skipped_steps),
            "residual_norm": reports[-1].residual_norm,
            **(dataclasses.asdict(reports[-1].similarity) if reports[-1].similarity else {}),
        }

    def _compute_gradients(self, learner: int, share: Sequence[Any]) -> tuple[Any, list[Gradient]]:
        """Returns a learner's loss and gradients; all learners draw from the same random states."""
        if not IS_KERAS_2 and learner == 0:
            self._random_states = keras_private.random_states(self.model)
        elif not IS_KERAS_2:
            keras_private.set_random_states(self.model, self._random_states)
        return self._gradients(tf.constant(learner), *share)

    def _local_gradients(self, learner: Any, x: Any, y: Any) -> tuple[Any, list[Gradient]]:
        variables = self.model.trainable_variables
        with counting_replicas(self._size), drawing_as(learner), tf.GradientTape() as tape:
            predicted = self.model(x, training=True)
            loss = self.model.compute_loss(x=x, y=y, y_pred=predicted)
        gradients = tape.gradient(loss, [native(v) for v in variables])
        self._independent = [i for i, one in enumerate(gradients) if is_independent(one)]
        return loss, gradients

    def _take_local_step(self, gradients: list[Gradient]) -> None:
        pairs = zip(gradients, self.model.trainable_variables, strict=True)
        self.model.optimizer.apply_gradients(list(pairs))

    def _apply_reduced(self, reduced: list[Gradient], delayed: dict[int, tf.Tensor]) -> None:
        variables = self.model.trainable_variables
        optimizer = self.model.optimizer
        pairs = list(zip(reduced, variables, strict=True))
        if not self.exchange.setup.preconditioner:
            optimizer.apply_gradients(pairs)
            return
        divided = [i for i in delayed if reduced[i] is not None]
        divided_arguments = [variables[i] for i in divided], [delayed[i] for i in divided]
        with adam.momentum_only(optimizer, *divided_arguments):
            optimizer.apply_gradients(pairs)

    def _reduce(
        self,
        all_gradients: list[list[Gradient]],
        observe: Callable[[list[int]], Observe] | None = None,
    ) -> StepResult:
        """Exchanges the existing gradients like a job, with all learners in lockstep."""
        sums: list[Any] = list(all_gradients[0])
        if self._size == 1:
            return StepResult(sums, tf.constant(True), [Sent.nothing()])
        indices = _present(sums)
        variables = [self.model.trainable_variables[i] for i in indices]
        gradients = [[local[i] for i in indices] for local in all_gradients]
        inner = self._moments.inner_state(variables)
        observing = observe and observe(indices)
        with assuming_independent(local[i] for local in all_gradients for i in self._independent):
            result = self.exchange.reduce_in_lockstep(gradients, variables, inner, observing)
        for index, total in zip(indices, result.gradients, strict=True):
            sums[index] = total
        return StepResult(sums, result.finite, result.sent)

    @property
    def residuals(self) -> list[list[tf.Variable]]:
        """The residuals of each learner, in the order of the model's trainable variables."""
        states = [self.exchange.replica(learner).state() for learner in range(self._size)]
        return [state.get(RESIDUAL, []) for state in states]

    def _mean_residual_norm(self) -> tf.Tensor:
        norms = [tf.linalg.global_norm(local) if local else 0.0 for local in self.residuals]
        return tf.reduce_mean(norms)


def _new_exchange(
    model: keras.Model,
    learners: int,
    method: compressors.Compressor,
    policy: LayerPolicy | None,
    precondition: str | None,
) -> GradientExchange:
    """Returns the exchange of all learners, built for the model's trainable variables."""
    preconditioner = None
    if learners > 1:
        preconditioner = preconditioner_for(model.optimizer, method, precondition)
    chosen, group = Candidate(method, preconditioner), LockstepGroup(learners)
    one = Method(repr(method), [chosen], moments=preconditioner)
    exchange = GradientExchange(one, policy, lambda: group)
    exchange.build(model.trainable_variables)
    return exchange


def _present(gradients: Sequence[Gradient]) -> list[int]:
    return [index for index, gradient in enumerate(gradients) if gradient is not None]
