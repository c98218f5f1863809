"""What a replica can ask of the others, and how TensorFlow's strategies answer."""

from __future__ import annotations

import abc
from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

from tf_gradcomp import _private

Result = TypeVar("Result")


class AllGather(NamedTuple):
    """A compressor's wish: to send `payload` to all replicas and to have theirs.

    The answer is int32 [sum of lengths]: all payloads, in the order of the replicas' ids.
    """

    payload: tf.Tensor  # int32 [words]; the number of words may differ between replicas


class AllReduce(NamedTuple):
    """A compressor's wish: to have the sum of what all replicas give.

    The answer has the shape and dtype of `values`, and the same bits on all replicas.
    """

    values: tf.Tensor  # [n], float32, float16 or bfloat16; n is equal on all replicas, not 0


Wish: TypeAlias = AllGather | AllReduce


class Communicator(abc.ABC):
    """Carries what one replica sends in one step, and counts it.

    Attributes:
        size: The number of replicas of the job.
        payload_bytes: int64 scalar, what the replica gave to be sent.
        sent_bytes: int64 scalar, what a ring made it send, with what it passed on for others.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.payload_bytes = tf.constant(0, tf.int64)
        self.sent_bytes = tf.constant(0, tf.int64)

    def answer(self, wish: Wish) -> tf.Tensor:
        """Does what a compressor asks for."""
        if isinstance(wish, AllGather):
            return self.all_gather(wish.payload)
        return self.all_reduce(wish.values)

    def all_gather(self, payload: tf.Tensor) -> tf.Tensor:
        """Gathers int32 vectors of any lengths: first the lengths, then the vectors, padded."""
        gathered, lengths = self._all_gather(payload)
        self.payload_bytes += 4 * tf.size(payload, tf.int64)
        longest = tf.reduce_max(tf.cast(lengths, tf.int64))
        # A ring passes on all vectors but one; and so with the lengths, one word each.
        self.sent_bytes += (self.size - 1) * 4 * (longest + 1)
        return gathered

    def all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        """Sums vectors of one length and dtype."""
        total = self._all_reduce(values)
        given = values.dtype.size * tf.size(values, tf.int64)
        self.payload_bytes += given
        self.sent_bytes += 2 * (self.size - 1) * given // self.size
        return total

    @abc.abstractmethod
    def _all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        """The sum over the replicas."""

    @abc.abstractmethod
    def _all_gather(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """All vectors, one behind the other, and their lengths."""


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

    def __init__(self, launcher: Any, size: int) -> None:
        super().__init__(size)
        self._launcher = launcher

    def _all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        return _private.launch_all_reduce(self._launcher, values)

    def _all_gather(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        words = tf.size(payload)
        lengths = _private.launch_all_gather(self._launcher, words[tf.newaxis])
        longest = tf.reduce_max(lengths)
        padded = tf.pad(payload, [[0, longest - words]])
        rows = _private.launch_all_gather(self._launcher, padded[tf.newaxis])
        # Cuts the padding off; tf.boolean_mask takes many times as long.
        vectors = [rows[i, : lengths[i]] for i in range(self.size)]
        return tf.concat(vectors, 0), lengths


class ReplicaContextCommunicator(Communicator):
    """The public `tf.distribute.ReplicaContext`: any strategy, at the cost of more collectives.

    Eager execution runs the replicas of a process one after another, so there each must hand over
    to the next, which only this one does.
    """

    def __init__(self, context: tf.distribute.ReplicaContext) -> None:
        super().__init__(context.num_replicas_in_sync)
        self._context = context

    def _all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        return self._context.all_reduce(tf.distribute.ReduceOp.SUM, values)

    def _all_gather(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        lengths = self._context.all_gather(tf.size(payload)[tf.newaxis], axis=0)
        return self._context.all_gather(payload, axis=0), lengths


def replica_communicator() -> Communicator:
    """The communicator of the current replica."""
    context = tf.distribute.get_replica_context()
    strategy = context.strategy
    alone = len(strategy.extended.worker_devices) == 1
    if _private.is_collective(strategy) and (alone or not tf.executing_eagerly()):
        launcher = _private.launcher(strategy, _private.local_replica_id(context))
        return CollectiveCommunicator(launcher, context.num_replicas_in_sync)
    return ReplicaContextCommunicator(context)


def converse(
    conversation: Generator[Wish, tf.Tensor, Result], communicator: Communicator
) -> Result:
    """Runs one replica's side of an exchange, answering each of its wishes."""
    answer: Any = None
    while True:
        try:
            wish = conversation.send(answer)
        except StopIteration as end:
            return end.value
        answer = communicator.answer(wish)
