"""A step in which a leader chooses the entries that all replicas send: LGC in all of its phases.

Some tensors are summed whole. Of the others, the leader of the step, each replica in turn, tells
where its largest entries are. What each replica then sends of these entries is for the phase to
say; it takes that off the residual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence

import tensorflow as tf

from tf_gradcomp.compressors.base import Exchanged, ExchangeInputs
from tf_gradcomp.compressors.maybe_empty import unless_empty
from tf_gradcomp.compressors.wishes import AllReduce, Broadcast, Wish
from tf_gradcomp.policy import GradientSpec

BY_VALUE, BY_INDEX, BY_MAGNITUDE = "value", "index", "magnitude"
ORDERS = (BY_VALUE, BY_INDEX, BY_MAGNITUDE)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How tensors are sent, by their places among those of a step.

    Attributes:
        whole: Those that are summed whole.
        coded: Those whose chosen entries are coded together, such as by an autoencoder.
        plain: Those whose chosen entries are summed as they are.
        entries: How many entries are chosen of each tensor; 0 if it is summed whole.
    """

    whole: tuple[int, ...]
    coded: tuple[int, ...]
    plain: tuple[int, ...]
    entries: tuple[int, ...]

    @property
    def led(self) -> tuple[int, ...]:
        """Those whose entries are chosen, in the order in which their places are sent."""
        return (*self.coded, *self.plain)

    @property
    def coded_entries(self) -> int:
        """How many entries are coded."""
        return sum(self.entries[place] for place in self.coded)

    @property
    def plain_entries(self) -> int:
        """How many entries are chosen and summed as they are."""
        return sum(self.entries[place] for place in self.plain)

    def tensor_bytes(self, sizes: Sequence[int], replicas: int, coded_bytes: float) -> tf.Tensor:
        """Bytes that each tensor takes of a payload, rounded down, as `Exchanged` has them.

        Args:
            sizes: The number of elements of each tensor.
            replicas: How many there are, of which one sends where the entries are.
            coded_bytes: What all coded entries take, without their places.
        """
        counted = []
        for place, size in enumerate(sizes):
            entries = self.entries[place]
            if place in self.coded:
                share = coded_bytes * entries / self.coded_entries
                counted.append(int(4 * entries / replicas + share))
            elif place in self.plain:
                counted.append(int(4 * entries / replicas + 4 * entries))
            else:
                counted.append(4 * size)
        return tf.constant(counted, tf.int64)


class Sums:
    """What came of the sums of a step.

    Attributes:
        whole: The tensors that were summed whole, flat, one behind the other.
        plain: The entries that were summed as they are.
        more: What else was summed in the same vector.
        finite: bool scalar, equal on all replicas: whether all of it is.
    """

    def __init__(self, total: tf.Tensor, whole: int, plain: int) -> None:
        self.whole, self.plain, rest = tf.split(
            total, [whole, plain, tf.size(total) - whole - plain]
        )
        self.more = rest[:-1]
        self.finite = tf.reduce_all(tf.math.is_finite(total))


class LedStep:
    """One replica's side of a step.

    Attributes:
        inputs: What the method was given.
        layout: How the tensors are sent.
        own_finite: bool scalar: whether this replica's gradients and residuals are.
        leader: int32 scalar, the rank of the replica that leads.
    """

    def __init__(self, inputs: ExchangeInputs, layout: Layout, order: str) -> None:
        self.inputs = inputs
        self.layout = layout
        self._order = order
        self._residuals = [
            tf.reshape(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32), [-1])
            for handle in inputs.residuals
        ]
        self._values = [
            residual + tf.reshape(tf.cast(gradient, tf.float32), [-1])
            for residual, gradient in zip(self._residuals, inputs.gradients, strict=True)
        ]
        self.own_finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(of_one)) for of_one in self._values]
        )
        self.leader = tf.cast(inputs.step % inputs.size, tf.int32)
        self._places: list[tf.Tensor] = []

    def follow(
        self, words: int = 0, more: Callable[[tf.Tensor], tf.Tensor] | None = None
    ) -> Generator[Wish, tf.Tensor, tf.Tensor]:
        """Has the leader choose, and tell where; must come first.

        Args:
            words: How many words the leader tells besides.
            more: Makes them of its coded entries: int32 [words].

        Returns:
            These words.
        """
        counts = [self.layout.entries[place] for place in self.layout.led]

        def choose() -> tf.Tensor:
            chosen = [
                largest(self._values[place], count, self._order)
                for place, count in zip(self.layout.led, counts, strict=True)
            ]
            told = [more(self._taken(chosen, self.layout.coded))] if more else []
            return tf.concat([*chosen, *told, tf.zeros([0], tf.int32)], 0)

        total = sum(counts) + words
        leads = tf.equal(self.leader, self.inputs.rank)
        told = tf.cond(leads, choose, lambda: tf.zeros([total], tf.int32))
        told = tf.ensure_shape(told, [total])
        told = yield from unless_empty(told, lambda payload: Broadcast(payload, self.leader))
        *self._places, told = tf.split(told, [*counts, words])
        return told

    def coded(self) -> tf.Tensor:
        """This replica's values of the entries that are coded; zeros if it is not finite."""
        return self._if_finite(self._taken(self._places, self.layout.coded))

    def sum(self, more: tf.Tensor | None = None) -> Generator[AllReduce, tf.Tensor, Sums]:
        """Sums the tensors that are sent whole, the plain entries and `more`, with a flag."""
        whole = _concat([self._values[place] for place in self.layout.whole])
        plain = _concat(
            [
                tf.gather(self._values[place], self._places[len(self.layout.coded) + i])
                for i, place in enumerate(self.layout.plain)
            ]
        )
        given = [self._if_finite(whole), self._if_finite(plain)]
        if more is not None:
            given.append(more)
        flag = tf.where(self.own_finite, [0.0], [float("nan")])
        total = yield AllReduce(tf.concat([*given, flag], 0))
        return Sums(total, whole.shape.num_elements(), plain.shape.num_elements())

    def end(
        self,
        sums: Sums,
        totals: tf.Tensor,
        shares: tf.Tensor,
        finite: tf.Tensor,
        coded_bytes: float,
    ) -> Exchanged:
        """Spreads the totals over dense tensors, and keeps what was not sent.

        Args:
            sums: From `sum`.
            totals: The sum of what all replicas sent of the coded entries.
            shares: What this replica sent of them.
            finite: bool scalar, equal on all replicas; where it is false, the step is skipped. A
                replica that is finite itself then keeps its whole gradient.
            coded_bytes: As `Layout.tensor_bytes` has it.
        """
        layout, sizes = self.layout, [spec.elements for spec in self.inputs.specs]
        finite = tf.reduce_all(
            [finite, sums.finite, self.inputs.finite, tf.reduce_all(tf.math.is_finite(totals))]
        )
        counts = [layout.entries[place] for place in layout.coded]
        of_coded = zip(_split(totals, counts), _split(shares, counts), strict=True)
        pairs = dict(zip(layout.coded, of_coded, strict=True))
        of_plain = _split(sums.plain, [layout.entries[place] for place in layout.plain])
        of_whole = _split(sums.whole, [sizes[place] for place in layout.whole])

        def taken() -> list[tf.Tensor]:
            reduced = dict(zip(layout.whole, of_whole, strict=True))
            kept = {place: tf.zeros([sizes[place]]) for place in layout.whole}
            for number, place in enumerate(layout.led):
                where, values = self._places[number][:, tf.newaxis], self._values[place]
                own = tf.gather(values, self._places[number])
                if place in pairs:
                    total, share = pairs[place]
                else:
                    total, share = of_plain[number - len(layout.coded)], own
                reduced[place] = tf.scatter_nd(where, total, [sizes[place]])
                kept[place] = tf.tensor_scatter_nd_update(values, where, own - share)
            every = range(len(sizes))
            return [*(reduced[place] for place in every), *(kept[place] for place in every)]

        def skipped() -> list[tf.Tensor]:
            both = zip(self._values, self._residuals, strict=True)
            kept = tf.cond(
                self.own_finite,
                lambda: [tf.identity(values) for values in self._values],
                lambda: [tf.identity(residual) for _, residual in both],
            )
            return [*(tf.zeros_like(of_one) for of_one in self._values), *kept]

        ends = tf.cond(finite, taken, skipped)
        reduced, kept = ends[: len(sizes)], ends[len(sizes) :]
        specs = self.inputs.specs
        for handle, of_one in zip(self.inputs.residuals, _shaped(kept, specs), strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=of_one)
        counted = layout.tensor_bytes(sizes, self.inputs.size, coded_bytes)
        return Exchanged(_shaped(reduced, specs), finite, counted)

    def _taken(self, places: Sequence[tf.Tensor], tensors: Sequence[int]) -> tf.Tensor:
        """The values at the first of some places, those of `tensors`."""
        return _concat(
            [tf.gather(self._values[place], places[number]) for number, place in enumerate(tensors)]
        )

    def _if_finite(self, values: tf.Tensor) -> tf.Tensor:
        """What is not finite is not sent: zeros are, beside a flag."""
        return tf.where(self.own_finite, values, tf.zeros_like(values))


def largest(values: tf.Tensor, count: int, order: str) -> tf.Tensor:
    """Where the entries of largest magnitude are, the first of equals: int32 [count].

    Args:
        values: float32 [n].
        count: How many, at most n.
        order: Of the entries, one of `ORDERS`: by ascending value, by ascending place, or by
            descending magnitude.
    """
    _, places = tf.math.top_k(tf.abs(values), count)
    if order == BY_INDEX:
        return tf.sort(places)
    if order == BY_VALUE:
        return tf.gather(places, tf.argsort(tf.gather(values, places), stable=True))
    return places


def _shaped(vectors: Sequence[tf.Tensor], specs: Sequence[GradientSpec]) -> list[tf.Tensor]:
    """Vectors in the shapes of the gradients."""
    return [tf.reshape(v, spec.shape) for v, spec in zip(vectors, specs, strict=True)]


def _split(vector: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Parts of a vector; none if there are no sizes."""
    return list(tf.split(vector, sizes)) if sizes else []


def _concat(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([*vectors, tf.zeros([0])], 0)
