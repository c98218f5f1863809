"""A step in which a leader chooses the entries that all replicas send: for all phases of LGC.

Some tensors are summed whole. For the other tensors, the leader of the step (see `leader`)
broadcasts the positions of its largest entries. The phase determines the form in which each replica
sends these entries, and subtracts the sent values from the residual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import leader, request_unless_empty, zero_if_too_large
from tf_gradcomp.compressors.base import Reduced, StepInputs
from tf_gradcomp.compressors.requests import AllReduce, Broadcast, Request

BY_VALUE, BY_INDEX, BY_MAGNITUDE = "value", "index", "magnitude"
ORDERS = (BY_VALUE, BY_INDEX, BY_MAGNITUDE)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Positions of a step's tensors, grouped by the way in which the tensors are sent."""

    whole: tuple[int, ...]  # tensors that are summed whole
    # Tensors whose chosen entries are coded jointly, such as by an autoencoder.
    coded: tuple[int, ...]
    plain: tuple[int, ...]  # tensors whose chosen entries are summed without coding
    # Number of chosen entries of each tensor; 0 if the tensor is summed whole.
    entries: tuple[int, ...]
    # Number of int32 words for the positions of each tensor's chosen entries.
    index_words: tuple[int, ...]
    added: int  # number of coded entries that each replica sends uncoded, besides the code

    @property
    def selected(self) -> tuple[int, ...]:
        """Tensors with chosen entries, in the order in which the places of the entries are sent."""
        return (*self.coded, *self.plain)

    @property
    def coded_entries(self) -> int:
        """Number of coded entries."""
        return sum(self.entries[index] for index in self.coded)

    @property
    def coded_words(self) -> int:
        """Number of words for the positions of the coded entries."""
        return sum(self.index_words[index] for index in self.coded)

    def tensor_bytes(self, sizes: Sequence[int], replicas: int, coded_bytes: float) -> tf.Tensor:
        """Returns the bytes that each tensor takes of a payload, rounded down.

        One replica, the leader, sends the places of the entries. `coded_bytes` is the size of all
        coded entries, without their places.
        """
        counted = []
        for index, size in enumerate(sizes):
            entries = self.entries[index]
            index_bytes = 4 * self.index_words[index] / replicas
            if index in self.coded:
                counted.append(int(index_bytes + coded_bytes * entries / self.coded_entries))
            elif index in self.plain:
                counted.append(int(index_bytes + 4 * entries))
            else:
                counted.append(4 * size)
        return tf.constant(counted, tf.int64)


class Sums:
    """Results of the sums of a step.

    Attributes:
        whole_elements: The tensors that were summed whole, flattened and concatenated.
        plain_elements: The entries that were summed without coding.
        extra: Other values that were summed in the same vector.
        finite: bool scalar, equal on all replicas: whether all summed values were finite. A sum may
            still be too large.
    """

    def __init__(self, total: tf.Tensor, whole_elements: int, plain_elements: int) -> None:
        self.whole, self.plain, remainder = tf.split(
            total,
            [whole_elements, plain_elements, tf.size(total) - whole_elements - plain_elements],
        )
        self.extra = remainder[:-1]
        self.finite = tf.math.is_finite(remainder[-1])


class LeaderStep:
    """The selection of one replica in one step.

    Attributes:
        inputs: The inputs of the method.
        layout: How the tensors are sent.
        leader: int32 scalar, the rank of the replica that leads.
        local_finite: bool scalar: whether this replica's gradients and residuals are.
    """

    def __init__(self, inputs: StepInputs, layout: Layout, order: str) -> None:
        self.inputs = inputs
        self.layout = layout
        self.leader = leader(inputs.step, inputs.size)
        self._all_tensors = self._selection((*layout.selected, *layout.whole))
        self._chosen, self.local_finite = ops.leader_select(
            self._all_tensors, tf.equal(self.leader, inputs.rank), order=order
        )
        self._indices = self._chosen  # until the leader's are known

    def broadcast_choice(
        self, words: int = 0, make_words: Callable[[tf.Tensor], tf.Tensor] | None = None
    ) -> Generator[Request, tf.Tensor, tf.Tensor]:
        """Broadcasts the leader's selection. Call it first.

        With `make_words`, the leader also sends `words` int32 words, made from its coded entries.
        They are returned.
        """
        payload, index_words = self._chosen, sum(self.layout.index_words)
        if make_words:
            leads = tf.equal(self.leader, self.inputs.rank)
            extra = tf.cond(
                leads, lambda: make_words(self.coded()), lambda: tf.zeros([words], tf.int32)
            )
            payload = tf.concat([payload, extra], 0)
        payload = tf.ensure_shape(payload, [index_words + words])
        payload = yield from request_unless_empty(
            payload, lambda words: Broadcast(words, self.leader)
        )
        self._indices, extra = tf.split(payload, [index_words, words])
        return extra

    def coded(self) -> tf.Tensor:
        """This replica's values of the entries that are coded; zeros if it is not finite."""
        return self._values_at(self.layout.coded, self._indices[: self.layout.coded_words])

    def sum(self, extra: tf.Tensor | None = None) -> Generator[AllReduce, tf.Tensor, Sums]:
        """Sums the tensors that are sent whole, the plain entries and `extra`, with a flag."""
        whole = self._values_at(self.layout.whole, self._indices[:0])
        plain = self._values_at(self.layout.plain, self._indices[self.layout.coded_words :])
        parts = [whole, plain] if extra is None else [whole, plain, extra]
        flag = tf.where(self.local_finite, [0.0], [float("nan")])
        total = yield AllReduce(tf.concat([*parts, flag], 0))
        return Sums(total, whole.shape.num_elements(), plain.shape.num_elements())

    def end(
        self,
        sums: Sums,
        totals: tf.Tensor,
        finite: tf.Tensor,
        coded_bytes: float,
        rests: tf.Tensor | None = None,
    ) -> Reduced:
        """Spreads the totals over dense tensors, and keeps unsent values.

        `rests` is the unsent part of this replica's coded entries; None if it sent them completely.
        If not all replicas are finite, the step is skipped, and a finite replica keeps its whole
        gradient.
        """
        layout, specs = self.layout, self.inputs.specs
        finite = tf.logical_and(finite, sums.finite)
        totals, fits = zero_if_too_large(tf.concat([totals, sums.plain, sums.whole], 0), finite)
        rests = tf.zeros([0]) if rests is None else rests
        totals_by_tensor, taken = ops.leader_apply(
            self._all_tensors,
            self._indices,
            totals,
            # Values decoded from large entries may themselves be too large.
            tf.where(tf.math.is_finite(rests), rests, tf.zeros_like(rests)),
            self.local_finite,
            tf.logical_and(finite, self.inputs.finite),
        )
        reduced = dict(zip((*layout.selected, *layout.whole), totals_by_tensor, strict=True))
        sizes = [spec.elements for spec in specs]
        counted = layout.tensor_bytes(sizes, self.inputs.size, coded_bytes)
        dense = [reduced[index] for index in range(len(specs))]
        return Reduced(dense, tf.logical_and(taken, fits), counted)

    def _selection(self, tensors: Sequence[int]) -> ops.LeaderSelection:
        return ops.LeaderSelection(
            [self.inputs.residuals[index] for index in tensors],
            [self.inputs.gradients[index] for index in tensors],
            [self.layout.entries[index] for index in tensors],
        )

    def _values_at(self, tensors: Sequence[int], indices: tf.Tensor) -> tf.Tensor:
        """The values of some tensors at their positions; zeros in place of non-finite values."""
        if not tensors:
            return tf.zeros([0])
        return ops.leader_take(self._selection(tensors), indices, self.local_finite)
