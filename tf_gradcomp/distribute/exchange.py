"""The exchange: the gradients of a step in, the reduced gradients out; and the state it keeps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.adam.handover import HandOver, InnerState
from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.compressors.base import RESIDUAL, Compressor
from tf_gradcomp.distribute import handshake, sparse, tf_private
from tf_gradcomp.distribute.communicator import Sent, converse
from tf_gradcomp.distribute.gradients import (
    all_finite,
    gradient_specs,
    native,
    norm,
    path_of,
    plus_residual,
)
from tf_gradcomp.distribute.group import Group, Member, current_group
from tf_gradcomp.distribute.host_state import OnHost
from tf_gradcomp.distribute.method import Method
from tf_gradcomp.distribute.notices import tell_user
from tf_gradcomp.distribute.padded_gather import WordsAhead
from tf_gradcomp.distribute.replica_step import ReplicaStep, Stepped, by_stage
from tf_gradcomp.distribute.state import Facts, new_variables, shared_variable, state_specs
from tf_gradcomp.distribute.supported import check_strategy, check_warmup
from tf_gradcomp.distribute.traffic import Traffic, TrafficCounter
from tf_gradcomp.ops import library
from tf_gradcomp.policy import GradientSpec, Policy, checked_policy

Gradients = Sequence[tf.Tensor | tf.IndexedSlices]

_NOT_ADAM = (
    "The checkpoint holds Adam's second moments, and residuals that are divided by their roots; "
    "this job's inner optimizer is not of the Adam family and can go on with neither. Use the "
    "optimizer that wrote it, or restore the model's weights alone."
)
_WHY_LOCAL = "what is compressed is divided by its root (precondition=None leaves it to Adam)"


class GradientExchange(tf.Module):
    """A compressor at work on the gradients of given variables, with its residuals.

    Both ways to compress use it: `CompressedOptimizer` has one of its own, and
    `CompressedAllReduce` has the strategy's. Each replica has its own residual, a checkpoint holds
    their sum, and each of N replicas gets 1/N of it back.

    Attributes:
        compressor: What exchanges; None before it is built, for it may be chosen then.
        preconditioner: In front of the compressor, if any.
        keeps_residual: Whether the compressor leaves anything for later steps.
        specs: Of the gradients.
        state: What all candidates keep, by name, in the order of `specs`.
        facts: What is known of the state of each gradient.
    """

    def __init__(self, method: Method, policy: Policy | None = None) -> None:
        super().__init__(name="gradient_exchange")
        library.load()  # what is wrong with it shows now, and not in the first step
        self.policy = checked_policy(policy)
        self.compressor: Compressor | None = None
        self.preconditioner: Preconditioner | None = None
        self.specs: list[GradientSpec] = []
        self.state: dict[str, list[tf.Variable]] = {}
        self._method = method
        self._agreed: set[tuple[Any, ...]] = set()
        self._apart: set[int] = set()
        self._together: set[int] = set()

    @property
    def built(self) -> bool:
        """Whether the state exists."""
        return bool(self.specs)

    def build(self, variables: Sequence[Any], facts: Mapping[str, Any] | None = None) -> None:
        """Creates the state for the gradients of `variables`; a second call does nothing.

        Args:
            variables: All variables whose gradients will be exchanged.
            facts: What else all workers must have alike, by name; JSON-serializable.

        Raises:
            ValueError: If a variable's dtype, the strategy, or a choice among these candidates is
                not supported.
            WorkersDisagreeError: If the workers have other variables or settings.
        """
        if self.built:
            return
        group = current_group()
        compressors = [candidate.compressor for candidate in self._method.candidates]
        check_strategy(group.strategy)
        check_warmup(compressors, group)
        specs = gradient_specs(variables, self.policy, alone=group.size == 1)
        with tf.init_scope():
            group.agree({**self._facts_of(specs), **(facts or {})})
            chosen = self._method.candidates[0]
            if group.size > 1:
                chosen = self._method.choose(group, self._method.candidates, specs)
            kept = state_specs(compressors, specs, self._method.moments)
            self.state = new_variables(kept, specs)
            self.facts = Facts(len(specs))
            self.step = shared_variable(0, tf.int64, "exchange_step")
            self.skipped_steps = shared_variable(0, tf.int64, "skipped_steps")
            self._traffic = TrafficCounter(len(specs))
            alone_in_process = group.is_collective and group.local_size == 1
            self._ahead = WordsAhead() if alone_in_process else None
        self._group = group
        self._numbers = _Numbers(variables)
        self.compressor = chosen.compressor
        self.preconditioner = chosen.preconditioner if group.size > 1 else None
        self.keeps_residual = group.size > 1 and RESIDUAL in state_specs([self.compressor], specs)
        self.specs = specs
        _announce(group, self.preconditioner)

    def knows(self, variables: Sequence[Any]) -> bool:
        """Whether it was built for all of `variables`."""
        return self.built and all(self._numbers.get(v) is not None for v in variables)

    def divides(self, variable: Any) -> bool:
        """Whether the gradients of a variable are divided before they are exchanged."""
        return self.preconditioner is not None and self._number(variable) in self._together

    @property
    def variables(self) -> list[tf.Variable]:
        """What a checkpoint holds: counters and facts, then the state by name."""
        if not self.built:
            return []
        state = itertools.chain.from_iterable(self.state.values())
        return [self.step, self.skipped_steps, *self.facts.all, *state]

    @property
    def residuals(self) -> list[tf.Variable]:
        """What is not yet sent, in the order of `specs`; empty if the method keeps nothing."""
        return self.state.get(RESIDUAL, [])

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
            ValueError: If it was not built for one of `variables`, or XLA is to compile the step.
            WorkersDisagreeError: While the step is traced, if workers have gradients for different
                variables, or are at different steps.
            tf.errors.InvalidArgumentError: If that is found out later.
        """
        self._check_may_run()
        numbers = [self._number(variable) for variable in variables]
        self._agree_on_gradients(numbers, gradients)
        apart = [i for i, g in enumerate(gradients) if self._stays_sparse(numbers[i], g)]
        together = [i for i in range(len(gradients)) if i not in apart]
        self._check_forms([numbers[i] for i in apart], [numbers[i] for i in together])
        replica = _Replica(self, numbers, member)
        replica.hand_over(inner, together)
        if not self.keeps_residual:
            gradients = replica.with_what_waits(gradients, inner)
        reduced: list[Any] = list(gradients)
        finite = tf.constant(True)
        if apart:
            sums, finite = replica.sum_apart(apart, [gradients[i] for i in apart])
            for place, total in zip(apart, sums, strict=True):
                reduced[place] = total
        if together:
            given = [gradients[i] for i in together]
            stepped = replica.exchange(together, given, finite, inner)
            finite = stepped.finite
            for place, gradient, total, rows in zip(
                together, given, stepped.reduced, stepped.touched, strict=True
            ):
                reduced[place] = sparse.as_given(gradient, total, rows)
                if _dtype(gradient) == tf.float16:  # the sum is float32, and may not fit
                    finite &= all_finite([reduced[place]])
        replica.settle(finite)
        self.step.assign_add(1)
        self.count_skip(finite)
        return reduced, finite

    def flush(
        self,
        gradients: Gradients,
        variables: Sequence[Any],
        divisor: tf.Tensor | float = 1.0,
        inner: InnerState | None = None,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """For the only replica of a job: the gradients, plus what an earlier job left unsent.

        Args:
            gradients: One for each of `variables`. Where one is not finite, nothing is added yet,
                for the step may be skipped.
            variables: Some or all of those it was built for.
            divisor: What the gradients will be divided by, such as a loss scale.
            inner: As for `reduce`; it is given back its second moments.
        """
        numbers = [self._number(variable) for variable in variables]
        replica = _Replica(self, numbers, None)
        replica.hand_over(inner, [])
        gradients = replica.with_what_waits(gradients, inner, divisor)
        replica.settle(all_finite(gradients))
        return gradients

    def count_skip(self, finite: tf.Tensor) -> None:
        """Counts a step that is skipped because its gradients are not `finite`."""
        self.skipped_steps.assign_add(tf.cast(tf.logical_not(finite), tf.int64))

    def traffic(self) -> Traffic:
        """What this process's first replica has exchanged since the program started."""
        paths = [spec.path for spec in self.specs]
        return self._traffic.read(self._group.local(self._traffic.totals, 0), paths)

    def residual_norm(self) -> float:
        """The Euclidean norm of the residuals of this process's first replica; 0 without any."""
        return norm([self._group.local(r, 0).read_value() for r in self.residuals])

    def check_scope(self) -> None:
        """Refuses to run under another strategy than it was built under.

        Raises:
            ValueError: If it does.
        """
        if not self._group.is_current():
            raise ValueError(
                "The exchange of gradients was built outside of the scope of the strategy that "
                "runs it; build the optimizer inside `with strategy.scope():`."
            )

    def _check_may_run(self) -> None:
        if tf_private.in_xla():
            raise ValueError(
                "Compressed gradients cannot be exchanged in code that XLA compiles; use "
                "jit_compile=False in model.compile or tf.function."
            )
        self.check_scope()

    def _agree_on_gradients(self, numbers: Sequence[int], gradients: Gradients) -> None:
        """All workers must be about to exchange the gradients of the same variables.

        Asked once for each set of variables, for workers need not trace as often as each other:
        one whose last batch is smaller traces once more.
        """
        forms = ["sparse" if isinstance(g, tf.IndexedSlices) else "dense" for g in gradients]
        key = tuple(zip(numbers, forms, strict=True))
        if key in self._agreed:
            return
        with tf.init_scope():
            step = int(self._group.local(self.step, 0).numpy()) if not self._agreed else 0
            self._group.agree(
                {
                    "next action": "an exchange of gradients",
                    "step of the exchange": step,
                    **{f"gradient of {self.specs[number].path!r}": form for number, form in key},
                }
            )
        self._agreed.add(key)

    def _check_forms(self, apart: Sequence[int], together: Sequence[int]) -> None:
        """A variable that is preconditioned must be so in all steps.

        Raises:
            ValueError: If it is not.
        """
        if not self.preconditioner:
            return
        self._apart.update(apart)
        self._together.update(together)
        both = [self.specs[number].path for number in self._apart & self._together]
        if both:
            raise ValueError(
                f"The gradients of {', '.join(both)} came dense in one step and as slices in "
                "another, and Adam's second moment can be kept for one of these only; use "
                "precondition=None."
            )

    def _facts_of(self, specs: Sequence[GradientSpec]) -> dict[str, Any]:
        return {
            **handshake.package_versions(),
            "compressor": self._method.text,
            "max_dense_elements": self.policy.max_dense_elements,
            "number of variables": len(specs),
            **{f"variable {i}": str(spec) for i, spec in enumerate(specs)},
        }

    def _number(self, variable: Any) -> int:
        number = self._numbers.get(variable)
        if number is None:
            raise ValueError(
                f"Variable {path_of(variable)!r} is not among those whose gradients are exchanged: "
                f"{', '.join(spec.path for spec in self.specs)}. Build the optimizer with all "
                "variables that it will be given, or use another one for this variable."
            )
        return number

    def _stays_sparse(self, number: int, gradient: tf.Tensor | tf.IndexedSlices) -> bool:
        if not isinstance(gradient, tf.IndexedSlices):
            return False
        return self.compressor.keeps_slices or self._is_large(number)

    def _is_large(self, number: int) -> bool:
        return self.specs[number].elements > self.policy.max_dense_elements


class _Replica:
    """One replica of an exchange in one step, for some of the gradients."""

    def __init__(
        self, exchange: GradientExchange, numbers: Sequence[int], member: Member | None
    ) -> None:
        self._exchange = exchange
        self._group = exchange._group
        self._numbers = list(numbers)
        self._member = member
        self._waited: tf.Tensor | None = None

    def hand_over(self, inner: InnerState | None, preconditioned: Sequence[int]) -> None:
        """Makes the state one that this job can go on with, where a checkpoint's was not.

        Args:
            inner: The state of the inner optimizer.
            preconditioned: Places of the gradients that would be, if this job is preconditioned.
        """
        exchange, facts = self._exchange, self._exchange.facts
        takes = [
            exchange.preconditioner is not None and place in preconditioned
            for place in range(len(self._numbers))
        ]
        scale = exchange.compressor.residual_scale if exchange.keeps_residual else 1.0
        taken, scales = self._fact(facts.moments_taken), self._fact(facts.residual_scale)

        def change() -> None:
            if inner is None:
                tf.debugging.assert_none_equal(taken, True, message=_NOT_ADAM)
            else:
                self._move_moments(inner, taken, takes)
            for place, residual in enumerate(self._state().get(RESIDUAL, [])):
                residual.assign(residual.read_value() * (scale / scales[place]))
            self._set_fact(facts.moments_taken, takes)
            self._set_fact(facts.residual_scale, [scale] * len(takes))

        right = tf.logical_and(
            tf.reduce_all(tf.equal(taken, takes)), tf.reduce_all(tf.equal(scales, scale))
        )
        tf.cond(right, lambda: None, change)

    def _move_moments(self, inner: InnerState, taken: tf.Tensor, takes: Sequence[bool]) -> None:
        handover = self._handover(inner)
        for place, is_taken in enumerate(tf.unstack(taken, len(self._numbers))):
            if takes[place]:
                handover.take(place, tf.logical_not(is_taken))
            else:
                handover.give_back(place, is_taken)

    def _handover(self, inner: InnerState) -> HandOver:
        state = self._state()
        moments = {name: state[name] for name in inner.moments}
        preconditioner = self._exchange._method.moments
        residuals = state.get(RESIDUAL, [])
        return HandOver(preconditioner, inner, moments, residuals, self._group.size)

    def with_what_waits(
        self,
        gradients: Gradients,
        inner: InnerState | None,
        divisor: tf.Tensor | float = 1.0,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """The gradients plus their residuals, where any is left; `settle` then clears these.

        Args:
            gradients: Of this replica.
            inner: The state of the inner optimizer.
            divisor: What the gradients will be divided by.
        """
        residuals = self._state().get(RESIDUAL, [])
        if not residuals:
            return list(gradients)
        self._waited = tf.reduce_any(self._fact(self._exchange.facts.residual_waits))

        def added() -> list[tf.Tensor | tf.IndexedSlices]:
            waiting = [residual.read_value() for residual in residuals]
            if inner is not None and self._exchange.preconditioner:
                taken = tf.unstack(self._fact(self._exchange.facts.moments_taken), len(waiting))
                roots = self._handover(inner).roots
                waiting = [
                    residual * tf.where(is_taken, roots(place), tf.ones_like(residual))
                    for place, (residual, is_taken) in enumerate(zip(waiting, taken, strict=True))
                ]
            return [
                plus_residual(gradient, residual * divisor)
                for gradient, residual in zip(gradients, waiting, strict=True)
            ]

        return tf.cond(
            tf.logical_and(self._waited, all_finite(gradients)), added, lambda: list(gradients)
        )

    def settle(self, finite: tf.Tensor) -> None:
        """Notes after a step what is left to be sent."""
        facts = self._exchange.facts
        if self._member:
            self._exchange._traffic.count_exchange(self._local(self._exchange._traffic.totals))
        if self._exchange.keeps_residual:
            self._set_fact(facts.residual_waits, [True] * len(self._numbers))
        elif self._waited is not None:

            def clear() -> None:
                for residual in self._state()[RESIDUAL]:
                    residual.assign(tf.zeros_like(residual))
                self._set_fact(facts.residual_waits, [False] * len(self._numbers))

            tf.cond(tf.logical_and(self._waited, finite), clear, lambda: None)

    def sum_apart(
        self, places: Sequence[int], slices: Sequence[tf.IndexedSlices]
    ) -> tuple[list[tf.IndexedSlices], tf.Tensor]:
        """Sums slices uncompressed; with them, whether all are finite."""
        exchange, communicator = self._exchange, self._member.communicator
        size = communicator.size
        large = [i for i, p in enumerate(places) if exchange._is_large(self._numbers[p])]
        small = [i for i in range(len(places)) if i not in large]
        sums: dict[int, tf.IndexedSlices] = {}
        for group in ([small] if small else []) + [[i] for i in large]:
            given = [slices[i] for i in group]
            numbers = [self._numbers[places[i]] for i in group]
            if group == small or not self._group.is_collective:
                (found, tensor_bytes), sent = converse(sparse.sum_slices(given, size), communicator)
            else:
                (found, tensor_bytes), sent = self._sum_large(given, numbers[0])
            self._count(numbers, sent, tensor_bytes)
            sums.update(zip(group, found, strict=True))
        values = [tf.reduce_all(tf.math.is_finite(total.values)) for total in sums.values()]
        return [sums[i] for i in range(len(places))], tf.reduce_all(values)

    def _sum_large(self, given: Sequence[tf.IndexedSlices], number: int) -> Any:
        communicator = self._member.communicator
        rows, size = self._exchange.specs[number].shape[0], communicator.size
        whole, vote = converse(sparse.prefer_dense(given[0], rows, size), communicator)
        result, sent = tf.cond(
            whole,
            lambda: converse(sparse.sum_whole(given[0]), communicator),
            lambda: converse(sparse.sum_slices(given, size), communicator),
        )
        return result, sent.plus(vote)

    def exchange(
        self,
        places: Sequence[int],
        gradients: Gradients,
        finite: tf.Tensor,
        inner: InnerState | None,
    ) -> Stepped:
        """Exchanges some of the gradients by the method."""
        exchange, communicator = self._exchange, self._member.communicator
        numbers = [self._numbers[place] for place in places]
        specs = [exchange.specs[number] for number in numbers]
        if exchange._ahead:
            communicator.ahead = self._local(exchange._ahead.words)
        with OnHost(self._state(numbers)) as handles:
            moments = None
            if exchange.preconditioner and inner:
                moments = exchange.preconditioner.second_moments(
                    handles, inner.updates, communicator.size
                )
            step = ReplicaStep.of(
                specs,
                gradients,
                handles,
                self._local(exchange.step).read_value(),
                finite,
                communicator.rank,
                communicator.size,
                moments,
            )
            stepped, sent = by_stage(
                exchange.compressor,
                step.inputs.step,
                lambda method: converse(step.talk(method), communicator),
            )
        self._count(numbers, sent, stepped.tensor_bytes)
        return stepped

    def _count(self, numbers: Sequence[int], sent: Sent, tensor_bytes: tf.Tensor) -> None:
        dense_bytes = sum(4 * self._exchange.specs[number].elements for number in numbers)
        traffic = self._exchange._traffic
        traffic.add(self._local(traffic.totals), sent, dense_bytes, numbers, tensor_bytes)

    def _state(self, numbers: Sequence[int] | None = None) -> dict[str, list[tf.Variable]]:
        """Of this replica, for its gradients or some of them."""
        numbers = self._numbers if numbers is None else numbers
        return {
            name: [self._local(variables[number]) for number in numbers]
            for name, variables in self._exchange.state.items()
        }

    def _local(self, variable: tf.Variable) -> tf.Variable:
        return self._group.local(variable, self._member.local_replica if self._member else 0)

    def _fact(self, fact: tf.Variable) -> tf.Tensor:
        return tf.gather(self._local(fact).read_value(), self._numbers)

    def _set_fact(self, fact: tf.Variable, values: Sequence[Any]) -> None:
        local = self._local(fact)
        places = tf.constant([[number] for number in self._numbers])
        values = tf.constant(values, local.dtype)
        local.assign(tf.tensor_scatter_nd_update(local.read_value(), places, values))


def _dtype(gradient: tf.Tensor | tf.IndexedSlices) -> tf.DType:
    return gradient.values.dtype if isinstance(gradient, tf.IndexedSlices) else gradient.dtype


def _announce(group: Group, preconditioner: Preconditioner | None) -> None:
    if group.size == 1:
        tell_user("One replica: gradients are not exchanged.")
        return
    if preconditioner:
        tell_user(f"Each replica keeps Adam's second moment of its own gradients: {_WHY_LOCAL}.")
    if any("GPU" in device for device in group.devices):
        tell_user("Gradients are copied from the GPU to the host for compression.")


class _Numbers:
    """Which place a variable has, by identity: a plain object, which `tf.Module` does not track."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = [native(variable) for variable in variables]  # keeps the ids taken
        self._numbers = {id(variable): i for i, variable in enumerate(self._variables)}

    def get(self, variable: Any) -> int | None:
        return self._numbers.get(id(native(variable)))
