"""One replica's part in an exchange: its state, what it sends, and what it is left with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_gradcomp import tf_private
from tf_gradcomp.adam.handover import (
    HandOver,
    InnerState,
    not_begun,
    since_after,
    updates_after,
)
from tf_gradcomp.adam.preconditioner import LARGEST, SECOND_MOMENT, Preconditioner
from tf_gradcomp.compressors.base import OF_GRADIENTS, RESIDUAL, Compressor, in_turn
from tf_gradcomp.exchange import metadata, sparse
from tf_gradcomp.exchange.gradients import all_finite, plus_residual
from tf_gradcomp.exchange.host_state import OnHost
from tf_gradcomp.exchange.replica_step import ReplicaStep, Stepped, by_stage
from tf_gradcomp.exchange.state import Facts
from tf_gradcomp.exchange.traffic import TrafficCounter
from tf_gradcomp.groups.communicator import Communicator, Sent, converse
from tf_gradcomp.groups.group import Group, Member
from tf_gradcomp.groups.padded_gather import WordsAhead
from tf_gradcomp.policy import GradientSpec

Gradients: TypeAlias = Sequence[tf.Tensor | tf.IndexedSlices]

_NOT_ADAM = (
    "The checkpoint holds Adam's second moments, and residuals that are divided by their roots; "
    "this job's inner optimizer is not of the Adam family and can go on with neither. Use the "
    "optimizer that wrote it, or restore the model's weights alone."
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """What an exchange is made of.

    Attributes:
        group: The replicas.
        compressor: The method in use.
        preconditioner: What divides gradients before they are compressed, if anything.
        possible_preconditioner: What could be in front of it, if the inner optimizer allows any.
        residual_scale: That of the compressor's residual; None if it keeps none.
        specs: What is known of all gradients.
        state: The variables that all candidates keep, by name, in the order of `specs`.
        job_state: What they keep for the whole job, by name.
        of_gradients: The names of what of that is in units of gradients.
        facts: What is known of the state of each gradient.
        step: int64, the number of exchanges so far.
        delayed: bool [gradients], of which of them most entries had waited in the latest step.
        traffic: Counts bytes.
        ahead: How many words travel with the lengths of payloads, if any; see `gather_padded`.
        max_dense_elements: Gradients of tables with up to so many elements are made dense.
        label: Tells the collectives of this exchange from those of others, where they have names.
    """

    group: Group
    compressor: Compressor
    preconditioner: Preconditioner | None
    possible_preconditioner: Preconditioner | None
    residual_scale: float | None
    specs: Sequence[GradientSpec]
    state: Mapping[str, Sequence[tf.Variable]]
    job_state: Mapping[str, tf.Variable]
    of_gradients: Sequence[str]
    facts: Facts
    step: tf.Variable
    delayed: tf.Variable
    traffic: TrafficCounter
    ahead: WordsAhead | None
    max_dense_elements: int
    label: str

    @property
    def on_gpu(self) -> frozenset[str]:
        """The state that stays on a GPU in a step: all that is done with it can be done there."""
        methods = list(in_turn(self.compressor))
        if all(method.has_gpu_kernels for method in methods):
            return frozenset(self.state)
        if any(method.preconditions for method in methods):
            return frozenset()  # one op has second moments and residuals
        return frozenset({SECOND_MOMENT, LARGEST} & self.state.keys())

    @property
    def is_copied(self) -> bool:
        """Whether state on a GPU is copied to the host and back in a step, all of it or some."""
        return self.on_gpu != self.state.keys()

    def is_large(self, number: int) -> bool:
        """Whether a table is too large to be made dense."""
        return sparse.is_large(self.specs[number], self.max_dense_elements)

    def stays_sparse(self, number: int, gradient: tf.Tensor | tf.IndexedSlices) -> bool:
        """Whether a gradient is summed as slices, apart from the others, not by the method."""
        spec = self.specs[number]
        return sparse.stays_sparse(gradient, spec, self.compressor, self.max_dense_elements)


class ReplicaExchange:
    """One replica of an exchange in one step.

    Args:
        parts: What the exchange is made of.
        numbers: Which of its gradients the replica has in this step.
        member: The replica; None for the only one of a job, which exchanges nothing.
    """

    def __init__(self, parts: Parts, numbers: Sequence[int], member: Member | None) -> None:
        self._parts = parts
        self._numbers = list(numbers)
        self._local_replica = member.local_replica if member else 0
        self._communicator = member.communicator if member else None
        if self._communicator:
            self._communicator.label = parts.label

    def hand_over(self, inner: InnerState | None, preconditioned: Sequence[int]) -> None:
        """Converts restored state for this job, where the job that saved it had other settings.

        Args:
            inner: The state of the inner optimizer.
            preconditioned: Places of the gradients that are divided if this job divides any.
        """
        parts, facts = self._parts, self._parts.facts
        takes = [
            parts.preconditioner is not None and place in preconditioned
            for place in range(len(self._numbers))
        ]
        scale = self._residual_scale
        taken, scales = self._fact(facts.moments_taken), self._fact(facts.residual_scale)

        def change() -> None:
            since: Sequence[tf.Tensor | int] = [0] * len(takes)
            if inner is None:
                self._refuse_divided()
            else:
                since = self._move_moments(inner, taken, takes)
            if residuals := self._state().get(RESIDUAL):
                factors = tf.unstack(scale / scales, len(takes))
                for residual, factor in zip(residuals, factors, strict=True):
                    residual.assign(residual.read_value() * factor)
            for name in parts.of_gradients:
                measured = self._local(parts.job_state[name])
                measured.assign(tf.zeros_like(measured))
            every = range(len(self._numbers))
            self._set_fact(facts.moments_taken, takes, every)
            self._set_fact(facts.moments_since, since, every)
            self._set_fact(facts.residual_scale, [scale] * len(takes), every)

        right = tf.logical_and(
            tf.reduce_all(tf.equal(taken, takes)), tf.reduce_all(tf.equal(scales, scale))
        )
        tf.cond(right, lambda: None, change)

    def _refuse_divided(self) -> None:
        """Refuses residuals that were divided by second moments which are not to be had."""
        # XLA drops assertions: in its code only what was restored before it was traced is seen.
        with tf.init_scope() if tf_private.in_xla() else contextlib.nullcontext():
            taken = self._fact(self._parts.facts.moments_taken)
            tf.debugging.assert_none_equal(taken, True, message=_NOT_ADAM)

    def _move_moments(
        self, inner: InnerState, taken: tf.Tensor, takes: Sequence[bool]
    ) -> list[tf.Tensor | int]:
        """Returns what `moments_since` is of each gradient from now on."""
        handover = self._handover(inner)
        since: list[tf.Tensor | int] = []
        for place, is_taken in enumerate(tf.unstack(taken, len(self._numbers))):
            if takes[place]:
                since.append(handover.take(place, tf.logical_not(is_taken)))
            else:
                handover.give_back(place, is_taken)
                since.append(0)
        return since

    def _handover(self, inner: InnerState) -> HandOver:
        state = self._state()
        moments = {name: state[name] for name in inner.moments}
        preconditioner = self._parts.possible_preconditioner
        if preconditioner is None:
            raise RuntimeError("There is nothing to hand over without second moments.")
        of_gradients = [state[name] for name in OF_GRADIENTS if name in state]
        since = self._fact(self._parts.facts.moments_since)
        return HandOver(
            preconditioner,
            inner,
            moments,
            of_gradients,
            *self._waiting(),
            since,
            self._parts.group.size,
        )

    def _waiting(self) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns restored residuals, of all replicas together, and which of them are lost."""
        facts, shapes = self._parts.facts, [self._parts.specs[n].shape for n in self._numbers]
        residuals = self._state().get(RESIDUAL)
        if residuals is None:
            return [tf.zeros(shape) for shape in shapes], self._fact(facts.residual_waits)
        factors = tf.unstack(self._parts.group.size / self._fact(facts.residual_scale), len(shapes))
        pairs = zip(residuals, factors, strict=True)
        waiting = [residual.read_value() * factor for residual, factor in pairs]
        return waiting, tf.zeros([len(shapes)], tf.bool)

    def with_what_waits(
        self, places: Sequence[int], gradients: Gradients, scale: tf.Tensor | float = 1.0
    ) -> tuple[list[tf.Tensor | tf.IndexedSlices], list[tf.Tensor]]:
        """Adds to some gradients what is left in their residuals; `settle` takes it from these.

        Args:
            places: Of the gradients that the compressor does not exchange.
            gradients: The gradients of this replica.
            scale: What the gradients will be divided by.

        Returns:
            All gradients; and what will then be left in the residuals at `places`, if there are
            residuals.
        """
        residuals = self._state().get(RESIDUAL, [])
        if not residuals or not places:
            return list(gradients), []
        given = [gradients[place] for place in places]
        waiting = [residuals[place].read_value() for place in places]
        wanted = tf.logical_and(self._waits(places), all_finite(given))

        scale /= self._residual_scale  # what a residual is to be multiplied by

        def added() -> tuple[list[tf.Tensor | tf.IndexedSlices], list[tf.Tensor]]:
            pairs = [
                plus_residual(gradient, residual * scale, self._parts.group.size)
                for gradient, residual in zip(given, waiting, strict=True)
            ]
            return [total for total, _ in pairs], [left / scale for _, left in pairs]

        sums = list(gradients)
        found, left = tf.cond(wanted, added, lambda: (given, waiting))
        for place, gradient in zip(places, found, strict=True):
            sums[place] = gradient
        return sums, left

    def settle(
        self,
        apart: Sequence[int],
        together: Sequence[int],
        finite: tf.Tensor,
        left: Sequence[tf.Tensor],
    ) -> None:
        """Notes after a step what is left to be sent.

        Args:
            apart: Places of the gradients to which what waited has been added.
            together: Places of those that the compressor has exchanged.
            finite: Whether the step is taken.
            left: What is left of the residuals at `apart`, as `with_what_waits` returned it.
        """
        facts, state = self._parts.facts, self._state()
        if self._communicator:
            with tf.control_dependencies([finite]):
                self._parts.traffic.count_exchange(self._local(self._parts.traffic.totals))
        if RESIDUAL not in state:
            return
        done = list(apart)
        if self._parts.residual_scale is None:
            done += together  # their residuals are cleared already; see `ReplicaStep.talk`
        elif together:
            self._set_fact(facts.residual_waits, [True] * len(together), together)
        if not done:
            return

        def clear() -> None:
            for place, rest in zip(apart, left, strict=True):
                state[RESIDUAL][place].assign(rest)
            # Equal on all replicas, unless the residuals of a float16 table differ among them.
            still = [tf.reduce_any(tf.not_equal(rest, 0)) for rest in left]
            none = [False] * (len(done) - len(apart))
            self._set_fact(facts.residual_waits, [*still, *none], done)

        tf.cond(tf.logical_and(self._waits(done), finite), clear, lambda: None)

    @property
    def _residual_scale(self) -> float:
        scale = self._parts.residual_scale
        return 1.0 if scale is None else scale

    def _waits(self, places: Sequence[int]) -> tf.Tensor:
        """Whether anything may be left in some residuals."""
        waits = self._fact(self._parts.facts.residual_waits)
        return tf.reduce_any(tf.gather(waits, list(places)))

    def sum_apart(
        self, places: Sequence[int], slices: Sequence[tf.IndexedSlices]
    ) -> tuple[list[tf.IndexedSlices], tf.Tensor]:
        """Sums slices, not by the method; returns the sums, and whether all are finite."""
        sums = dict(zip(places, slices, strict=True))
        large = {p for p in places if self._parts.is_large(self._numbers[p])}
        if not self._parts.group.is_collective:
            large = set()  # a choice would need collectives in a branch
        for of_one in [[place] for place in large] + [[p for p in places if p not in large]]:
            if of_one:
                given = [sums[place] for place in of_one]
                sums.update(zip(of_one, self._sum_slices(of_one, given), strict=True))
        values = [tf.reduce_all(tf.math.is_finite(total.values)) for total in sums.values()]
        return [sums[place] for place in places], tf.reduce_all(values)

    def _sum_slices(
        self, places: Sequence[int], given: Sequence[tf.IndexedSlices]
    ) -> list[tf.IndexedSlices]:
        communicator, numbers = self._reached(), [self._numbers[place] for place in places]
        specs = [self._parts.specs[number] for number in numbers]
        step = self._local(self._parts.step).read_value()
        fingerprint = self._parts.compressor.fingerprint(specs)
        word, dtype = metadata.tag_word(fingerprint, step), self._parts.compressor.slices_dtype
        gather = functools.partial(sparse.sum_slices, given, communicator.size, word, dtype)
        if self._parts.group.is_collective and self._parts.is_large(numbers[0]):
            rows = specs[0].shape[0]
            tag = metadata.tag(fingerprint, step, tf.float32, communicator.size)
            vote = sparse.prefer_dense(given[0], rows, communicator.size, tag)
            whole, voted = converse(vote, communicator)
            (sums, tensor_bytes), sent = tf.cond(
                whole,
                lambda: converse(sparse.sum_whole(given[0], dtype), communicator),
                lambda: converse(gather(), communicator),
            )
            sent = sent.plus(voted)
        else:
            (sums, tensor_bytes), sent = converse(gather(), communicator)
        self._count(numbers, sent, tensor_bytes)
        return sums

    def reduce_by_method(
        self,
        places: Sequence[int],
        gradients: Gradients,
        finite: tf.Tensor,
        inner: InnerState | None,
    ) -> Stepped:
        """Exchanges some of the gradients by the compressor."""
        parts, communicator = self._parts, self._reached()
        numbers = [self._numbers[place] for place in places]
        specs = [parts.specs[number] for number in numbers]
        if parts.ahead:
            communicator.ahead = self._local(parts.ahead.words)
        with OnHost(self._state(numbers), parts.on_gpu) as handles:
            moments, not_yet = None, None
            if parts.preconditioner and inner:
                since = tf.gather(self._fact(parts.facts.moments_since), list(places))
                not_yet = not_begun(inner.updates, since)
                moments = parts.preconditioner.second_moments(
                    handles, updates_after(inner.updates, since), communicator.size, gradients
                )
            step = ReplicaStep.of(
                specs,
                gradients,
                handles,
                self._local(parts.step).read_value(),
                finite,
                communicator.rank,
                communicator.size,
                moments,
                {name: self._local(v) for name, v in parts.job_state.items()},
                self._waits(places),
                residual_scale=self._residual_scale,
                numbers=numbers,
                not_begun=not_yet,
            )
            stepped, sent = by_stage(
                parts.compressor,
                step.inputs,
                lambda method: converse(step.talk(method), communicator),
            )
        self._count(numbers, sent, stepped.tensor_bytes)
        self._set_fact(parts.delayed, stepped.delayed, places)
        return stepped

    def note_beginnings(
        self,
        places: Sequence[int],
        begins: tf.Tensor,
        finite: tf.Tensor,
        inner: InnerState | None,
    ) -> None:
        """Notes after a step of which gradients the second moments have not begun yet.

        Args:
            places: Of the gradients that the compressor has exchanged.
            begins: bool, which of them begin in this step; equal on all replicas.
            finite: Whether the step is taken.
            inner: The state of the inner optimizer.
        """
        if not self._parts.preconditioner or not inner:
            return
        fact = self._parts.facts.moments_since
        since = tf.gather(self._fact(fact), list(places))
        self._set_fact(fact, since_after(inner.updates, since, begins, finite), places)

    def _reached(self) -> Communicator:
        if self._communicator is None:
            raise RuntimeError("The only replica of a job has none to exchange with.")
        return self._communicator

    def _count(self, numbers: Sequence[int], sent: Sent, tensor_bytes: tf.Tensor) -> None:
        dense_bytes = sum(4 * self._parts.specs[number].elements for number in numbers)
        traffic = self._parts.traffic
        traffic.add(self._local(traffic.totals), sent, dense_bytes, numbers, tensor_bytes)

    def _state(self, numbers: Sequence[int] | None = None) -> dict[str, list[tf.Variable]]:
        """The state of this replica, for its gradients or some of them."""
        numbers = self._numbers if numbers is None else numbers
        return {
            name: [self._local(variables[number]) for number in numbers]
            for name, variables in self._parts.state.items()
        }

    def _local(self, variable: tf.Variable) -> tf.Variable:
        return self._parts.group.local(variable, self._local_replica)

    def _fact(self, fact: tf.Variable) -> tf.Tensor:
        return tf.gather(self._local(fact).read_value(), self._numbers)

    def _set_fact(self, fact: tf.Variable, values: Any, places: Iterable[int]) -> None:
        local = self._local(fact)
        numbers = tf.constant([[self._numbers[place]] for place in places])
        values = tf.convert_to_tensor(values, local.dtype)
        local.assign(tf.tensor_scatter_nd_update(local.read_value(), numbers, values))
