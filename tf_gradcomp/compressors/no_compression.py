"""The dense baseline: gradients travel as float32, through the same exchange as all methods."""

from __future__ import annotations

from collections.abc import Generator

import tensorflow as tf

from tf_gradcomp.compressors.aggregation import sum_as
from tf_gradcomp.compressors.base import Compressor, Reduced, StateSpec, StepInputs
from tf_gradcomp.compressors.requests import AllReduce
from tf_gradcomp.policy import GradientSpec


class NoCompression(Compressor):
    """Sums gradients uncompressed, as float32, by all-reduces of up to 32 MiB.

    Use it as the baseline for comparisons. Everything else is as with other methods: for example,
    all replicas skip a step if one replica's gradient is not finite. Nothing is selected or
    rounded, so there is no residual, and the gradients of a skipped step are dropped. The slices of
    an embedding's gradient are gathered, as TensorFlow does without compression.
    """

    name = "no_compression"
    has_gpu_kernels = True  # TensorFlow's own
    slices_dtype = tf.float32  # they are gathered

    def state(self, spec: GradientSpec) -> dict[str, StateSpec]:
        """Returns nothing: this method keeps no state."""
        return {}

    def reduce(self, inputs: StepInputs) -> Generator[AllReduce, tf.Tensor, Reduced]:
        """Sums all gradients, fused into one vector."""
        return (yield from sum_as(tf.float32, inputs))
