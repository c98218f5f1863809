"""Communicators, which answer a replica's requests, and their form for TensorFlow's strategies."""

from __future__ import annotations

import abc
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tf_gradcomp import tf_private
from tf_gradcomp.compressors.requests import AllReduce, Broadcast, Request
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

    def meet(self, requests: Sequence[Request]) -> None:
        """Takes the requests that all replicas of this process make at one point of a step.

        A process that runs several replicas in lockstep needs all their requests to answer one.
        """
        if len(requests) > 1:
            raise RuntimeError(f"{type(self).__name__} reaches others for one replica at a time.")

    def answer(self, request: Request) -> tuple[Any, Sent]:
        """Does what a compressor asks for, and counts the bytes that this sends."""
        if isinstance(request, AllReduce):
            total = self.sum(request)
            elements = tf.size(request.values, tf.int64)
            if request.metadata is not None:
                elements += request.metadata.shape.num_elements()
            given = self.element_bytes(request.values.dtype) * elements
            return total, Sent(given, 2 * (self.size - 1) * given // self.size)
        words = tf.size(request.payload)
        payload_bytes = 4 * tf.cast(words, tf.int64)
        if isinstance(request, Broadcast):
            # All replicas but one pass it on.
            sent = Sent(payload_bytes // self.size, (self.size - 1) * payload_bytes // self.size)
            return self.broadcast(request.payload, request.root), sent
        if request.same_length:
            rows, gathered = self.all_gather(request.payload), words
        else:
            rows, gathered = self.all_gather_padded(request.payload)
        # A ring passes on all rows but one.
        sent_bytes = 4 * (self.size - 1) * tf.cast(gathered, tf.int64)
        return rows, Sent(payload_bytes, sent_bytes)

    def element_bytes(self, dtype: tf.DType) -> int:
        """The bytes that each element of a sum has on its way."""
        return dtype.size

    @abc.abstractmethod
    def all_gather(self, payload: tf.Tensor) -> tf.Tensor:
        """Gathers int32 vectors of one length, as rows in the order of the replicas."""

    def all_gather_padded(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers int32 vectors as padded rows; and how many words each replica gave for it."""
        return gather_padded(payload, self.all_gather, self.ahead)

    @abc.abstractmethod
    def all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        """The sum of vectors of one length and dtype."""

    def sum(self, request: AllReduce) -> tf.Tensor:
        """Returns the sum of the replicas' vectors, followed by the sum of their metadata."""
        pieces = _pieces(request.values)
        if request.metadata is not None:  # only the last piece is copied for it
            pieces[-1] = tf.concat([pieces[-1], request.metadata], 0)
        sums = [self.all_reduce(piece) for piece in pieces]
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
    """Returns the logged measures of the bytes that one of `size` replicas exchanges per step."""
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
        """Returns the sum of vectors of one length and dtype."""
        return tf_private.launch_all_reduce(self._launcher, values)

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


def communicate(
    conversations: Sequence[Generator[Request, Any, Result]],
    communicators: Sequence[Communicator],
) -> tuple[list[Result], list[Sent]]:
    """Runs the conversations of this process's replicas: mostly one, in lockstep several.

    Args:
        conversations: One for each replica; each yields requests and is sent their answers.
        communicators: One for each replica.

    Returns:
        The result of each conversation; and what each replica sent.
    """
    answers: list[Any] = [None] * len(conversations)
    sent = [Sent.nothing() for _ in conversations]
    while True:
        requests, results = [], []
        for conversation, answer in zip(conversations, answers, strict=True):
            try:
                requests.append(conversation.send(answer))
            except StopIteration as end:
                results.append(end.value)
        if requests and results:
            raise RuntimeError("Some replicas of an exchange still talk while others are done.")
        if results:
            return results, sent
        communicators[0].meet(requests)
        for i, (request, communicator) in enumerate(zip(requests, communicators, strict=True)):
            answers[i], more = communicator.answer(request)
            sent[i] = sent[i].plus(more)
