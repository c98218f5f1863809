"""Several replicas of an exchange in one process, in step with each other."""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import tensorflow as tf

from tf_gradcomp.compressors.requests import AllReduce, Request, WithRider, given
from tf_gradcomp.groups.communicator import Communicator, Sent

Result = TypeVar("Result")


class InLockstep(NamedTuple, Generic[Result]):
    """What a conversation returned for one of the replicas, and what that replica sent.

    Attributes:
        result: What the conversation returned.
        sent: Bytes, counted as if a network were between the replicas.
        given: What the replica gave, in this order: payloads, and vectors to be summed.
    """

    result: Result
    sent: Sent
    given: list[tf.Tensor]


class _Meeting(Communicator):
    """Answers what all replicas ask for at one point of a conversation, once for all of them."""

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(len(requests), 0)
        if len({type(request) for request in requests}) != 1:
            raise RuntimeError(f"Replicas of one exchange ask for different things: {requests}.")
        self._given = [_all_given(request) for request in requests]

    def all_gather(self, payload: tf.Tensor) -> tf.Tensor:
        """Gathers int32 vectors of one length, as rows in the order of the replicas."""
        return self._rows

    def all_gather_padded(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers int32 vectors as padded rows; and how many words each replica gave for it."""
        return self._rows, tf.shape(self._rows)[1] + 1  # with the length

    def all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        """The sum of vectors of one length and dtype."""
        return self._total

    def all_reduce_with_rider(self, values: tf.Tensor, rider: tf.Tensor) -> tf.Tensor:
        """The sum of the replicas' vectors, followed by the sum of their riders."""
        return self._total

    def broadcast(self, payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
        """The int32 vector of the replica whose rank is `root`."""
        return tf.gather(self._rows, root)

    @functools.cached_property
    def _rows(self) -> tf.Tensor:
        longest = tf.reduce_max([tf.size(words) for words in self._given])
        return tf.stack([tf.pad(words, [[0, longest - tf.size(words)]]) for words in self._given])

    @functools.cached_property
    def _total(self) -> tf.Tensor:
        return functools.reduce(tf.add, self._given)


def _all_given(request: Request) -> tf.Tensor:
    """What a replica gives, with its rider in front of a payload or behind a vector."""
    if not isinstance(request, WithRider):
        return given(request)
    parts = [given(request), request.rider]
    return tf.concat(parts if isinstance(request.request, AllReduce) else parts[::-1], 0)


def in_lockstep(talks: Sequence[Generator[Request, Any, Result]]) -> list[InLockstep[Result]]:
    """Runs the conversations of all replicas together: one request of each is answered at a time.

    Args:
        talks: One conversation for each replica, in the order of their ranks.
    """
    answers: list[Any] = [None for _ in talks]
    all_given: list[list[tf.Tensor]] = [[] for _ in talks]
    sent = [Sent.nothing() for _ in talks]
    while True:
        requests, ends = [], []
        for talk, answer in zip(talks, answers, strict=True):
            try:
                requests.append(talk.send(answer))
            except StopIteration as end:
                ends.append(end.value)
        if ends and requests:
            raise RuntimeError("Some replicas of an exchange still talk while others are done.")
        if ends:
            return [InLockstep(*of_one) for of_one in zip(ends, sent, all_given, strict=True)]
        meeting = _Meeting(requests)
        for i, request in enumerate(requests):
            all_given[i].append(given(request))
            answers[i], more = meeting.answer(request)
            sent[i] = sent[i].plus(more)
