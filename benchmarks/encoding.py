"""Times a learner's computation in a compiled step, before and after its last request."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
from machine import processor
from simulated import slug

from tf_gradcomp import compressors
from tf_gradcomp.advice.codec_speed import CodecSpeed
from tf_gradcomp.compressors import StepInputs
from tf_gradcomp.exchange.replica import ReplicaStep
from tf_gradcomp.exchange.state import handles, new_state
from tf_gradcomp.policy import DENSE, GradientSpec

SIDE = 512  # of the square matrix that is compressed
WARM_UP, REPEATS = 10, 31  # from an empty residual ten times as much is sent


@dataclasses.dataclass(frozen=True)
class Encoding:
    """The time of a method on one matrix, with gradients as in `kernels.py`.

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
        """Returns the medians over steps, in milliseconds of a learner.

        The learner is answered at once, as if all learners had sent the same.
        """
        tf.random.set_seed(self.seed)
        method = compressors.get(self.compressor)
        specs = [GradientSpec("layer/kernel", (SIDE, SIDE), "float32", DENSE)]
        kept = new_state(method, specs)
        state = handles(kept)
        mean = tf.random.normal([SIDE, SIDE], stddev=0.02)
        gradient, step = tf.Variable(mean), tf.Variable(0, dtype=tf.int64)

        def draw() -> None:
            gradient.assign(mean + tf.random.normal([SIDE, SIDE], stddev=0.3))
            step.assign_add(1)

        def next_step() -> ReplicaStep:
            given, number = [gradient.read_value()], step.read_value()
            finite = tf.constant(True)
            inputs = StepInputs(specs, given, state, number, finite, 0, self.learners)
            return ReplicaStep.of(inputs)

        speed = CodecSpeed(method, next_step, draw)
        speed.run(WARM_UP)
        work = speed.measure(REPEATS)
        return {
            "encode_ms": 1e3 * work.encode,
            "decode_ms": 1e3 * work.decode,
            "elements": SIDE * SIDE,
            "processor": processor(),
        }
