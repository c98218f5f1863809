"""Times a method's encoding and decoding, which is its exchange without the communication."""

from __future__ import annotations

import tensorflow as tf
from workloads import Source

import tf_gradcomp as gc
from tf_gradcomp.advice.codec_speed import CodecSpeed
from tf_gradcomp.compressors import StepInputs
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.replica import ReplicaStep

REPEATS = 11


def stage_seconds(
    strategy: gc.MultiWorkerMirroredStrategy, exchange: GradientExchange, source: Source
) -> dict[str, float]:
    """Returns the median times of `encode`, up to the last request, and of `decode`, after it."""
    state = {
        name: [strategy.experimental_local_results(v)[0].handle for v in variables]
        for name, variables in exchange.state.items()
    }
    step = strategy.experimental_local_results(exchange.step)[0]

    def next_step() -> ReplicaStep:
        return ReplicaStep.of(
            StepInputs(
                exchange.specs,
                [strategy.experimental_local_results(v)[0].read_value() for v in source.values],
                state,
                step.read_value(),
                tf.constant(True),
                strategy.cluster_resolver.task_id,
                strategy.num_replicas_in_sync,
            )
        )

    work = CodecSpeed(exchange.compressor, next_step, source.draw).measure(REPEATS)
    return {"encode": work.encode, "decode": work.decode}
