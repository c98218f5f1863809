"""Exchange of simulated learners in a step, and their state between steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.compressors.between_steps import Hook, Hooks, Proposing
from tf_gradcomp.exchange import sparse
from tf_gradcomp.exchange.gradients import check_dtypes, gradient_specs
from tf_gradcomp.exchange.method import Candidate, Method
from tf_gradcomp.exchange.replica_step import ReplicaStep
from tf_gradcomp.exchange.setup import Setup
from tf_gradcomp.exchange.step import Observe, StepResult, take_step
from tf_gradcomp.groups.communicator import Sent
from tf_gradcomp.groups.lockstep import LockstepGroup
from tf_gradcomp.keras.common.version import keras, keras_module
from tf_gradcomp.policy import Policy
from tf_gradcomp.simulation.second_moments import SharedMoments
from tf_gradcomp.simulation.similarity import (
    Similarity,
    hamming_distance,
    mean_cosine_distance,
    union_density,
)

adam = keras_module("adam")

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None  # None: the loss does not depend on it


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
        self._taken: set[int] = set()  # places of gradients whose second moments learners have
        several = size > 1
        preconditioner = (
            adam.preconditioner_for(model.optimizer, compressor, precondition) if several else None
        )
        candidate = Candidate(compressor, preconditioner)
        method = Method(repr(compressor), [candidate], lambda *_: candidate, preconditioner)
        self._group = LockstepGroup(size)
        self._setup = Setup.new(self._group, method, candidate, self.specs, policy)
        variables, local = self._setup.variables, self._group.local
        self.state = [
            {name: [local(one, i) for one in of_all] for name, of_all in variables.state.items()}
            for i in range(size)
        ]
        self.job_state = [
            {name: local(one, i) for name, one in variables.job_state.items()} for i in range(size)
        ]
        self._hooks = Hooks(compressor, self.specs, size)
        # Whether a large table is summed whole depends on the step's gradients: not in a graph.
        graph = graph and not any(map(self._setup.is_large, range(len(self.specs))))
        self._reduce_unseen = (
            tf.function(self._reduce, reduce_retracing=True) if graph else self._reduce
        )
        self._residual_norm = tf.function(self._mean_residual_norm)

    def reduce(
        self, all_gradients: list[list[Gradient]], *, similarity: bool = False
    ) -> StepResult:
        """Takes all learners through one step; they keep Adam's second moments from then on.

        Args:
            all_gradients: Of each learner, one for each of the model's variables.
            similarity: Whether to measure how alike the learners are.
        """
        self._take_second_moments(all_gradients[0])
        if similarity:
            return self._reduce_and_compare(all_gradients)
        return StepResult(*self._reduce_unseen(all_gradients))

    def delayed(self) -> list[tf.Tensor]:
        """Returns a bool scalar for each gradient: whether most of its entries were delayed."""
        delayed = self._group.local(self._setup.variables.delayed, 0).read_value()
        return tf.unstack(delayed, len(self.specs))

    @property
    def preconditions(self) -> bool:
        """Returns whether gradients are divided by second moments before they are exchanged."""
        return self._setup.preconditioner is not None

    def divides(self, place: int, gradient: Gradient) -> bool:
        """Returns whether a gradient, dense or slices, is divided."""
        return self.preconditions and not self._setup.stays_sparse(place, gradient)

    def give_second_moments_back(self) -> None:
        """Gives the optimizer the second moments with which it trains on without learners."""
        for place in self._taken:
            self._second_moments.give_back(place)
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
        """Returns the number of steps so far."""
        return int(self._setup.variables.step)

    @property
    def residuals(self) -> list[list[tf.Variable]]:
        """The residuals of each learner, in the order of the model's trainable variables."""
        return [state.get(RESIDUAL, []) for state in self.state]

    def residual_norm(self) -> float:
        """The Euclidean norm of a learner's residuals, the mean over all; 0 without any."""
        return float(self._residual_norm())

    def _reduce(
        self, all_gradients: list[list[Gradient]], observe: Observe | None = None
    ) -> StepResult:
        """Exchanges the gradients that there are as a job does, with all learners in lockstep."""
        sums: list[Any] = list(all_gradients[0])
        numbers = [i for i, gradient in enumerate(sums) if gradient is not None]
        if len(all_gradients) == 1:
            self._setup.variables.step.assign_add(1)
            return StepResult(sums, tf.constant(True), [Sent.nothing()])
        given = [[of_one[i] for i in numbers] for of_one in all_gradients]
        members = self._group.members()
        result = take_step(self._setup, members, numbers, given, self._updates, observe)
        for number, total in zip(numbers, result.gradients, strict=True):
            sums[number] = total
        return StepResult(sums, result.finite, result.sent)

    def _reduce_and_compare(self, all_gradients: list[list[Gradient]]) -> StepResult:
        """Does what `_reduce` does, and measures how alike the learners are."""
        numbers = [i for i, gradient in enumerate(all_gradients[0]) if gradient is not None]
        compared: list[int] = []
        wanted: list[tf.Tensor] = []

        def observe(places: Sequence[int], steps: list[ReplicaStep]) -> list[ReplicaStep]:
            steps = [dataclasses.replace(s, inputs=s.inputs.preconditioned()) for s in steps]
            compared.extend(numbers[place] for place in places)
            wanted.extend(self._wanted(compared, steps))
            return steps

        result = self._reduce(all_gradients, observe)
        if compared:
            reduced = [sparse.dense(result.gradients[number]) for number in compared]
            self.similarity = self._similarity(compared, reduced, wanted)
        else:
            self.similarity = Similarity(math.nan, math.nan, math.nan)
        return result

    def _take_second_moments(self, gradients: list[Gradient]) -> None:
        """Has learners keep the second moments of all gradients that they divide."""
        if not self.preconditions:
            return
        divided = {i for i, g in enumerate(gradients) if g is not None and self.divides(i, g)}
        for place in divided - self._taken:
            self._second_moments.take(place)
        self._taken |= divided

    @property
    def _second_moments(self) -> SharedMoments:
        optimizer, variables = self._model.optimizer, self._model.trainable_variables
        inner = adam.inner_state(optimizer, variables, lambda variable: variable)
        all_since = self._setup.variables.facts.moments_since
        since = [self._group.local(all_since, i) for i in range(self._group.size)]
        preconditioner = self._setup.preconditioner
        if preconditioner is None:
            raise RuntimeError("Learners keep no second moments without a preconditioner.")
        return SharedMoments(preconditioner, inner, self.state, since)

    @property
    def _updates(self) -> tf.Tensor:
        return tf.cast(self._model.optimizer.iterations, tf.int64)

    def _wanted(self, places: list[int], steps: list[ReplicaStep]) -> list[tf.Tensor]:
        """Returns what all learners together could send: gradients plus residuals."""
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
