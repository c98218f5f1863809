"""How long a method encodes and decodes by itself, and what it would communicate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.advice.cost_model import Asked, Kind, Work
from tf_gradcomp.advice.timing import call_seconds, seconds_of
from tf_gradcomp.compressors.base import Compressor, ExchangeInputs
from tf_gradcomp.distribute.communicator import AllGather, Communicator, Sent, Wish, given

Agree = Callable[[Sequence[float]], Sequence[float]]


class Echo(Communicator):
    """Answers at once, as if all replicas had given the same."""

    def all_gather(self, payload: tf.Tensor) -> tf.Tensor:
        """A row for each replica."""
        return tf.stack([payload] * self.size)

    def all_gather_padded(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """A row for each replica; and words given in all."""
        return self.all_gather(payload), tf.size(payload) + 1  # with the length

    def all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        """What is given."""
        return values

    def broadcast(self, payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
        """What is given."""
        return payload


class CodecSpeed:
    """A replica that exchanges gradients with itself alone.

    Args:
        compressor: The method; its warm-up is left out.
        inputs: Makes its side of the next step, in a graph.
        prepare: Called before each step, when nothing is timed.
    """

    def __init__(
        self,
        compressor: Compressor,
        inputs: Callable[[], ExchangeInputs],
        prepare: Callable[[], Any],
    ) -> None:
        self._compressor = compressor
        self._inputs = inputs
        self._prepare = prepare
        self._kinds: list[Kind] = []
        self._whole = tf.function(self._talk, autograph=False)
        self._first_part = tf.function(self._talk_to_last_wish, autograph=False)

    def run(self, steps: int) -> None:
        """Does some steps."""
        for _ in range(steps):
            self._prepare()
            self._whole()

    def measure(self, repeats: int, agree: Agree = list) -> Work:
        """Medians of some steps.

        Args:
            repeats: How many steps are timed as a whole; as many are timed up to the last wish.
            agree: Given a number for each step, those that hold for all workers.
        """
        self.run(1)  # traces; the first part has to know of the last wish
        self._first_part()
        both, encode, sent = [], [], []
        for _ in range(repeats):
            self._prepare()
            both.append(seconds_of(lambda: sent.append(self._whole()[1])))
            self._prepare()
            encode.append(seconds_of(self._first_part))
        nothing = agree([call_seconds()])[0]
        seconds = statistics.median(agree(both)) - nothing
        encoding = max(0.0, statistics.median(agree(encode)) - nothing)
        payload, *of_wishes = agree(_means(sent))
        asked = [Asked(*wish) for wish in zip(self._kinds, of_wishes, strict=True)]
        return Work(encoding, max(0.0, seconds - encoding), payload, asked)

    def _talk(self) -> tuple[Any, list[Sent]]:
        """All of a step: what comes of it, and bytes for each wish."""
        inputs = self._inputs()
        echo = Echo(inputs.size, inputs.rank)
        talk = self._compressor.conversation(inputs)
        answer: Any = None
        sent: list[Sent] = []
        self._kinds = []
        while True:
            try:
                wish = talk.send(answer)
            except StopIteration as end:
                return end.value.reduced, sent
            self._kinds.append(kind_of(wish))
            answer, more = echo.answer(wish)
            sent.append(more)

    def _talk_to_last_wish(self) -> tf.Tensor:
        inputs = self._inputs()
        echo = Echo(inputs.size, inputs.rank)
        talk = self._compressor.conversation(inputs)
        wish = next(talk)
        for _ in self._kinds[1:]:
            wish = talk.send(echo.answer(wish)[0])
        return given(wish)


def kind_of(wish: Wish) -> Kind:
    """The kind of a wish."""
    same_length = isinstance(wish, AllGather) and wish.same_length
    return Kind(type(wish).__name__, given(wish).dtype.name, same_length)


def _means(steps: Sequence[Sequence[Sent]]) -> list[float]:
    """Bytes of the payload, then those that each wish makes a worker send."""
    count = len(steps)
    payload = sum(float(sent.payload_bytes) for of_step in steps for sent in of_step) / count
    return [
        payload,
        *(
            sum(float(sent.sent_bytes) for sent in of_wish) / count
            for of_wish in zip(*steps, strict=True)
        ),
    ]
