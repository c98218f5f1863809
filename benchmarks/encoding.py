"""Times a learner's computation in a step, before and after it communicates."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Generator
from typing import Any

import tensorflow as tf
from machine import processor
from simulated import slug

from tf_gradcomp import compressors
from tf_gradcomp.compressors import ExchangeInputs
from tf_gradcomp.compressors.protocols import conversation
from tf_gradcomp.exchange.state import handles, new_state
from tf_gradcomp.groups.communicator import communicate
from tf_gradcomp.groups.lockstep import lockstep_communicators
from tf_gradcomp.policy import DENSE, GradientSpec

SIDE = 512  # of the square matrix that is compressed
WARM_UP, REPEATS = 10, 7  # from an empty residual ten times as much is sent


@dataclasses.dataclass(frozen=True)
class Encoding:
    """The processor's time of a method on one matrix, with gradients as in `kernels.py`.

    Attributes:
        compressor: The method, as `gc.compressors.get` takes it.
        learners: The number of learners, whose payloads are decoded.
        seed: Of the gradients.
    """

    compressor: str
    learners: int
    seed: int

    @property
    def name(self) -> str:
        """The name, and the record's."""
        return f"encoding-{self.learners}learners-{slug(self.compressor)}-seed{self.seed}"

    def measure(self) -> dict[str, Any]:
        """Returns the medians over steps, in milliseconds of a mean learner."""
        tf.random.set_seed(self.seed)
        method = compressors.get(self.compressor)
        specs = [GradientSpec("layer/kernel", (SIDE, SIDE), "float32", DENSE)]
        kept = [new_state(method, specs) for _ in range(self.learners)]
        states = [handles(state) for state in kept]
        mean = tf.random.normal([SIDE, SIDE], stddev=0.02)
        steps = []
        for step in range(WARM_UP + REPEATS):
            spent: list[list[float]] = [[] for _ in states]
            talks = []
            for rank, state in enumerate(states):
                gradient = mean + tf.random.normal([SIDE, SIDE], stddev=0.3)
                number, finite = tf.constant(step, tf.int64), tf.constant(True)
                inputs = ExchangeInputs(
                    specs, [gradient], state, number, finite, rank, self.learners
                )
                talks.append(_timed(conversation(method, inputs), spent[rank]))
            communicate(talks, lockstep_communicators(self.learners))
            steps.append(spent)
        timed = steps[WARM_UP:]
        return {
            "encode_ms": statistics.median(_of_learners(step, slice(None, -1)) for step in timed),
            "decode_ms": statistics.median(_of_learners(step, slice(-1, None)) for step in timed),
            "elements": SIDE * SIDE,
            "processor": processor(),
        }


def _timed(talk: Generator[Any, Any, Any], spent: list[float]) -> Generator[Any, Any, Any]:
    """Yields a conversation's requests, and records the processor time between them."""
    answer = None
    while True:
        start = time.process_time()
        try:
            request = talk.send(answer)
        except StopIteration as end:
            spent.append(time.process_time() - start)
            return end.value
        spent.append(time.process_time() - start)
        answer = yield request


def _of_learners(step: list[list[float]], part: slice) -> float:
    return 1e3 * statistics.mean(sum(of_one[part]) for of_one in step)
