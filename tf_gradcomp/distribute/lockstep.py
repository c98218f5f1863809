"""Several replicas of an exchange in one process, in step with each other."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp.compressors.base import Compressor, Exchanged, ExchangeInputs
from tf_gradcomp.distribute.communicator import AllGather, AllReduce, Communicator, Wish
from tf_gradcomp.policy import GradientSpec


class _Meeting:
    """What all replicas ask for at one point, answered once for all of them."""

    def __init__(self, wishes: Sequence[Wish]) -> None:
        if len({type(wish) for wish in wishes}) != 1:
            raise RuntimeError(f"Replicas of one exchange ask for different things: {wishes}.")
        self._payloads = [wish.payload for wish in wishes if isinstance(wish, AllGather)]
        self._values = [wish.values for wish in wishes if isinstance(wish, AllReduce)]

    @functools.cached_property
    def gathered(self) -> tf.Tensor:
        return tf.concat(self._payloads, 0)

    @functools.cached_property
    def lengths(self) -> tf.Tensor:
        return tf.stack([tf.size(payload) for payload in self._payloads])

    @functools.cached_property
    def total(self) -> tf.Tensor:
        return functools.reduce(tf.add, self._values)


class LockstepCommunicator(Communicator):
    """One of several replicas of this process; counts bytes as if a network were between them.

    Attributes:
        given: What this replica gave, in turn: payloads, and vectors to be summed.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.given: list[tf.Tensor] = []

    def answer_in(self, meeting: _Meeting, wish: Wish) -> tf.Tensor:
        """Answers this replica's wish by what all replicas brought to the meeting."""
        self._meeting = meeting
        self.given.append(wish.payload if isinstance(wish, AllGather) else wish.values)
        return self.answer(wish)

    def _all_gather(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self._meeting.gathered, self._meeting.lengths

    def _all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        return self._meeting.total


def new_residuals(compressor: Compressor, specs: Sequence[GradientSpec]) -> list[tf.Variable]:
    """The residuals that one replica begins with; none if the compressor keeps none."""
    return [
        tf.Variable(tf.zeros(spec.shape), trainable=False)
        for spec in specs
        if compressor.keeps_residuals
    ]


def exchange_in_lockstep(
    compressor: Compressor, inputs: Sequence[ExchangeInputs]
) -> tuple[list[Exchanged], list[LockstepCommunicator]]:
    """One step of all replicas.

    Args:
        compressor: The method, with the same settings for all.
        inputs: Each replica's own.

    Returns:
        What the exchange gives each replica, and what each has communicated.
    """
    communicators = [LockstepCommunicator(len(inputs)) for _ in inputs]
    talks = [compressor.exchange(of_one) for of_one in inputs]
    answers: list[tf.Tensor | None] = [None for _ in inputs]
    ends: list[Exchanged] = []
    while not ends:
        wishes = []
        for talk, answer in zip(talks, answers, strict=True):
            try:
                wishes.append(talk.send(answer))
            except StopIteration as end:
                ends.append(end.value)
        if wishes and ends:
            raise RuntimeError("Some replicas of an exchange still talk while others are done.")
        if wishes:
            meeting = _Meeting(wishes)
            answers = [
                communicator.answer_in(meeting, wish)
                for communicator, wish in zip(communicators, wishes, strict=True)
            ]
    return ends, communicators
