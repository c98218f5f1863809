"""The exchange: sums the gradients of a step over the replicas, and keeps state between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.adam.handover import InnerOptimizer, InnerState
from tf_gradcomp.adam.preconditioner import LARGEST, SECOND_MOMENT
from tf_gradcomp.compressors.base import RESIDUAL, Compressor
from tf_gradcomp.compressors.stages import has_stages
from tf_gradcomp.exchange.gradients import (
    Gradients,
    VariableIndices,
    all_finite,
    check_shapes,
    gradient_specs,
    norm,
    with_gradients_to_exchange,
)
from tf_gradcomp.exchange.hooks import JobHooks
from tf_gradcomp.exchange.replica import Replica
from tf_gradcomp.exchange.restored import (
    convert_restored,
    take_residuals,
    warn_of_lost_residuals,
)
from tf_gradcomp.exchange.saving import Saving
from tf_gradcomp.exchange.setup import Method, Setup, facts_to_agree, log_notices
from tf_gradcomp.exchange.state import Traffic
from tf_gradcomp.exchange.step import Observe, StepResult, count_skip, take_step
from tf_gradcomp.groups.agreement import GradientAgreement
from tf_gradcomp.groups.communicator import Communicator
from tf_gradcomp.groups.current import current_group
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.messages import log_info
from tf_gradcomp.ops import library
from tf_gradcomp.policy import GradientSpec, LayerPolicy, checked_policy
from tf_gradcomp.private import tensorflow as tf_private


class GradientExchange(tf.Module):
    """The exchange of the gradients of given variables by a compressor, with its residuals.

    Both ways to compress use an exchange: `CompressedOptimizer` has its own, and
    `CompressedAllReduce` has the strategy's exchanges. Each replica has its own residual. A
    checkpoint holds the sum of the residuals, and each of N replicas gets back 1/N of the sum.

    Attributes:
        built: Whether the state exists.
        setup: The parts of the built exchange.
        specs: The spec of each gradient.
        state: The variables that all candidates keep, by name, in the order of `specs`.
        job_state: The state that candidates keep for the whole job, by name.
        indices: The indices of the variables among those that the exchange was built for.
        facts: Facts about the state of each gradient.
        saving: Reads the state for a checkpoint, and gives replicas the state of a checkpoint.
        hooks: What happens between two steps, such as L-GreCo's plans, or the end of a round.
        warned_of_lost_residuals: Whether the load of a file warned of residuals that the method
            does not keep.
        take_step: The function that takes replicas through a step; `gradcomp advise` times it.

    Args:
        method: The compressor, or a choice between several.
        policy: Which variables get which settings.
        find_group: Returns the replicas when the exchange is built; by default the replicas
            of the strategy in scope.
    """

    built = False
    setup: Setup

    def __init__(
        self,
        method: Method,
        policy: LayerPolicy | None = None,
        find_group: Callable[[], Group] = current_group,
    ) -> None:
        super().__init__(name="gradient_exchange")
        library.load()  # reports errors now, not in the first step
        self.policy = checked_policy(policy)
        self.specs: list[GradientSpec] = []
        self.state: dict[str, list[tf.Variable]]
        self.job_state: dict[str, tf.Variable]
        # Not tracked: a checkpoint that is restored now must wait for the variables that `build`
        # makes.
        object.__setattr__(self, "state", {})
        object.__setattr__(self, "job_state", {})
        self._method = method
        self._find_group = find_group
        self.hooks = JobHooks()
        self.warned_of_lost_residuals = False
        self.take_step = take_step

    def build(self, variables: Sequence[Any], facts: Mapping[str, Any] | None = None) -> None:
        """Creates the state for the gradients of `variables`; a second call does nothing.

        Tells the users of a job what differs from what the program's text suggests.

        Raises:
            ValueError: If the strategy, or a choice among these candidates, is not supported.
            WorkersDisagreeError: If the workers have other variables or settings.
        """
        if self.built:
            return
        group = self._find_group()
        compressors = [candidate.compressor for candidate in self._method.candidates]
        check_warmup(compressors, group)
        specs = gradient_specs(variables, self.policy)
        with tf.init_scope():
            group.processes.agree(
                {**facts_to_agree(group, self._method, specs, self.policy), **(facts or {})}
            )
            chosen = self._method.candidates[0]
            exchanged = with_gradients_to_exchange(specs)
            if group.size > 1 and exchanged and self._method.choose:
                chosen = self._method.choose(group, self._method.candidates, exchanged)
            setup = Setup.new(group, self._method, chosen, specs, self.policy)
            new = setup.variables
            self.facts, self.step = new.facts, new.step
            self.saving = Saving(group, self.hooks)
            self.saving.register([], [self.step])
            for name, variables_of_state in new.state.items():
                replicated = name in (SECOND_MOMENT, LARGEST)
                self.saving.register(
                    variables_of_state, [], self.facts.all_zero, replicated=replicated
                )
            self.saving.register(new.job_state.values(), [])
            # From now on, a checkpoint may restore these variables.
            self.state, self.job_state = new.state, new.job_state
            self.skipped_steps = new.skipped_steps
        self.hooks.start(setup)
        self.indices = VariableIndices(variables, specs, exchanged=group.size > 1)
        # The indices of variables whose gradients came as slices, and of the other variables.
        self._sparse: set[int] = set()
        self._dense: set[int] = set()
        self._agreement = GradientAgreement(group.processes.agree)
        self.specs = specs
        self.setup, self.built = setup, True
        log_notices(setup, self.hooks.notices())

    @property
    def compressor(self) -> Compressor:
        """Returns the method in use, which `Auto` chooses when the exchange is built."""
        return self.setup.compressor

    @property
    def group(self) -> Group:
        """Returns the replicas that the exchange was built for."""
        return self.setup.group

    @property
    def exchanges(self) -> int:
        """Returns the number of exchanges so far, with the count of a restored checkpoint."""
        return self.replica().exchanges if self.built else 0

    def replica(self, local_replica: int = 0) -> Replica:
        """Returns one of the replicas of this process, with its state of all gradients."""
        return Replica.with_all_gradients(self.setup, local_replica)

    @property
    def residuals(self) -> list[tf.Variable]:
        """Returns the residuals, in the order of `specs`; empty if the method keeps none."""
        return self.state.get(RESIDUAL, [])

    def reduce(
        self,
        gradients: Gradients,
        variables: Sequence[Any],
        inner: InnerOptimizer | None = None,
    ) -> StepResult:
        """Reduces the calling replica's gradients; all replicas call it with the same variables.

        Args:
            gradients: One for each of `variables`, in their shapes and dtypes.
            variables: Some or all of the variables that the exchange was built for.
            inner: The optimizer that applies the sums, if its second moments may divide gradients.

        Raises:
            ValueError: If the exchange was not built for one of `variables`, if a gradient has
                another shape than its variable or a dtype that is not compressed, or if XLA
                compiles the step.
            WorkersDisagreeError: While the step is traced, if workers have gradients for different
                variables, or are at different steps.
            tf.errors.InvalidArgumentError: While the step runs, if replicas are at different steps
                or exchange different gradients.
        """
        setup, state = self.setup, inner.state(variables) if inner else None
        if setup.group.size == 1:
            finite = all_finite(gradients)
            count_skip(self.skipped_steps, finite)
            return StepResult(self.flush(gradients, variables, inner=state), finite, [])
        check_not_in_xla()
        setup.group.check_current()
        if not variables:
            return StepResult([], tf.constant(True), [])
        communicator = setup.group.communicator(setup.label)
        indices = self._agreed_indices(gradients, variables)
        if inner and setup.preconditioner:
            gradients = inner.clip(gradients, variables)
        updates = state.updates if state else None
        with tf.control_dependencies([self._converted([communicator], indices, gradients, state)]):
            return self.take_step(setup, [communicator], indices, [gradients], updates)

    def reduce_in_lockstep(
        self,
        gradients: Sequence[Gradients],
        variables: Sequence[Any],
        inner: InnerState | None = None,
        observe: Observe | None = None,
    ) -> StepResult:
        """Reduces the gradients of all replicas of a `LockstepGroup`; see `reduce`."""
        communicators = self.group.communicators()
        indices = self._agreed_indices(gradients[0], variables)
        updates = inner.updates if inner else None
        converted = self._converted(communicators, indices, gradients[0], inner)
        with tf.control_dependencies([converted]):
            return take_step(self.setup, communicators, indices, gradients, updates, observe)

    def _agreed_indices(self, gradients: Gradients, variables: Sequence[Any]) -> list[int]:
        """Returns the indices of variables once all workers have gradients for the same ones."""
        indices = self.indices.check(variables)
        specs = [self.specs[index] for index in indices]
        check_shapes(gradients, specs)
        paths = [spec.path for spec in specs]
        self._agreement.check(paths, gradients, self.hooks.progress)
        return indices

    def _converted(
        self,
        communicators: Sequence[Communicator],
        indices: Sequence[int],
        gradients: Gradients,
        inner: InnerState | None,
    ) -> tf.Tensor:
        """Converts state of a job with other settings; the step must wait for the result."""
        dense = self._dense_gradients(indices, gradients)
        replicas = [
            Replica(self.setup, indices, communicator.local_replica)
            for communicator in communicators
        ]
        converted = convert_restored(replicas, inner, dense, by_python=True)
        local_replica = communicators[0].local_replica
        with tf.control_dependencies([converted]):
            warn_of_lost_residuals(self.setup, local_replica, lambda: self.warned_of_lost_residuals)
        return converted

    def _dense_gradients(self, indices: Sequence[int], gradients: Gradients) -> list[int]:
        """Returns the positions of the gradients that the compressor exchanges.

        The others are summed as slices. With second moments, a variable stays in one of the forms.
        """
        setup, pairs = self.setup, zip(indices, gradients, strict=True)
        sparse = {index for index, gradient in pairs if setup.stays_sparse(index, gradient)}
        if setup.preconditioner:
            self._sparse |= sparse
            self._dense |= set(indices) - sparse
            both = [setup.specs[index].path for index in self._sparse & self._dense]
            if both:
                raise ValueError(
                    f"The gradients of {', '.join(both)} came dense in one step and as slices in "
                    "another, and Adam's second moment can be kept for only one of these forms; "
                    "use precondition=None."
                )
        return [position for position, index in enumerate(indices) if index not in sparse]

    def divided_gradients(self, variables: Sequence[Any]) -> dict[int, tf.Tensor]:
        """Returns the gradients that are divided before they are exchanged.

        By their positions in `variables`, the values are bool scalars: whether the latest step
        mostly delayed the gradient.
        """
        delayed = self.replica().local(self.setup.variables.delayed).read_value()
        delayed_flags = tf.unstack(delayed)
        indices = enumerate(self.indices.of(variables))
        if not self.setup.preconditioner:
            return {}
        return {i: delayed_flags[index] for i, index in indices if index in self._dense}

    def flush(
        self,
        gradients: Gradients,
        variables: Sequence[Any],
        scale: tf.Tensor | float = 1.0,
        inner: InnerState | None = None,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Returns the gradients of a job's only replica plus the residuals of an earlier job.

        Args:
            gradients: One for each of `variables`. If a gradient is not finite, nothing is added
                yet, because the step may be skipped.
            variables: Some or all of the exchange's variables.
            scale: The factor of the gradients, such as a loss scale.
            inner: As for `reduce`. If an earlier job kept second moments on its replicas, the inner
                optimizer gets them back.
        """
        if not variables:
            return []
        # Not in `build`: programs also build an optimizer to load a model that they only evaluate.
        log_info("There is one worker, so gradients are not exchanged.")
        warn_of_lost_residuals(self.setup, 0, lambda: self.warned_of_lost_residuals)
        replica = Replica(self.setup, self.indices.of(variables))
        return take_residuals(replica, gradients, scale, inner)

    def plan_settings(self) -> Any:
        """Replans the method's settings, if it has a plan. Call it between two steps.

        The process with the first replica makes a plan, and all replicas install it at once. All
        workers must call it between the same two steps; otherwise it raises `WorkersDisagreeError`.
        Returns the plan for the next step; None if another method is in use, or if there is one
        replica.
        """
        plan = self.hooks.plan_settings()
        if plan is not None:
            self.saving.collect_again()
        return plan

    def traffic(self) -> Traffic:
        """Returns the traffic of this process's first replica since the program started."""
        paths = [spec.path for spec in self.specs]
        traffic = self.setup.variables.traffic
        return traffic.read(self.replica().local(traffic.totals), paths)


def residual_norm(exchange: GradientExchange) -> float:
    """Returns the norm of the residuals of this process's first replica; 0 without any."""
    return norm([exchange.group.local(r, 0).read_value() for r in exchange.residuals])


def check_warmup(compressors: Sequence[Compressor], group: Group) -> None:
    """Raises if the replicas could not end the warm-up together."""
    if any(map(has_stages, compressors)) and group.size > 1 and not group.is_collective:
        raise ValueError(
            "A warm-up, or a method that alternates with another, needs collectives in a branch, "
            f"which {type(tf.distribute.get_strategy()).__name__} does not allow; use "
            "gc.MultiWorkerMirroredStrategy, or warmup_steps=0."
        )


def check_not_in_xla() -> None:
    """Raises in code that XLA compiles."""
    if tf_private.in_xla():
        raise ValueError(
            "Compressed gradients cannot be exchanged in code that XLA compiles; use "
            "jit_compile=False in model.compile or tf.function."
        )
