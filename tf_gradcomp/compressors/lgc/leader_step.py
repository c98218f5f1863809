"""A step in which a leader chooses the entries that all replicas send: for all stages of LGC.

Some tensors are summed whole. For the other tensors, the leader of the step (see `leader`)
broadcasts the positions of its largest entries. The stage determines the form in which each replica
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
from tf_gradcomp.compressors.top_k_coding import pack_codes, unpack_codes

_MAGNITUDE = 2**31 - 1  # the bits of a float32 without its sign


@dataclasses.dataclass(frozen=True)
class Layout:
    """Indices of a step's tensors, grouped by the way in which the tensors are sent."""

    whole: tuple[int, ...]  # tensors that are summed whole
    # Tensors whose chosen entries are coded jointly, such as by an autoencoder.
    coded: tuple[int, ...]
    plain: tuple[int, ...]  # tensors whose chosen entries are summed without coding
    sizes: tuple[int, ...]  # number of elements of each tensor
    # Number of chosen entries of each tensor; 0 if the tensor is summed whole.
    entries: tuple[int, ...]
    added: int  # number of coded entries that each replica sends uncoded, besides the code

    @property
    def selected(self) -> tuple[int, ...]:
        """Tensors with chosen entries, in the order in which their positions are sent."""
        return (*self.coded, *self.plain)

    @property
    def coded_entries(self) -> int:
        """Number of coded entries."""
        return sum(self.entries[index] for index in self.coded)

    def position_bits(self, index: int) -> int:
        """Number of bits of each position in a tensor: as many as the last position needs."""
        return max(1, (self.sizes[index] - 1).bit_length())

    def position_words(self, index: int) -> int:
        """Number of int32 words for the positions of a tensor's chosen entries."""
        return -(-self.entries[index] * self.position_bits(index) // 32)

    def tensor_bytes(self, replicas: int, coded_bytes: float) -> tf.Tensor:
        """Returns the bytes that each tensor takes of a payload, rounded down.

        One replica, the leader, sends the positions of the entries. `coded_bytes` is the size of
        all coded entries, without their positions.
        """
        tensor_bytes = []
        for index, size in enumerate(self.sizes):
            entries = self.entries[index]
            positions = 4 * self.position_words(index) / replicas
            if index in self.coded:
                tensor_bytes.append(int(positions + coded_bytes * entries / self.coded_entries))
            else:
                tensor_bytes.append(int(positions + 4 * (entries or size)))
        return tf.constant(tensor_bytes, tf.int64)


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

    def __init__(self, inputs: StepInputs, layout: Layout) -> None:
        self.inputs = inputs
        self.layout = layout
        self.leader = leader(inputs.step, inputs.size)
        order = (*layout.selected, *layout.whole)
        # With chunks of one entry, which have no offsets, the ops take and apply all entries.
        self._chunked = ops.Chunked(
            [inputs.residuals[index] for index in order],
            [inputs.gradients[index] for index in order],
            [1] * len(order),
        )
        self._offsets = tf.zeros([0], tf.int32)
        _, self.local_finite = ops.chunk_select(self._chunked, lead=False)
        taken = ops.chunk_take(self._chunked, self._offsets, self.local_finite)
        *values, _ = tf.split(taken, [*(layout.sizes[index] for index in order), 1])
        # Residual plus gradient of each tensor, flat; zeros if this replica is not finite.
        self._values = {
            index: tf.where(self.local_finite, value, 0.0)
            for index, value in zip(order, values, strict=True)
        }
        words = sum(map(layout.position_words, layout.selected))
        self._chosen = tf.ensure_shape(
            tf.cond(
                tf.logical_and(tf.equal(self.leader, inputs.rank), self.local_finite),
                self._choose,
                lambda: tf.zeros([words], tf.int32),
            ),
            [words],
        )
        self._positions = self._unpacked(self._chosen)  # until the leader's are known

    def broadcast_choice(
        self, extra_words: int = 0, make_extra: Callable[[tf.Tensor], tf.Tensor] | None = None
    ) -> Generator[Request, tf.Tensor, tf.Tensor]:
        """Broadcasts the leader's selection, and `extra_words` more words; must come first.

        The leader makes the extra words from its coded entries with `make_extra`. Returns the extra
        words.
        """
        payload, extra = self._chosen, tf.zeros([extra_words], tf.int32)
        if make_extra:
            is_leader = tf.equal(self.leader, self.inputs.rank)
            extra = tf.cond(is_leader, lambda: make_extra(self.coded()), lambda: extra)
        words = payload.shape[0]
        payload = tf.ensure_shape(tf.concat([payload, extra], 0), [words + extra_words])
        payload = yield from request_unless_empty(
            payload, lambda vector: Broadcast(vector, self.leader)
        )
        chosen, extra = tf.split(payload, [words, extra_words])
        self._positions = self._unpacked(chosen)
        return extra

    def coded(self) -> tf.Tensor:
        """This replica's values of the entries that are coded; zeros if it is not finite."""
        return self._taken(self.layout.coded)

    def sum(self, extra: tf.Tensor | None = None) -> Generator[AllReduce, tf.Tensor, Sums]:
        """Sums the tensors that are sent whole, the plain entries and `extra`, with a flag."""
        whole = _concat([self._values[index] for index in self.layout.whole])
        plain = self._taken(self.layout.plain)
        flag = tf.where(self.local_finite, [0.0], [float("nan")])
        total = yield AllReduce(
            tf.concat([whole, plain, *([] if extra is None else [extra]), flag], 0)
        )
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
        layout = self.layout
        finite = tf.logical_and(finite, sums.finite)
        totals, fits = zero_if_too_large(tf.concat([totals, sums.plain, sums.whole], 0), finite)
        if rests is None:
            rests = tf.zeros([layout.coded_entries])
        # Values decoded from large entries may themselves be too large.
        rests = tf.where(tf.math.is_finite(rests), rests, tf.zeros_like(rests))
        rests = tf.concat([rests, tf.zeros_like(sums.plain)], 0)
        counts = [layout.entries[index] for index in layout.selected]
        *entries, whole = tf.split(totals, [*counts, sums.whole.shape.num_elements()])
        *unsent, _ = tf.split(rests, [*counts, 0])
        dense, kept = [], []
        for index, total, rest in zip(layout.selected, entries, unsent, strict=True):
            positions, values = self._positions[index][:, tf.newaxis], self._values[index]
            dense.append(tf.tensor_scatter_nd_update(tf.zeros_like(values), positions, total))
            kept.append(tf.tensor_scatter_nd_update(values, positions, rest))
        reduced, taken = ops.chunk_apply(
            self._chunked,
            self._offsets,
            tf.concat([*dense, whole, [0.0]], 0),
            self.local_finite,
            tf.logical_and(finite, self.inputs.finite),
            rests=tf.concat([*kept, tf.zeros_like(whole)], 0),
        )
        by_index = dict(zip((*layout.selected, *layout.whole), reduced, strict=True))
        return Reduced(
            [by_index[index] for index in range(len(layout.sizes))],
            tf.logical_and(taken, fits),
            layout.tensor_bytes(self.inputs.size, coded_bytes),
        )

    def _choose(self) -> tf.Tensor:
        """Returns the packed positions of the largest entries of each tensor."""
        layout = self.layout
        packed = [
            pack_codes(
                _largest(self._values[index], layout.entries[index]), layout.position_bits(index)
            )
            for index in layout.selected
        ]
        return tf.concat([tf.zeros([0], tf.int32), *packed], 0)

    def _unpacked(self, words: tf.Tensor) -> dict[int, tf.Tensor]:
        """Returns the positions in each selected tensor, by the tensor's index."""
        layout = self.layout
        *parts, _ = tf.split(words, [*map(layout.position_words, layout.selected), 0])
        positions = {}
        for index, part in zip(layout.selected, parts, strict=True):
            count, size = layout.entries[index], layout.sizes[index]
            unpacked = unpack_codes(part, layout.position_bits(index), tf.constant(count))
            message = f"LGC: a position of the leader is not in tensor {index}"
            with tf.control_dependencies([tf.debugging.assert_less(unpacked, size, message)]):
                positions[index] = tf.ensure_shape(unpacked, [count])
        return positions

    def _taken(self, tensors: Sequence[int]) -> tf.Tensor:
        """Returns the values of some tensors at their positions."""
        return _concat(
            [tf.gather(self._values[index], self._positions[index]) for index in tensors]
        )


def _largest(values: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the positions of the largest magnitudes, int32, by ascending value.

    Of equal values, the first come first. Bits are compared, because TensorFlow's threads take
    denormals for zeros.
    """
    bits = tf.bitcast(values, tf.int32)
    magnitudes = tf.bitwise.bitwise_and(bits, _MAGNITUDE)
    positions = tf.sort(tf.math.top_k(magnitudes, count).indices)
    chosen = tf.gather(magnitudes, positions)
    ascending = tf.where(tf.gather(bits, positions) < 0, -chosen, chosen)  # as the values
    return tf.gather(positions, tf.argsort(ascending, stable=True))


def _concat(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.zeros([0]), *parts], 0)
