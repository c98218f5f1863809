"""What a replica can ask of the others, and how TensorFlow's strategies answer."""

from __future__ import annotations

import abc
from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tf_gradcomp import tf_private
from tf_gradcomp.compressors.requests import AllGather, AllReduce, Request, WithRider
from tf_gradcomp.groups.padded_gather import gather_padded

Result = TypeVar("Result")

_PIECE_BYTES = 2**25  # summed at a time; larger buffers are mapped anew in each step, as costly


class Sent(NamedTuple):
    """Bytes that one replica sent; int64 scalars.

    Attributes:
        payload_bytes: What it gave to be sent; for a broadcast, the mean over the possible roots.
        sent_bytes: What the collectives made it send, including what it passed on for others.
    """

    payload_bytes: tf.Tensor
    sent_bytes: tf.Tensor

    @classmethod
    def nothing(cls) -> Sent:
        """No bytes."""
        return cls(tf.constant(0, tf.int64), tf.constant(0, tf.int64))

    def plus(self, other: Sent) -> Sent:
        """The sum of both."""
        return Sent(self.payload_bytes + other.payload_bytes, self.sent_bytes + other.sent_bytes)


class Communicator(abc.ABC):
    """Carries what one replica sends in one step.

    Attributes:
        size: The number of replicas of the job.
        rank: This replica's number among them: int32 scalar, or a number.
        ahead: The variable that `gather_padded` takes, if the replica is alone in its process.
        label: Tells the collectives of one exchange from those of others, where they have names.
    """

    def __init__(self, size: int, rank: tf.Tensor | int) -> None:
        self.size = size
        self.rank = rank
        self.ahead: tf.Variable | None = None
        self.label = ""

    def answer(self, request: Request) -> tuple[Any, Sent]:
        """Does what a compressor asks for, and counts what that sends."""
        if isinstance(request, WithRider):
            return self._answer_with_rider(*request)
        if isinstance(request, AllGather):
            return self._answer_gather(request)
        if isinstance(request, AllReduce):
            values = request.values
            return self.all_reduce(values), self._summed(values)
        given = 4 * tf.size(request.payload, tf.int64)
        # All replicas but one pass it on.
        sent = Sent(given // self.size, (self.size - 1) * given // self.size)
        return self.broadcast(request.payload, request.root), sent

    def _answer_with_rider(
        self, request: AllGather | AllReduce, rider: tf.Tensor
    ) -> tuple[Any, Sent]:
        riders = rider.shape.num_elements()
        if isinstance(request, AllGather):
            payload = tf.concat([rider, request.payload], 0)
            rows, sent = self._answer_gather(AllGather(payload, request.same_length))
            return (rows[:, riders:], rows[:, :riders]), sent
        total = self.all_reduce_with_rider(request.values, rider)
        return (total[:-riders], total[-riders:]), self._summed(request.values, riders)

    def _answer_gather(self, request: AllGather) -> tuple[tf.Tensor, Sent]:
        words = tf.size(request.payload)
        if request.same_length:
            rows, gathered = self.all_gather(request.payload), words
        else:
            rows, gathered = self.all_gather_padded(request.payload)
        # A ring passes on all rows but one.
        sent = 4 * (self.size - 1) * tf.cast(gathered, tf.int64)
        return rows, Sent(4 * tf.cast(words, tf.int64), sent)

    def element_bytes(self, dtype: tf.DType) -> int:
        """The bytes that each element of a sum has on its way."""
        return dtype.size

    def _summed(self, values: tf.Tensor, riders: int = 0) -> Sent:
        given = self.element_bytes(values.dtype) * (tf.size(values, tf.int64) + riders)
        return Sent(given, 2 * (self.size - 1) * given // self.size)

    @abc.abstractmethod
    def all_gather(self, payload: tf.Tensor) -> tf.Tensor:
        """Gathers int32 vectors of one length, as rows in the order of the replicas."""

    def all_gather_padded(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers int32 vectors as padded rows; and how many words each replica gave for it."""
        return gather_padded(payload, self.all_gather, self.ahead)

    @abc.abstractmethod
    def all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        """The sum of vectors of one length and dtype."""

    def all_reduce_with_rider(self, values: tf.Tensor, rider: tf.Tensor) -> tf.Tensor:
        """The sum of the replicas' vectors, followed by the sum of their riders."""
        *first, last = _pieces(values)  # only the last piece is copied to have the rider behind it
        sums = [self.all_reduce(piece) for piece in first]
        sums.append(self.all_reduce(tf.concat([last, rider], 0)))
        return sums[0] if len(sums) == 1 else tf.concat(sums, 0)

    @abc.abstractmethod
    def broadcast(self, payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
        """The int32 vector of the replica whose rank is `root`."""


def dense_ring_bytes(size: int, payload_bytes: float) -> float:
    """Bytes that a ring all-reduce of `payload_bytes` makes each of `size` replicas send."""
    return 2 * (size - 1) / size * payload_bytes


def measures_per_step(
    size: int, payload_bytes: float, sent_bytes: float, dense_bytes: float
) -> dict[str, float]:
    """What is logged of the bytes that one of `size` replicas exchanges in a step."""
    ring_bytes = dense_ring_bytes(size, dense_bytes)
    return {
        "payload_bytes": payload_bytes,
        "sent_bytes": sent_bytes,
        "dense_bytes": dense_bytes,
        "compression_ratio": dense_bytes / payload_bytes if payload_bytes else float("nan"),
        "wire_ratio": ring_bytes / sent_bytes if sent_bytes else float("nan"),
    }


class CollectiveCommunicator(Communicator):
    """TensorFlow's collectives, launched straight from one replica, in a graph or eagerly."""

    def __init__(self, launcher: Any, size: int, rank: tf.Tensor | int) -> None:
        super().__init__(size, rank)
        self._launcher = launcher

    def all_gather(self, payload: tf.Tensor) -> tf.Tensor:
        """Gathers int32 vectors of one length, as rows in the order of the replicas."""
        return tf_private.launch_all_gather(self._launcher, payload[tf.newaxis])

    def all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        """The sum of vectors of one length and dtype; long ones are summed piece by piece."""
        pieces = [tf_private.launch_all_reduce(self._launcher, piece) for piece in _pieces(values)]
        return pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)

    def broadcast(self, payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
        """The int32 vector of the replica whose rank is `root`."""
        return tf_private.launch_broadcast(self._launcher, payload, tf.equal(root, self.rank))


def _pieces(values: tf.Tensor) -> list[tf.Tensor]:
    """Parts of a vector, if it is long, and its length is known."""
    elements = values.shape.num_elements() or 0
    most = _PIECE_BYTES // values.dtype.size
    if elements <= most:
        return [values]
    return [values[start : start + most] for start in range(0, elements, most)]


class ReplicaContextCommunicator(Communicator):
    """The public `tf.distribute.ReplicaContext`: any strategy, at the cost of more collectives.

    Eager execution runs the replicas of a process one after another, so there each must hand over
    to the next, which only this one does.
    """

    def __init__(self, context: tf.distribute.ReplicaContext) -> None:
        super().__init__(context.num_replicas_in_sync, context.replica_id_in_sync_group)
        self._context = context

    def all_gather(self, payload: tf.Tensor) -> tf.Tensor:
        """Gathers int32 vectors of one length, as rows in the order of the replicas."""
        return self._context.all_gather(payload[tf.newaxis], axis=0)

    def all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        """The sum of vectors of one length and dtype."""
        return self._context.all_reduce(tf.distribute.ReduceOp.SUM, values)

    def broadcast(self, payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
        """The int32 vector of the replica whose rank is `root`: a sum, as there is no broadcast."""
        only_of_root = tf.where(tf.equal(root, self.rank), payload, tf.zeros_like(payload))
        return self._context.all_reduce(tf.distribute.ReduceOp.SUM, only_of_root)


def converse(
    conversation: Generator[Request, tf.Tensor, Result], communicator: Communicator
) -> tuple[Result, Sent]:
    """Runs one replica's side of an exchange, answering each of its requests."""
    answer: Any = None
    sent = Sent.nothing()
    while True:
        try:
            request = conversation.send(answer)
        except StopIteration as end:
            return end.value, sent
        answer, more = communicator.answer(request)
        sent = sent.plus(more)
