"""Learners that train one model in lockstep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.adam.handover import since_after, updates_after
from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.compressors.base import GRADIENT_SUM, RESIDUAL
from tf_gradcomp.distribute import riders, sparse
from tf_gradcomp.distribute.communicator import Sent, measures_per_step
from tf_gradcomp.distribute.gradients import all_finite, gradient_specs, native
from tf_gradcomp.distribute.layer_plans import LayerPlanner, PlanInForce
from tf_gradcomp.distribute.learning import AutoencoderState, lgc_in
from tf_gradcomp.distribute.lockstep import (
    handles,
    in_lockstep,
    new_job_state,
    new_state,
)
from tf_gradcomp.distribute.replica_step import ReplicaStep, Stepped, by_stage
from tf_gradcomp.distribute.state import residual_scale
from tf_gradcomp.keras_any.callbacks.autoencoder_training import AutoencoderTraining
from tf_gradcomp.keras_any.callbacks.compression_monitor import find_exchange
from tf_gradcomp.keras_any.callbacks.layerwise_plan import measures
from tf_gradcomp.keras_here import door, keras
from tf_gradcomp.policy import Policy, checked_policy
from tf_gradcomp.simulation.second_moments import SecondMoments
from tf_gradcomp.simulation.similarity import (
    Similarity,
    hamming_distance,
    mean_cosine_distance,
    union_density,
)
from tf_gradcomp.wrapper.precondition import AUTO

adam, keras_private = door("adam"), door("keras_private")

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None  # None: the loss does not depend on it


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What one step did; bytes are of one learner, the mean over all.

    Attributes:
        loss: The mean over the batch.
        finite: Whether the step was taken; it is skipped where one of several learners' gradients
            is not finite.
        payload_bytes: What a learner gave to be sent.
        sent_bytes: What a ring of workers would make it send, with what it passes on for others.
        dense_bytes: The bytes of its gradients as float32.
        residual_norm: The Euclidean norm of its residuals.
        similarity: How alike the learners are, if that was asked for.
    """

    loss: float
    finite: bool
    payload_bytes: float
    sent_bytes: float
    dense_bytes: int
    residual_norm: float
    similarity: Similarity | None = None


class Learners:
    """Trains a Keras model as a job of several workers would, in one process.

    Each learner computes the gradient of its share of every batch and keeps a residual of its own;
    they exchange by the compressor's own code, in lockstep. A job with as many workers and the same
    batches does the same, step by step, to float32 rounding. (`BatchNormalization` differs: here
    one model sees the learners' shares of a batch one after another.) So one learner does what
    Keras does, for a job of one worker exchanges nothing.

    Use it to see what a method does with more learners than there are machines, up to hundreds.

    Args:
        model: Built, and compiled with a loss and a plain Keras optimizer.
        learners: The number of learners, at least 1.
        compressor: A compressor, its name or its config: see `gc.compressors.get`.
        policy: Which layer kind each variable has; by default `gc.Policy()`.
        precondition: As for `gc.CompressedOptimizer`.
        graph: Whether the exchange of a step is traced, and then runs as a graph. That takes less
            time in many steps of few learners; tracing takes the longer the more there are.

    Raises:
        TypeError: If `policy` is no `gc.Policy`.
        ValueError: If the model is not built or compiled, its optimizer is compressed already,
            scales losses or accumulates gradients, the compressor is a choice by the network
            (`"auto"`), the number of learners is not positive, or the model was made under a
            strategy.

    Attributes:
        plans: The plans of `LGreCo` that `fit` has made, one for each epoch.

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
        policy: Policy | None = None,
        precondition: str | None = AUTO,
        graph: bool = False,
    ) -> None:
        _check_model(model)
        if not isinstance(learners, int) or learners < 1:
            raise ValueError(f"Learners: expected a number of at least 1; received {learners!r}.")
        self.model = model
        self.compressor = checked_method(compressors.get(compressor))
        self._policy = checked_policy(policy)
        self.specs = gradient_specs(model.trainable_variables, self._policy)
        self._residual_scale = residual_scale(self.compressor, self.specs) or 1.0
        self._last_similarity: Similarity | None = None
        self._skipped_steps = 0
        self._taken: set[int] = set()  # places of gradients whose second moments learners have
        self._preconditioner = (
            adam.preconditioner_for(model.optimizer, self.compressor, precondition)
            if learners > 1
            else None
        )
        self.state = [
            new_state(self.compressor, self.specs, self._preconditioner) for _ in range(learners)
        ]
        self._job_state = [new_job_state(self.compressor, self.specs) for _ in range(learners)]
        self._planner = (
            LayerPlanner.of(self.compressor, self.specs, learners) if learners > 1 else None
        )
        self._lgc = lgc_in(self.compressor) if learners > 1 else None
        self.plans: list[PlanInForce] = []
        self._step = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._moments_since = tf.Variable(np.zeros(len(self.specs), "int64"), trainable=False)
        self._gradients = tf.function(self._gradients_of_one, reduce_retracing=True)
        # Whether a large table is summed whole depends on the step's gradients: not in a graph.
        graph = graph and not any(map(self._is_large, range(len(self.specs))))
        self._reduce_unseen = (
            tf.function(self._reduce, reduce_retracing=True) if graph else self._reduce
        )
        self._residual_norm = tf.function(self._mean_residual_norm)
        self._apply = tf.function(self._apply_reduced, reduce_retracing=True)
        keras_private.build(model.optimizer, model.trainable_variables)

    def train_on_batch(self, x: Any, y: Any, *, similarity: bool = False) -> StepReport:
        """One step of all learners.

        Adam's second moments are with the learners then, until `fit` hands them back.

        Args:
            x: The inputs of the batch of all learners together: an array, or a nest of arrays.
            y: Its labels, likewise.
            similarity: Whether to measure how alike the learners are.

        Raises:
            ValueError: If the batch cannot be shared out equally.
        """
        size = len(self.state)
        losses, all_gradients = [], []
        variables = self.model.trainable_variables
        for share in _shares(x, y, size):
            loss, gradients = self._gradients(*share)
            losses.append(loss)
            if self._preconditioner:
                gradients = keras_private.clip(self.model.optimizer, gradients, variables)
            all_gradients.append(gradients)
        self._take_second_moments(all_gradients[0])
        reduce = self._reduce if similarity else self._reduce_unseen
        reduced, finite, delayed, sent = reduce(all_gradients, similarity)
        self._step.assign_add(1)
        if finite:
            self._apply(reduced, delayed)
        else:
            self._skipped_steps += 1
        return StepReport(
            loss=float(np.sum(losses)),
            finite=bool(finite),
            payload_bytes=float(np.mean([of_one.payload_bytes for of_one in sent])),
            sent_bytes=float(np.mean([of_one.sent_bytes for of_one in sent])),
            dense_bytes=sum(
                4 * spec.elements
                for spec, gradient in zip(self.specs, reduced, strict=True)
                if gradient is not None
            ),
            residual_norm=float(self._residual_norm()),
            similarity=self._last_similarity if similarity else None,
        )

    def plan_settings(self) -> PlanInForce | None:
        """Has `LGreCo` plan the settings of all variables anew, with the gradients since the last.

        Returns:
            What counts from the next step on; None if another method is in use, or there is one
            learner, which exchanges nothing.
        """
        if self._planner is None:
            return None
        sums = [total.numpy() for total in self.state[0][GRADIENT_SUM]]
        proposed = self._planner.propose(sums, self._job_state[0])
        for job_state, state in zip(self._job_state, self.state, strict=True):
            self._planner.install(proposed, job_state, state[GRADIENT_SUM])
        return self.plan_in_force()

    def plan_in_force(self) -> PlanInForce | None:
        """The settings of the next step, if they are planned."""
        return self._planner.in_force(self._job_state[0]) if self._planner else None

    @property
    def autoencoder(self) -> AutoencoderState | None:
        """That of `LGC`; None with other methods, or if there is one learner."""
        if self._lgc is None:
            return None
        return AutoencoderState(self._lgc, self._job_state[0], self.specs, True)

    @property
    def exchanges(self) -> int:
        """How many steps there were so far."""
        return int(self._step)

    def settings_over_time(self) -> dict[str, list[int]]:
        """By path, each planned layer's own setting, and that of each plan that `fit` has made."""
        if self._planner is None:
            return {}
        own = self._planner.lgreco.settings(self.specs)
        over_time = [own, *(plan.settings for plan in self.plans)]
        return {
            self.specs[place].path: [settings[place] for settings in over_time]
            for place in self._planner.layers
        }

    def _reduce(
        self, all_gradients: list[list[Gradient]], similarity: bool
    ) -> tuple[list[Gradient], tf.Tensor, list[tf.Tensor], list[Sent]]:
        """What `GradientExchange.reduce` gives, and what each learner sent."""
        if len(all_gradients) == 1:
            return self._of_only_one(all_gradients[0])
        apart = [i for i, g in enumerate(all_gradients[0]) if self._stays_sparse(i, g)]
        present = [i for i, g in enumerate(all_gradients[0]) if g is not None]
        together = [i for i in present if i not in apart]
        reduced: list[Any] = list(all_gradients[0])
        finite, sent = tf.constant(True), [Sent.nothing() for _ in all_gradients]
        delayed = [tf.constant(False)] * len(reduced)
        large = [i for i in apart if self._is_large(i)]
        for places in [[i] for i in large] + [[i for i in apart if i not in large]]:
            slices = [[of_one[i] for i in places] for of_one in all_gradients]
            if places:
                sums, more = self._sum_slices(places, slices)
                sent = [of_one.plus(other) for of_one, other in zip(sent, more, strict=True)]
                for place, total in zip(places, sums, strict=True):
                    reduced[place] = total
        if apart:
            finite = all_finite([reduced[place] for place in apart])
        if not together:
            return reduced, finite, delayed, sent
        steps = [
            self._step_of(rank, together, of_one, finite)
            for rank, of_one in enumerate(all_gradients)
        ]
        if similarity:
            steps = [dataclasses.replace(s, inputs=s.inputs.preconditioned()) for s in steps]
        wanted = self._wanted(together, steps) if similarity else []
        stepped, more = by_stage(
            self.compressor, steps[0].inputs, lambda method: _talked(steps, method)
        )
        if similarity:
            self._last_similarity = self._similarity(together, stepped.reduced, wanted)
        totals, finite = stepped.as_given([all_gradients[0][place] for place in together])
        self._note_beginnings(together, stepped.reduced, finite)
        waited = tf.unstack(stepped.delayed, len(together))
        for place, total, has_waited in zip(together, totals, waited, strict=True):
            reduced[place], delayed[place] = total, has_waited
        sent = [of_one.plus(other) for of_one, other in zip(sent, more, strict=True)]
        return reduced, finite, delayed, sent

    def _of_only_one(
        self, gradients: list[Gradient]
    ) -> tuple[list[Gradient], tf.Tensor, list[tf.Tensor], list[Sent]]:
        self._last_similarity = Similarity(*[float("nan")] * 3)
        never = [tf.constant(False) for _ in gradients]
        return list(gradients), tf.constant(True), never, [Sent.nothing()]

    def _sum_slices(
        self, places: list[int], slices: list[list[tf.IndexedSlices]]
    ) -> tuple[list[tf.IndexedSlices], list[Sent]]:
        """Sums slices, not by the method; of several tables, or of a large one, as is cheaper."""
        size, step = len(slices), self._step.read_value()
        specs = [self.specs[i] for i in places]
        fingerprint = self.compressor.fingerprint(specs)
        sent, whole = [Sent.nothing() for _ in slices], False
        if self._is_large(places[0]):
            tag = riders.tag(fingerprint, step, tf.float32, size)
            rows = specs[0].shape[0]
            votes = in_lockstep([sparse.prefer_dense(one[0], rows, size, tag) for one in slices])
            sent, whole = [vote.sent for vote in votes], bool(votes[0].result)
        word, dtype = riders.tag_word(fingerprint, step), self.compressor.slices_dtype
        ends = in_lockstep(
            [
                sparse.sum_whole(one[0], dtype)
                if whole
                else sparse.sum_slices(one, size, word, dtype)
                for one in slices
            ]
        )
        sent = [voted.plus(end.sent) for voted, end in zip(sent, ends, strict=True)]
        return ends[0].result[0], sent

    def _is_large(self, place: int) -> bool:
        return sparse.is_large(self.specs[place], self._policy.max_dense_elements)

    def _stays_sparse(self, place: int, gradient: Gradient) -> bool:
        most = self._policy.max_dense_elements
        return sparse.stays_sparse(gradient, self.specs[place], self.compressor, most)

    def _take_second_moments(self, gradients: list[Gradient]) -> None:
        """Has learners keep the second moments of all gradients that they divide."""
        if not self._preconditioner:
            return
        divided = {
            i
            for i, gradient in enumerate(gradients)
            if gradient is not None and not self._stays_sparse(i, gradient)
        }
        if divided - self._taken:
            moments = self._second_moments(self._preconditioner)
            for place in divided - self._taken:
                moments.take(place)
        self._taken |= divided

    def _give_second_moments_back(self) -> None:
        if self._preconditioner and self._taken:
            moments = self._second_moments(self._preconditioner)
            for place in self._taken:
                moments.give_back(place)
        self._taken.clear()

    def _second_moments(self, preconditioner: Preconditioner) -> SecondMoments:
        optimizer, variables = self.model.optimizer, self.model.trainable_variables
        inner = adam.inner_state(optimizer, variables, lambda variable: variable)
        return SecondMoments(preconditioner, inner, self.state, self._moments_since)

    def _note_beginnings(
        self, places: list[int], reduced: list[tf.Tensor], finite: tf.Tensor
    ) -> None:
        """Notes after a step of which gradients the second moments have not begun yet."""
        if not self._preconditioner:
            return
        since = tf.gather(self._moments_since, places)
        later = since_after(self._updates, since, reduced, finite)
        self._moments_since.scatter_update(tf.IndexedSlices(later, tf.constant(places)))

    @property
    def _updates(self) -> tf.Tensor:
        return tf.cast(self.model.optimizer.iterations, tf.int64)

    def _step_of(
        self, rank: int, places: list[int], gradients: list[Gradient], finite: tf.Tensor
    ) -> ReplicaStep:
        """One learner's side of a step, for some of the gradients."""
        size = len(self.state)
        of_one = {
            name: [of_all[i] for i in places] for name, of_all in handles(self.state[rank]).items()
        }
        moments = None
        if self._preconditioner:
            since = tf.gather(self._moments_since, places)
            moments = self._preconditioner.second_moments(
                of_one, updates_after(self._updates, since), size, [gradients[i] for i in places]
            )
        return ReplicaStep.of(
            [self.specs[i] for i in places],
            [gradients[i] for i in places],
            of_one,
            self._step.read_value(),
            finite,
            rank,
            size,
            moments,
            self._job_state[rank],
            residual_scale=self._residual_scale,
            numbers=places,
        )

    def _wanted(self, places: list[int], steps: list[ReplicaStep]) -> list[tf.Tensor]:
        """What all learners together could send of some gradients: gradients plus residuals."""
        wanted = [
            tf.add_n([tf.cast(gradient, tf.float32) for gradient in of_variable])
            for of_variable in zip(*(step.inputs.gradients for step in steps), strict=True)
        ]
        for residuals in self.residuals:
            if residuals:
                own = [residuals[i] for i in places]
                wanted = [total + part for total, part in zip(wanted, own, strict=True)]
        return wanted

    def _similarity(
        self, places: list[int], reduced: list[tf.Tensor], wanted: list[tf.Tensor]
    ) -> Similarity:
        residuals = [[of_one[i] for i in places] if of_one else [] for of_one in self.residuals]
        return Similarity(
            union_density(reduced),
            mean_cosine_distance(residuals),
            hamming_distance(reduced, wanted),
        )

    @property
    def residuals(self) -> list[list[tf.Variable]]:
        """The residuals of each learner, in the order of the model's trainable variables."""
        return [state.get(RESIDUAL, []) for state in self.state]

    def fit(
        self,
        batches: Iterable[tuple[Any, Any]],
        epochs: int = 1,
        validation_data: Any = None,
        on_step: Callable[[StepReport], None] = lambda report: None,
        training: AutoencoderTraining | None = None,
    ) -> dict[str, list[float]]:
        """Trains, and returns for each epoch what Keras and `CompressionMonitor` would log.

        With it come the measures of `Similarity`, of the last step of each epoch. For `LGreCo`, a
        plan is made after each epoch, and the logs have what `LayerwisePlan` adds to them. For
        `LGC`, the autoencoder is trained after each step. One learner sends nothing: ratios are
        NaN.

        In the end, the model's optimizer has all that Keras' own `fit` goes on from, and weights
        are their averages if it keeps these (`use_ema`).

        Args:
            batches: Pairs of inputs and labels, of all learners together; gone through once for
                each epoch, such as a batched `tf.data.Dataset`.
            epochs: The number of epochs.
            validation_data: As for `model.evaluate`: a dataset, or a pair of arrays.
            on_step: Called after each step.
            training: Trains the autoencoder of `LGC`; by default one with default settings.
        """
        try:
            history = self._epochs(batches, epochs, validation_data, on_step, training)
        finally:
            self._give_second_moments_back()
        optimizer = self.model.optimizer
        if epochs and isinstance(optimizer, keras.optimizers.Optimizer):  # legacy ones have no end
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
                    "Learners.fit: there are no batches; one that can be gone through "
                    "only once is empty in the second epoch."
                )
            logs = self._summary(reports, rows)
            plan = self.plan_settings()
            if plan:
                self.plans.append(plan)
                logs |= measures(plan)
            logs |= training.measures(self)
            if validation_data is not None:
                pair = isinstance(validation_data, tuple)
                data = validation_data if pair else (validation_data,)
                seen = self.model.evaluate(*data, verbose=0, return_dict=True)
                logs |= {f"val_{name}": float(value) for name, value in seen.items()}
            for name, value in logs.items():
                history.setdefault(name, []).append(value)
        return history

    def _epoch(
        self,
        batches: Iterable[tuple[Any, Any]],
        on_step: Callable[[StepReport], None],
        training: AutoencoderTraining,
    ) -> tuple[list[StepReport], list[int]]:
        """What the steps of an epoch did, and of how many rows their batches were."""
        reports, rows = [], []
        rest = iter(batches)
        batch = next(rest, None)
        while batch is not None:
            following = next(rest, None)
            reports.append(self.train_on_batch(*batch, similarity=following is None))
            rows.append(_rows(batch))
            training.train(self)
            on_step(reports[-1])
            batch = following
        return reports, rows

    def _summary(self, reports: list[StepReport], rows: list[int]) -> dict[str, float]:
        payload = float(np.mean([report.payload_bytes for report in reports]))
        sent = float(np.mean([report.sent_bytes for report in reports]))
        whole = float(reports[0].dense_bytes)
        return {
            "loss": float(np.average([report.loss for report in reports], weights=rows)),
            **measures_per_step(len(self.state), payload, sent, whole),
            "skipped_steps": float(self._skipped_steps),
            "residual_norm": reports[-1].residual_norm,
            **(dataclasses.asdict(reports[-1].similarity) if reports[-1].similarity else {}),
        }

    def _gradients_of_one(self, x: Any, y: Any) -> tuple[tf.Tensor, list[Gradient]]:
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            predicted = self.model(x, training=True)
            loss = self.model.compute_loss(x=x, y=y, y_pred=predicted)
            loss /= len(self.state)  # as Keras under a strategy: sums make the mean
        return loss, tape.gradient(loss, [native(v) for v in variables])

    def _mean_residual_norm(self) -> tf.Tensor:
        norms = [tf.linalg.global_norm(of_one) if of_one else 0.0 for of_one in self.residuals]
        return tf.reduce_mean(norms)

    def _apply_reduced(self, reduced: list[Gradient], delayed: list[tf.Tensor]) -> None:
        variables = self.model.trainable_variables
        optimizer = self.model.optimizer
        pairs = list(zip(reduced, variables, strict=True))
        if not self._preconditioner:
            optimizer.apply_gradients(pairs)
            return
        divided = [i for i, g in enumerate(reduced) if not self._stays_sparse(i, g)]
        of_divided = [variables[i] for i in divided], [delayed[i] for i in divided]
        with adam.momentum_only(optimizer, *of_divided):
            optimizer.apply_gradients(pairs)


def _talked(steps: list[ReplicaStep], method: compressors.Compressor) -> tuple[Stepped, list[Sent]]:
    """What a step gives each learner, and what each has sent."""
    ends = in_lockstep([step.talk(method) for step in steps])
    return ends[0].result, [end.sent for end in ends]


def _check_model(model: keras.Model) -> None:
    if tf.distribute.has_strategy():
        raise ValueError("Learners: leave the strategy's scope; all learners are in this process.")
    if not model.built or getattr(model, "optimizer", None) is None:
        raise ValueError(
            "Learners: the model must be built, and compiled with a loss and an optimizer, before "
            "it is given; call model.build and model.compile."
        )
    if find_exchange(model) is not None:
        raise ValueError(
            "Learners: the model's optimizer is compressed already; compile it with the inner "
            "optimizer, and give the compressor to Learners."
        )
    optimizer = model.optimizer
    scales = isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer)
    of_keras_3 = ("loss_scale_factor", "gradient_accumulation_steps")
    if scales or any(getattr(optimizer, setting, None) for setting in of_keras_3):
        raise ValueError(
            "Learners: the model's optimizer scales losses or accumulates gradients, and learners "
            "do neither; use a plain one, and where Keras scales losses by itself another policy "
            "than mixed_float16, or with Keras 3 model.compile(..., auto_scale_loss=False)."
        )


def _rows(batch: Any) -> int:
    return len(tf.nest.flatten(batch)[0])


def _shares(x: Any, y: Any, learners: int) -> list[tuple[Any, Any]]:
    size = _rows(x)
    if size % learners or not size:
        raise ValueError(
            f"Learners: a batch of {size} cannot be shared out equally among {learners} learners; "
            "use a batch size that is a multiple, and drop_remainder=True."
        )
    each = size // learners
    return [
        tf.nest.map_structure(
            lambda a, i=i: tf.convert_to_tensor(a[i * each : (i + 1) * each]), (x, y)
        )
        for i in range(learners)
    ]


def checked_method(
    compressor: compressors.Compressor | compressors.Auto,
) -> compressors.Compressor:
    """A compressor that can be simulated.

    Raises:
        ValueError: If it chooses its method by the network.
    """
    if isinstance(compressor, compressors.Auto):
        raise ValueError(
            f"Learners: {compressor.name!r} chooses by the network, and a simulation has none; "
            "name a method, such as 'adacomp'."
        )
    return compressor
