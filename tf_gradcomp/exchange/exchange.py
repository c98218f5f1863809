"""The exchange: sums the gradients of a step over the replicas, and keeps state between steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp import tf_private
from tf_gradcomp.adam.handover import InnerState
from tf_gradcomp.adam.preconditioner import LARGEST, SECOND_MOMENT, Preconditioner
from tf_gradcomp.compressors.base import RESIDUAL, Compressor
from tf_gradcomp.compressors.between_steps import Hook, Hooks, Proposing
from tf_gradcomp.exchange import replacing
from tf_gradcomp.exchange.announcements import announce, announce_one_replica
from tf_gradcomp.exchange.gradients import (
    all_finite,
    check_dtypes,
    check_shapes,
    gradient_specs,
    norm,
    path_of,
    with_gradients_to_exchange,
)
from tf_gradcomp.exchange.method import Method
from tf_gradcomp.exchange.replica import Replica
from tf_gradcomp.exchange.residuals import Gradients
from tf_gradcomp.exchange.restored import convert_restored
from tf_gradcomp.exchange.saving import Saving
from tf_gradcomp.exchange.setup import Setup
from tf_gradcomp.exchange.step import Observe, StepResult, take_step
from tf_gradcomp.exchange.supported import check_warmup
from tf_gradcomp.exchange.traffic import Traffic
from tf_gradcomp.exchange.variable_numbers import VariableNumbers
from tf_gradcomp.groups import handshake
from tf_gradcomp.groups.agreement import LATER_LIST_SECONDS, GradientAgreement
from tf_gradcomp.groups.current import current_group
from tf_gradcomp.groups.group import Group, Member
from tf_gradcomp.groups.out_of_scope import out_of_scope
from tf_gradcomp.ops import library
from tf_gradcomp.policy import GradientSpec, Policy, checked_policy

_LOG = tf.get_logger()
_LOST = (
    "The checkpoint was written by a job with a residual, and %r keeps none: gradients that were "
    "not sent yet are lost. To send them, go on with the compressor that wrote it, or with "
    "gc.compressors.Auto([both])."
)


class GradientExchange(tf.Module):
    """A compressor at work on the gradients of given variables, with its residuals.

    Both ways to compress use it: `CompressedOptimizer` has one of its own, and
    `CompressedAllReduce` has the strategy's. Each replica has its own residual, a checkpoint holds
    their sum, and each of N replicas gets 1/N of it back.

    Attributes:
        specs: What is known of each gradient.
        state: The variables that all candidates keep, by name, in the order of `specs`.
        job_state: What they keep for the whole job, by name.
        facts: What is known of the state of each gradient.
        saving: Reads what a checkpoint holds of the state, and gives replicas what it held.

    Args:
        method: The compressor, or a choice between several.
        policy: Which variables get which settings.
        find_group: Returns the replicas when the exchange is built; by default those of the
            strategy in scope.
    """

    def __init__(
        self,
        method: Method,
        policy: Policy | None = None,
        find_group: Callable[[], Group] = current_group,
    ) -> None:
        super().__init__(name="gradient_exchange")
        library.load()  # what is wrong with it is reported now, not in the first step
        self.policy = checked_policy(policy)
        self.specs: list[GradientSpec] = []
        self.state: dict[str, list[tf.Variable]]
        self.job_state: dict[str, tf.Variable]
        # Not tracked: a checkpoint that is restored now has to wait for those that `build` makes.
        object.__setattr__(self, "state", {})
        object.__setattr__(self, "job_state", {})
        self._method = method
        self._find_group = find_group
        self._built = False
        self.told_of_lost_residuals = False  # when a file was loaded
        self.plans_by = "nobody"  # who calls `plan_settings`, and when; all workers must
        self._sparse: set[int] = set()
        self._dense: set[int] = set()

    @property
    def built(self) -> bool:
        """Returns whether the state exists."""
        return self._built

    def build(self, variables: Sequence[Any], facts: Mapping[str, Any] | None = None) -> None:
        """Creates the state for the gradients of `variables`; a second call does nothing.

        Args:
            variables: All variables whose gradients will be exchanged.
            facts: Further values that must be equal on all workers, by name; JSON-serializable.

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
            group.agree({**self._facts_of(group, specs), **(facts or {})})
            chosen = self._method.candidates[0]
            exchanged = with_gradients_to_exchange(specs)
            if group.size > 1 and exchanged:
                chosen = self._method.choose(group, self._method.candidates, exchanged)
            self._setup = Setup.new(group, self._method, chosen, specs, self.policy)
            new = self._setup.variables
            self.facts, self.step = new.facts, new.step
            self.saving = Saving(group)
            self.saving.take_over([], [self.step])
            for name, of_all in new.state.items():
                alike = name in (SECOND_MOMENT, LARGEST)
                self.saving.take_over(of_all, [], self.facts.nothing_kept, alike=alike)
            self.saving.take_over(new.job_state.values(), [])
            # Only now may a checkpoint restore them.
            self.state, self.job_state = new.state, new.job_state
            self.skipped_steps = new.skipped_steps
        self._hooks = Hooks(chosen.compressor, specs, group.size)
        self._numbers = VariableNumbers(variables)
        self._agreement = GradientAgreement(group)
        self.specs = specs
        self._built = True
        if group.tells_users:
            announce(self._setup, self._hooks.notices())

    @property
    def compressor(self) -> Compressor:
        """The method in use; only known once the exchange is built, for `Auto` chooses then."""
        return self._setup.compressor

    @property
    def preconditioner(self) -> Preconditioner | None:
        """Returns the divisor of gradients before compression; None if there is none."""
        return self._setup.preconditioner

    @property
    def group(self) -> Group:
        """The replicas that it was built for."""
        return self._setup.group

    def knows(self, variables: Sequence[Any]) -> bool:
        """Returns whether the exchange was built for all of `variables`."""
        return self.built and all(self._numbers.get(v) is not None for v in variables)

    def check_knows(self, variables: Sequence[Any]) -> None:
        """Refuses gradients of variables that it was not built for, or that it cannot exchange.

        Raises:
            ValueError: Naming the first of them.
        """
        numbers = [self._number(variable) for variable in variables]
        if self._setup.group.size > 1:
            check_dtypes([self.specs[number] for number in numbers])

    def is_for(self, variables: Sequence[Any]) -> bool:
        """Returns whether the exchange was built for exactly `variables`, in any order."""
        return self.knows(variables) and len(variables) == len(self.specs)

    @property
    def keeps_residual(self) -> bool:
        """Returns whether the compressor keeps a residual for later steps."""
        return self._setup.residual_scale is not None

    def is_preconditioned(self, variable: Any) -> bool:
        """Returns whether the gradients of a variable are divided before they are exchanged."""
        return self.preconditioner is not None and self._number(variable) in self._dense

    def hook(self, kind: type[Hook]) -> Hook | None:
        """Returns the method's hook of a kind; None if it has none, or if nothing is exchanged."""
        return self._hooks.get(kind) if self.built else None

    def local_state(self, replica: int) -> dict[str, list[tf.Variable]]:
        """Returns what one of the process's replicas keeps for the gradients, by name."""
        local = self._setup.group.local
        return {
            name: [local(one, replica) for one in of_all] for name, of_all in self.state.items()
        }

    def local_job_state(self, replica: int) -> dict[str, tf.Variable]:
        """Returns what one of the process's replicas keeps for the job."""
        group = self._setup.group
        return {name: group.local(variable, replica) for name, variable in self.job_state.items()}

    @property
    def is_first(self) -> bool:
        """Returns whether the process has the job's first replica."""
        return self._setup.group.is_first

    @property
    def exchanges(self) -> int:
        """Returns the number of exchanges so far, with the count of a restored checkpoint."""
        return int(self._setup.group.local(self.step, 0).numpy()) if self.built else 0

    @property
    def variables(self) -> list[tf.Variable]:
        """Counters and facts, then the state by name; a checkpoint holds what `saving` reads."""
        if not self.built:
            return []
        state = itertools.chain.from_iterable(self.state.values())
        return [self.step, self.skipped_steps, *self.facts.all, *self.job_state.values(), *state]

    @property
    def job_state_of_gradients(self) -> Sequence[str]:
        """The names in `job_state` of what is in units of gradients."""
        return self._setup.job_state_of_gradients

    @property
    def residuals(self) -> list[tf.Variable]:
        """Returns the residuals, in the order of `specs`; empty if the method keeps none."""
        return self.state.get(RESIDUAL, [])

    def sums_of_processes(
        self, gradients: Gradients, variables: Sequence[Any]
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """The gradients that a replica brings: where several processes are one, their sums.

        Args:
            gradients: One for each of `variables`, in their shapes and dtypes.
            variables: Some or all of those it was built for.

        Raises:
            ValueError: If a gradient has another shape than its variable, or is of a dtype that is
                not compressed.
            WorkersDisagreeError: As `reduce` does.
        """
        numbers = self._agreed_numbers(gradients, variables)
        names = [f"{self._setup.label}_{number}" for number in numbers]
        return self._setup.group.sums_of_processes(gradients, names)

    def reduce(
        self,
        gradients: Gradients,
        variables: Sequence[Any],
        member: Member,
        inner: InnerState | None = None,
    ) -> tuple[list[tf.Tensor | tf.IndexedSlices], tf.Tensor]:
        """One replica's side of a step; every replica calls it for the same variables.

        Args:
            gradients: One for each of `variables`, in their shapes and dtypes.
            variables: Some or all of those it was built for.
            member: The replica.
            inner: The state of the inner optimizer of `variables`, on this replica, if that can be
                preconditioned.

        Returns:
            The gradients summed over the replicas, in the dtypes and forms they came in, and a bool
            scalar that is equal on all replicas: where it is false, the step must be skipped.

        Raises:
            ValueError: If it was not built for one of `variables`, a gradient has another shape
                than its variable or is of a dtype that is not compressed, or XLA is to compile the
                step.
            WorkersDisagreeError: While the step is traced, if workers have gradients for different
                variables, or are at different steps.
            tf.errors.InvalidArgumentError: While the step runs, if replicas turn out to be at
                different steps or to exchange different things.
        """
        self._check_may_run()
        if not variables:
            return [], tf.constant(True)
        numbers = self._prepare([member], [gradients], variables, inner)
        updates = inner.updates if inner else None
        result = take_step(self._setup, [member], numbers, [gradients], updates)
        self.count_skip(result.finite)
        return result.gradients, result.finite

    def reduce_in_lockstep(
        self,
        gradients: Sequence[Gradients],
        variables: Sequence[Any],
        inner: InnerState | None = None,
        observe: Observe | None = None,
    ) -> StepResult:
        """Takes all replicas of a `LockstepGroup` through one step; see `reduce`.

        Args:
            gradients: Each replica's gradients.
            variables: As for `reduce`.
            inner: The state of the inner optimizer, which all replicas share.
            observe: As for `take_step`.
        """
        group = self._setup.group
        members = [Member(one, rank) for rank, one in enumerate(group.communicators())]
        numbers = self._prepare(members, gradients, variables, inner)
        updates = inner.updates if inner else None
        result = take_step(self._setup, members, numbers, gradients, updates, observe)
        self.count_skip(result.finite)
        return result

    def _prepare(
        self,
        members: Sequence[Member],
        gradients: Sequence[Gradients],
        variables: Sequence[Any],
        inner: InnerState | None,
    ) -> list[int]:
        """Checks the gradients, converts restored state, and returns the places of variables."""
        numbers = self._agreed_numbers(gradients[0], variables)
        dense = self._check_forms(numbers, gradients[0])
        replicas = [Replica(self._setup, numbers, member) for member in members]
        convert_restored(replicas, inner, dense)
        self._warn_of_lost_residuals(members[0].local_replica)
        return numbers

    def delayed(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """Returns which gradients were mostly delayed in the residual until the latest step.

        Args:
            variables: Some or all of the variables that the exchange was built for.

        Returns:
            A bool scalar for each variable, equal on all replicas.
        """
        delayed = self._setup.group.local(self._setup.variables.delayed, 0).read_value()
        return [delayed[self._number(variable)] for variable in variables]

    def flush(
        self,
        gradients: Gradients,
        variables: Sequence[Any],
        scale: tf.Tensor | float = 1.0,
        inner: InnerState | None = None,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """For the only replica of a job: the gradients plus what an earlier job did not send.

        Args:
            gradients: One for each of `variables`. Where one is not finite, nothing is added yet,
                for the step may be skipped.
            variables: Some or all of those it was built for.
            scale: What the gradients will be divided by, such as a loss scale.
            inner: As for `reduce`. If an earlier job kept second moments on its replicas, they are
                given back to it.
        """
        if not variables:
            return []
        announce_one_replica()
        self._warn_of_lost_residuals(0)
        numbers = [self._number(variable) for variable in variables]
        replica = Replica(self._setup, numbers, None)
        convert_restored([replica], inner, [])
        places = list(range(len(numbers)))
        gradients, left = replica.add_residuals(places, gradients, scale)
        replica.settle(places, [], all_finite(gradients), left)
        return gradients

    def count_skip(self, finite: tf.Tensor) -> None:
        """Counts a step that is skipped because its gradients are not `finite`."""
        self.skipped_steps.assign_add(tf.cast(tf.logical_not(finite), tf.int64))

    def true_on_all(self, flag: tf.Tensor) -> tf.Tensor:
        """Returns whether a bool scalar is true on all replicas.

        Each replica calls it, in its own context.
        """
        return self.group.all_replicas.true_on_all(flag, f"{self._setup.label}_flag")

    def plan_settings(self) -> Any:
        """Has the method plan its settings anew, if it can; called between two steps.

        The process with the first replica makes a plan, and all replicas install it at once. All
        workers must call it between the same two steps.

        Returns:
            What counts from the next step on; None if there is nothing to plan: another method is
            in use, or there is one replica, which exchanges nothing.

        Raises:
            WorkersDisagreeError: If the other workers do something else, or are at another step.
        """
        hook = self.hook(Proposing)
        if hook is None:
            return None
        group = self._setup.group
        group.agree({"next action": hook.action, **self._progress()}, LATER_LIST_SECONDS)
        proposed = hook.no_change()
        if group.is_first:
            of_first = [total.numpy() for total in self.local_state(0)[hook.state_name]]
            job_state = self.local_job_state(0)
            # Other workers wait for the proposal, and could not meet for a variable.
            proposed = out_of_scope(lambda: hook.propose(of_first, job_state))
        proposed = group.from_first(proposed)
        for replica in range(group.local_size):
            own = self.local_state(replica)[hook.state_name]
            hook.install(proposed, self.local_job_state(replica), own)
        self.saving.recollect()
        return self.plan_in_force()

    def plan_in_force(self) -> Any:
        """Returns the plan that counts in the next step; None if nothing is planned."""
        hook = self.hook(Proposing)
        return hook.in_force(self.local_job_state(0)) if hook else None

    def traffic(self) -> Traffic:
        """Returns the traffic of this process's first replica since the program started."""
        paths = [spec.path for spec in self.specs]
        traffic = self._setup.variables.traffic
        return traffic.read(self._setup.group.local(traffic.totals, 0), paths)

    def residual_norm(self) -> float:
        """The Euclidean norm of the residuals of this process's first replica; 0 without any."""
        return norm([self._setup.group.local(r, 0).read_value() for r in self.residuals])

    def check_scope(self) -> None:
        """Refuses to run by other replicas than those it was built for.

        Raises:
            ValueError: If it was built for others.
        """
        self._setup.group.check_current()

    def _agreed_numbers(self, gradients: Gradients, variables: Sequence[Any]) -> list[int]:
        """The places of the variables in `specs`, once all workers have gradients for the same."""
        numbers = [self._number(variable) for variable in variables]
        specs = [self.specs[number] for number in numbers]
        check_dtypes(specs)
        check_shapes(gradients, specs)
        paths = [spec.path for spec in specs]
        self._agreement.check(paths, gradients, self._progress)
        return numbers

    def _check_may_run(self) -> None:
        if tf_private.in_xla():
            raise ValueError(
                "Compressed gradients cannot be exchanged in code that XLA compiles; use "
                "jit_compile=False in model.compile or tf.function."
            )
        self.check_scope()

    def _warn_of_lost_residuals(self, local_replica: int) -> None:
        """Says so in a step that finds residuals restored which nothing here can take."""
        if self.residuals:
            return
        waits = self._setup.group.local(self.facts.residual_waits, local_replica)

        def warn() -> None:
            if local_replica == 0:
                tf.numpy_function(self._log_lost_residuals, [], [])
            waits.assign(tf.zeros_like(waits))

        # XLA cannot call Python: in its code only what was restored before it was traced is seen.
        with tf.init_scope() if tf_private.in_xla() else contextlib.nullcontext():
            tf.cond(tf.reduce_any(waits), warn, lambda: None)

    def _log_lost_residuals(self) -> None:
        if not self.told_of_lost_residuals:
            _LOG.warning(_LOST, self.compressor)

    def _check_forms(self, numbers: Sequence[int], gradients: Gradients) -> list[int]:
        """Returns the places of gradients that the compressor exchanges.

        Raises:
            ValueError: If a variable is divided in some steps and not in others.
        """
        pairs = zip(numbers, gradients, strict=True)
        sparse = {number for number, one in pairs if self._setup.stays_sparse(number, one)}
        if self.preconditioner:
            all_sparse, all_dense = self._sparse | sparse, self._dense | set(numbers) - sparse
            both = [self.specs[number].path for number in all_sparse & all_dense]
            if both:
                raise ValueError(
                    f"The gradients of {', '.join(both)} came dense in one step and as slices in "
                    "another, and Adam's second moment can be kept for one of these only; use "
                    "precondition=None."
                )
            self._sparse, self._dense = all_sparse, all_dense
        return [place for place, number in enumerate(numbers) if number not in sparse]

    def _progress(self) -> dict[str, Any]:
        """Returns facts that must be equal on all workers when they begin to exchange or plan."""
        proposing = self.hook(Proposing)
        return {
            "exchanges so far": self.exchanges,
            **({proposing.caller_fact: self.plans_by} if proposing else {}),
            **self._hooks.facts(self.local_job_state(0)),
        }

    def _facts_of(self, group: Group, specs: Sequence[GradientSpec]) -> dict[str, Any]:
        return {
            **handshake.package_versions(),
            **replacing.fact(),
            "replicas": f"{group.size}, a {group.kind} each",
            "compressor": self._method.text,
            "max_dense_elements": self.policy.max_dense_elements,
            "number of variables": len(specs),
            **{f"variable {i}": str(spec) for i, spec in enumerate(specs)},
        }

    def _number(self, variable: Any) -> int:
        number = self._numbers.get(variable)
        if number is None:
            known = ", ".join(spec.path for spec in self.specs) or "none"
            raise ValueError(
                f"Variable {path_of(variable)!r} is not among those whose gradients are exchanged: "
                f"{known}. Where layers were unfrozen since, "
                "or for another model, compile with a new CompressedOptimizer; otherwise build the "
                "optimizer with all variables that it will be given."
            )
        return number
