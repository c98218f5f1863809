"""What simulated learners exchange in a step, and what they keep between steps."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.adam.handover import not_begun, since_after, updates_after
from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.compressors.between_steps import Hook, Hooks, Proposing
from tf_gradcomp.exchange import metadata, sparse
from tf_gradcomp.exchange.gradients import all_finite, check_dtypes, gradient_specs
from tf_gradcomp.exchange.replica_step import ReplicaStep, Stepped, by_stage
from tf_gradcomp.exchange.state import handles, new_job_state, new_state, residual_scale
from tf_gradcomp.groups.communicator import Sent
from tf_gradcomp.groups.lockstep import in_lockstep
from tf_gradcomp.keras.common.version import keras, keras_module
from tf_gradcomp.policy import Policy
from tf_gradcomp.simulation.second_moments import SecondMoments
from tf_gradcomp.simulation.similarity import (
    Similarity,
    hamming_distance,
    mean_cosine_distance,
    union_density,
)

adam = keras_module("adam")

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None  # None: the loss does not depend on it


class Reduced(NamedTuple):
    """What an exchange gives all learners.

    Attributes:
        gradients: The sums over the learners, in the forms in which they came.
        finite: bool scalar; where it is false, the step is to be skipped.
        delayed: Of each gradient, whether most of its entries had waited: bool scalars.
        sent: What each learner sent.
    """

    gradients: list[Gradient]
    finite: tf.Tensor
    delayed: list[tf.Tensor]
    sent: list[Sent]


class LearnersExchange:
    """The exchange of learners in one process: what `GradientExchange` is to a job.

    Args:
        model: Compiled with a plain optimizer, whose second moments it takes over.
        size: The number of learners.
        compressor: The method.
        policy: Which variables get which settings.
        precondition: As for `gc.CompressedOptimizer`.
        graph: Whether a step is traced.

    Attributes:
        compressor: The method.
        specs: What is known of each gradient.
        state: The variables that each learner keeps, by name, in the order of `specs`.
        job_state: What each keeps for all gradients together, by name.
        similarity: How alike the learners were in the last step for which that was asked.
    """

    def __init__(
        self,
        model: keras.Model,
        size: int,
        compressor: compressors.Compressor,
        policy: Policy,
        precondition: str | None,
        graph: bool,
    ) -> None:
        self.compressor = compressor
        self.specs = gradient_specs(model.trainable_variables, policy)
        check_dtypes(self.specs)
        self.similarity: Similarity | None = None
        self._model = model
        self._policy = policy
        self._residual_scale = residual_scale(compressor, self.specs) or 1.0
        self._taken: set[int] = set()  # places of gradients whose second moments learners have
        several = size > 1
        self._preconditioner = (
            adam.preconditioner_for(model.optimizer, compressor, precondition) if several else None
        )
        self.state = [new_state(compressor, self.specs, self._preconditioner) for _ in range(size)]
        self.job_state = [new_job_state(compressor, self.specs) for _ in range(size)]
        self._hooks = Hooks(compressor, self.specs, size)
        self._step = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._moments_since = tf.Variable(np.zeros(len(self.specs), "int64"), trainable=False)
        # Whether a large table is summed whole depends on the step's gradients: not in a graph.
        graph = graph and not any(map(self._is_large, range(len(self.specs))))
        self._reduce_unseen = (
            tf.function(self._reduce, reduce_retracing=True) if graph else self._reduce
        )
        self._residual_norm = tf.function(self._mean_residual_norm)

    def reduce(self, all_gradients: list[list[Gradient]], *, similarity: bool = False) -> Reduced:
        """One step of all learners; Adam's second moments are with them from then on.

        Args:
            all_gradients: Of each learner, one for each of the model's variables.
            similarity: Whether to measure how alike the learners are.
        """
        self._take_second_moments(all_gradients[0])
        reduce = self._reduce if similarity else self._reduce_unseen
        reduced = Reduced(*reduce(all_gradients, similarity))
        self._step.assign_add(1)
        return reduced

    @property
    def preconditions(self) -> bool:
        """Whether gradients are divided by second moments before they are exchanged."""
        return self._preconditioner is not None

    def divides(self, place: int, gradient: Gradient) -> bool:
        """Whether a gradient of that form is divided."""
        return self.preconditions and not self._stays_sparse(place, gradient)

    def give_second_moments_back(self) -> None:
        """Gives the optimizer what it goes on from without learners."""
        if self._preconditioner and self._taken:
            moments = self._second_moments(self._preconditioner)
            for place in self._taken:
                moments.give_back(place)
        self._taken.clear()

    def plan_settings(self) -> Any:
        """Has the method plan its settings anew, as `GradientExchange.plan_settings` does."""
        hook = self.hook(Proposing)
        if hook is None:
            return None
        of_first = [variable.numpy() for variable in self.state[0][hook.state_name]]
        proposed = hook.propose(of_first, self.job_state[0])
        for job_state, state in zip(self.job_state, self.state, strict=True):
            hook.install(proposed, job_state, state[hook.state_name])
        return self.plan_in_force()

    def plan_in_force(self) -> Any:
        """Returns the plan that counts in the next step; None if nothing is planned."""
        hook = self.hook(Proposing)
        return hook.in_force(self.job_state[0]) if hook else None

    def hook(self, kind: type[Hook]) -> Hook | None:
        """Returns the method's hook of a kind; None if it has none, or there is one learner."""
        return self._hooks.get(kind)

    def local_job_state(self, replica: int) -> dict[str, tf.Variable]:
        """Returns what one of the learners keeps for the job."""
        return self.job_state[replica]

    @property
    def is_first(self) -> bool:
        """Returns True: the process has all learners."""
        return True

    @property
    def exchanges(self) -> int:
        """How many steps there were so far."""
        return int(self._step)

    @property
    def residuals(self) -> list[list[tf.Variable]]:
        """The residuals of each learner, in the order of the model's trainable variables."""
        return [state.get(RESIDUAL, []) for state in self.state]

    def residual_norm(self) -> float:
        """The Euclidean norm of a learner's residuals, the mean over all; 0 without any."""
        return float(self._residual_norm())

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
            self.similarity = Similarity(math.nan, math.nan, math.nan)
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
            self.similarity = self._similarity(together, stepped.reduced, wanted)
        totals, finite = stepped.as_given([all_gradients[0][place] for place in together])
        self._note_beginnings(together, stepped.begins, finite)
        waited = tf.unstack(stepped.delayed, len(together))
        for place, total, has_waited in zip(together, totals, waited, strict=True):
            reduced[place], delayed[place] = total, has_waited
        sent = [of_one.plus(other) for of_one, other in zip(sent, more, strict=True)]
        return reduced, finite, delayed, sent

    def _of_only_one(
        self, gradients: list[Gradient]
    ) -> tuple[list[Gradient], tf.Tensor, list[tf.Tensor], list[Sent]]:
        self.similarity = Similarity(math.nan, math.nan, math.nan)
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
            tag = metadata.tag(fingerprint, step, tf.float32, size)
            rows = specs[0].shape[0]
            votes = in_lockstep([sparse.prefer_dense(one[0], rows, size, tag) for one in slices])
            sent, whole = [vote.sent for vote in votes], bool(votes[0].result)
        word, dtype = metadata.tag_word(fingerprint, step), self.compressor.slices_dtype
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
        divided = {i for i, g in enumerate(gradients) if g is not None and self.divides(i, g)}
        if divided - self._taken:
            moments = self._second_moments(self._preconditioner)
            for place in divided - self._taken:
                moments.take(place)
        self._taken |= divided

    def _second_moments(self, preconditioner: Preconditioner) -> SecondMoments:
        optimizer, variables = self._model.optimizer, self._model.trainable_variables
        inner = adam.inner_state(optimizer, variables, lambda variable: variable)
        return SecondMoments(preconditioner, inner, self.state, self._moments_since)

    def _note_beginnings(self, places: list[int], begins: tf.Tensor, finite: tf.Tensor) -> None:
        """Notes after a step of which gradients the second moments have not begun yet."""
        if not self._preconditioner:
            return
        since = tf.gather(self._moments_since, places)
        later = since_after(self._updates, since, begins, finite)
        self._moments_since.scatter_update(tf.IndexedSlices(later, tf.constant(places)))

    @property
    def _updates(self) -> tf.Tensor:
        return tf.cast(self._model.optimizer.iterations, tf.int64)

    def _step_of(
        self, rank: int, places: list[int], gradients: list[Gradient], finite: tf.Tensor
    ) -> ReplicaStep:
        """One learner's side of a step, for some of the gradients."""
        size = len(self.state)
        of_one = {
            name: [of_all[i] for i in places] for name, of_all in handles(self.state[rank]).items()
        }
        moments, not_yet = None, None
        if self._preconditioner:
            since = tf.gather(self._moments_since, places)
            not_yet = not_begun(self._updates, since)
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
            self.job_state[rank],
            residual_scale=self._residual_scale,
            numbers=places,
            not_begun=not_yet,
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

    def _mean_residual_norm(self) -> tf.Tensor:
        norms = [tf.linalg.global_norm(of_one) if of_one else 0.0 for of_one in self.residuals]
        return tf.reduce_mean(norms)


def _talked(steps: list[ReplicaStep], method: compressors.Compressor) -> tuple[Stepped, list[Sent]]:
    """What a step gives each learner, and what each has sent."""
    ends = in_lockstep([step.talk(method) for step in steps])
    return ends[0].result, [end.sent for end in ends]
