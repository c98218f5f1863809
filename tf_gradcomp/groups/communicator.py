"""Communicators, which answer a replica's requests, and their form for TensorFlow's strategies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp.compressors.requests import AllGather, AllReduce, Broadcast, Request
from tf_gradcomp.groups.metadata import Metadata
from tf_gradcomp.private import tensorflow as tf_private

_MOST_AHEAD = 4096  # words; for longer payloads, padding costs more than it saves
_PIECE_BYTES = 2**25  # summed at a time; larger buffers are mapped again in each step, at a cost


class Sent(NamedTuple):
    """Bytes that one replica sent; int64 scalars."""

    # Bytes of its own payload; for a broadcast, the mean over the possible roots.
    payload_bytes: tf.Tensor
    # Bytes that the collectives made it send, including data that it forwarded for others.
    sent_bytes: tf.Tensor

    @classmethod
    def nothing(cls) -> Sent:
        """No bytes."""
        return cls(tf.constant(0, tf.int64), tf.constant(0, tf.int64))

    def plus(self, addend: Sent) -> Sent:
        """The sum of both."""
        return Sent(self.payload_bytes + addend.payload_bytes, self.sent_bytes + addend.sent_bytes)


class PrefixSize:
    """Number of payload words that each replica sends along with its length.

    A plain object, so that checkpoints do not hold it.

    Attributes:
        words: int64, for each local replica; equal on all replicas.
    """

    def __init__(self) -> None:
        self.words = tf.Variable(
            tf.constant(0, tf.int64),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )


class Communicator:
    """Carries the data that one replica sends in one step.

    A subclass provides the collectives `all_gather`, `all_reduce` and `broadcast`.

    Attributes:
        size: The number of replicas of the job.
        rank: This replica's number among them: int32 scalar, or a number.
        local_replica: This replica's number among the replicas of its process.
        ahead: This replica's variable of `PrefixSize`, which `all_gather_padded` sets for the next
            step. None if the process has several replicas, which would wait for each other in a
            branch.
        label: Distinguishes this exchange's collectives from others, if collectives have names.
        on_event: Called with the tensors of a request when its collective begins, and with the
            answer when the collective ends; None disables counting.
        all_gather: Takes an int32 [1, words] row of equal length from each replica, and returns
            all rows in the order of the replicas.
        all_reduce: Returns the sum of vectors of one length and dtype.
        broadcast: Takes an int32 vector from each replica and the rank of one replica, and returns
            the vector of that replica.
    """

    all_gather: Callable[[tf.Tensor], tf.Tensor]
    all_reduce: Callable[[tf.Tensor], tf.Tensor]
    broadcast: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

    def __init__(self, size: int, rank: tf.Tensor | int, local_replica: int = 0) -> None:
        self.size = size
        self.rank = rank
        self.local_replica = local_replica
        self.ahead: tf.Variable | None = None
        self.label = ""
        self.on_event: Callable[[Sequence[tf.Tensor]], None] | None = None

    def meet(self, requests: Sequence[Request]) -> None:
        """Takes the requests that all replicas of this process make at one point of a step.

        A process that runs several replicas in lockstep needs the requests of all replicas before
        it can answer any.
        """
        if len(requests) > 1:
            raise RuntimeError(f"{type(self).__name__} communicates for one replica at a time.")

    def answer(self, request: Request) -> tuple[Any, Sent]:
        """Answers a compressor's request, and counts the sent bytes."""
        if isinstance(request, AllReduce):
            elements = tf.size(request.values, tf.int64)
            if request.metadata is not None:
                elements += request.metadata.shape.num_elements()
            local_bytes = self.element_bytes(request.values.dtype) * elements
            return self.sum(request), Sent(
                local_bytes, 2 * (self.size - 1) * local_bytes // self.size
            )
        words = tf.size(request.payload)
        payload_bytes = 4 * tf.cast(words, tf.int64)
        if isinstance(request, Broadcast):
            # All replicas but one forward the broadcast vector.
            sent = Sent(payload_bytes // self.size, (self.size - 1) * payload_bytes // self.size)
            return self.broadcast(request.payload, request.root), sent
        if request.same_length:
            rows, gathered = self.all_gather(request.payload[tf.newaxis]), words
        else:
            rows, gathered = self.all_gather_padded(request.payload)
        # In a ring, a replica forwards all rows but one.
        sent_bytes = 4 * (self.size - 1) * tf.cast(gathered, tf.int64)
        return rows, Sent(payload_bytes, sent_bytes)

    def element_bytes(self, dtype: tf.DType) -> int:
        """Returns the bytes of each element of a sum in transit."""
        return dtype.size

    def sum(self, request: AllReduce) -> tf.Tensor:
        """Returns the sum of the replicas' vectors, followed by the sum of their metadata.

        Long vectors are summed in pieces of 32 MiB, which are joined in their order.
        """
        pieces = _pieces(request.values)
        if request.metadata is not None:  # copies only the last piece
            pieces[-1] = tf.concat([pieces[-1], request.metadata], 0)
        sums = list(map(self.all_reduce, pieces))
        return sums[0] if len(sums) == 1 else tf.concat(sums, 0)

    def all_gather_padded(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers a row from each replica, padded with zeros to the length of the longest.

        The lengths travel with the number of words that sufficed in earlier steps. If these words
        are enough again, the gather needs no second collective. For a small model, the latency of
        this collective would be most of the waiting time.

        Args:
            payload: int32 [words] of this replica.

        Returns:
            int32 [replicas, longest], and the number of words that each replica contributed.
        """
        words = tf.size(payload)[tf.newaxis]
        if self.ahead is None:
            longest = tf.reduce_max(self.all_gather(words[tf.newaxis]))
            return self.all_gather(_padded(payload, longest)), longest + 1
        room = tf.cast(self.ahead.read_value(), tf.int32)
        # Each replica's row of `first`: the length of its payload, then the payload's first words.
        first = self.all_gather(tf.concat([words[tf.newaxis], _padded(payload[:room], room)], 1))
        longest = tf.reduce_max(first[:, 0])
        second_length = next_room(self.ahead, room, longest)
        again = functools.partial(self.all_gather, _padded(payload[:second_length], second_length))
        rows = tf.cond(longest <= room, lambda: first[:, 1 : longest + 1], again)
        return rows, 1 + room + second_length


def next_room(ahead: tf.Variable, room: tf.Tensor, longest: tf.Tensor) -> tf.Tensor:
    """Sets the words for the next step; returns the words of this step's second collective."""
    # Lengths vary, and words that do not fit are sent again: zeros are cheaper.
    enough = tf.maximum(longest + longest // 8, room - room // 16)
    ahead.assign(tf.cast(tf.where(enough > _MOST_AHEAD, 0, enough), tf.int64))
    return tf.where(longest <= room, 0, longest)


def _padded(payload: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
    """Returns a payload as a row of `words` words, padded or cut."""
    return tf.pad(payload, [[0, words - tf.size(payload)]])[tf.newaxis]


def _pieces(values: tf.Tensor) -> list[tf.Tensor]:
    """Returns parts of a vector if the vector is long and its length is known."""
    elements = values.shape.num_elements() or 0
    most = _PIECE_BYTES // values.dtype.size
    if elements <= most:
        return [values]
    return [values[start : start + most] for start in range(0, elements, most)]


def dense_ring_bytes(size: int, payload_bytes: float) -> float:
    """Bytes that each of `size` replicas sends in a ring all-reduce of `payload_bytes`."""
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
        "fewer_bytes": ring_bytes / sent_bytes if sent_bytes else float("nan"),
    }


class CollectiveCommunicator(Communicator):
    """TensorFlow's collectives, launched directly from one replica, in a graph or eagerly."""

    def __init__(
        self, launcher: Any, size: int, rank: tf.Tensor | int, local_replica: int = 0
    ) -> None:
        super().__init__(size, rank, local_replica)
        self._launcher = launcher
        self.all_gather = tf_private.all_gather_of(launcher)
        self.all_reduce = tf_private.all_reduce_of(launcher)

    def broadcast(self, payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
        """Returns the int32 vector of the replica whose rank is `root`."""
        return tf_private.launch_broadcast(self._launcher, payload, tf.equal(root, self.rank))


class ReplicaContextCommunicator(Communicator):
    """The public `tf.distribute.ReplicaContext`: any strategy, at the cost of more collectives.

    Eager execution runs the replicas of a process one after another, so each replica must hand over
    to the next. Only this communicator does.
    """

    def __init__(self, context: tf.distribute.ReplicaContext) -> None:
        super().__init__(
            context.num_replicas_in_sync,
            context.replica_id_in_sync_group,
            tf_private.local_replica_id(context),
        )
        self.all_gather = functools.partial(context.all_gather, axis=0)
        self.all_reduce = functools.partial(context.all_reduce, tf.distribute.ReduceOp.SUM)

    def broadcast(self, payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
        """Returns the int32 vector of one replica, as a sum, because there is no broadcast."""
        return self.all_reduce(tf.where(tf.equal(root, self.rank), payload, tf.zeros_like(payload)))


def _unchanged(result: Any) -> Any:
    return result


@dataclasses.dataclass
class RequestStream:
    """The requests of one replica in a step.

    Attributes:
        requests: A generator, which yields requests, receives their answers, and returns a result.
        metadata: What travels with the first gather or sum, if anything.
        end: Takes the generator's result, and returns what the replica gets.
    """

    requests: Generator[Request, Any, Any]
    metadata: Metadata | None = None
    end: Callable[[Any], Any] = _unchanged


def communicate(
    streams: Sequence[RequestStream], communicators: Sequence[Communicator]
) -> tuple[list[Any], list[Sent]]:
    """Answers the requests of this process's replicas: usually one, several in lockstep.

    Returns the result of each replica, and the bytes that each sent.

    Raises:
        TypeError: If a generator yields something that is not a request.
        RuntimeError: If some replicas have ended, and others still communicate.
    """
    answers: list[Any] = [None] * len(streams)
    sent = [Sent.nothing() for _ in streams]
    while True:
        requests, results = [], []
        for stream, answer in zip(streams, answers, strict=True):
            try:
                requests.append(_checked(stream.requests.send(answer)))
            except StopIteration as end:
                results.append(stream.end(end.value))
        if requests and results:
            raise RuntimeError("Some replicas still communicate after other replicas have ended.")
        if results:
            return results, sent
        for i, stream in enumerate(streams):
            if stream.metadata:
                requests[i] = stream.metadata.attach(requests[i])
        communicators[0].meet(requests)
        for i, (request, communicator) in enumerate(zip(requests, communicators, strict=True)):
            if communicator.on_event:
                communicator.on_event([request.sent])
            answers[i], answer_sent = communicator.answer(request)
            if communicator.on_event:
                communicator.on_event([answers[i]])
            sent[i] = sent[i].plus(answer_sent)
        for i, stream in enumerate(streams):
            if stream.metadata:
                answers[i] = stream.metadata.detach(answers[i])


def _checked(request: Any) -> Request:
    if not isinstance(request, (AllGather, AllReduce, Broadcast)):
        raise TypeError(
            "A method must yield an AllGather, AllReduce or Broadcast of compressors/requests.py; "
            f"received {request!r}."
        )
    return request
