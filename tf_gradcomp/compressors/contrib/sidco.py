"""SIDCo: the largest entries are sent, above a threshold that is estimated without a sort."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import assign_state, read_state, sum_payloads
from tf_gradcomp.compressors.base import Compressor, Reduced, StepInputs
from tf_gradcomp.compressors.requests import AllGather
from tf_gradcomp.compressors.settings import Valid, is_share
from tf_gradcomp.ops.payload import SIDCO

_DENSITY = Valid("a number above 0 and below 1", lambda share: is_share(share) and share < 1)


class SIDCo(Compressor):
    """Sends the entries above an estimated threshold.

    The magnitudes of residual plus gradient are fitted by a generalized Pareto distribution, whose
    quantile is the threshold. Each further stage fits the distribution again, to the magnitudes
    above the last threshold. Residuals lack the entries that earlier steps have sent, which no
    distribution describes. So the last threshold is corrected three times, by the number of entries
    above it. Entries above the threshold are sent, as a 32-bit index and a float32 value each; the
    rest stays in the residual. The number of sent entries differs by step and replica: about
    `density` of the entries, and at most twice as many, or 64. A variable with fewer than 1024
    elements sends its largest entries. Payloads are gathered, so the bytes that each replica
    receives grow with the number of replicas.

    Use it to compare its thresholds with the exact choice of TopK, which is faster.

    Args:
        density: The target share of sent entries, above 0 and below 1.
        **warmup: `warmup_steps` and `warmup`, as for every method: see `Compressor`.

    Raises:
        ValueError: If `density` is out of range.

    Reference:
        Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for
        Distributed Training Systems", MLSys 2021, https://arxiv.org/abs/2101.10761
    """

    name = "sidco"
    helped_by_precondition = True

    def __init__(self, density: float = 0.001, **warmup: Any) -> None:
        super().__init__(**warmup)
        self.density = float(_DENSITY.checked("SIDCo: density", density))

    def delayed(self, inputs: StepInputs) -> tf.Tensor:
        """True for each variable of several elements: bool [tensors]."""
        return tf.constant([spec.elements > 1 for spec in inputs.specs], tf.bool)

    def reduce(self, inputs: StepInputs) -> Generator[AllGather, tf.Tensor, Reduced]:
        """Gathers and sums the payloads of all replicas."""
        specs = inputs.specs
        sizes = [spec.elements for spec in specs]
        header: dict[str, Any] = {
            "settings": None,
            "num_tensors": len(specs),
            "method": SIDCO,
            "fingerprint": self.fingerprint(specs),
            "same_length": False,
        }

        def encode() -> tuple[tf.Tensor, tf.Tensor]:
            residuals = inputs.residuals
            totals = [
                read_state(residual, spec) + tf.cast(gradient, tf.float32)
                for residual, gradient, spec in zip(residuals, inputs.gradients, specs, strict=True)
            ]
            flat = [tf.reshape(total, [-1]) for total in totals]
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(total)) for total in flat])

            def packed() -> tf.Tensor:
                indices = [ops.sidco_choose(total, self.density) for total in flat]
                for residual, total, sent, spec in zip(
                    residuals, flat, indices, specs, strict=True
                ):
                    zeros = tf.zeros_like(sent, tf.float32)
                    remaining = tf.tensor_scatter_nd_update(total, sent[:, None], zeros)
                    assign_state(residual, remaining, spec)
                values = [tf.gather(*pair) for pair in zip(flat, indices, strict=True)]
                counts = tf.stack([tf.size(tensor_indices) for tensor_indices in indices])
                return tf.concat([counts, *indices, tf.bitcast(tf.concat(values, 0), tf.int32)], 0)

            body = tf.cond(finite, packed, lambda: tf.zeros([len(specs)], tf.int32))
            tensor_bytes = tf.where(finite, 4 + 8 * tf.cast(body[: len(specs)], tf.int64), 0)
            return ops.payload_write(body, inputs.step, finite, **header), tensor_bytes

        def decode(
            payloads: tf.Tensor, step: tf.Tensor, *, shapes: Sequence[Sequence[int]]
        ) -> tuple[list[tf.Tensor], tf.Tensor]:
            bodies, finite, lengths = ops.payload_read(payloads, step, **header)
            total = tf.zeros([sum(sizes)])
            for replica in range(inputs.size):
                indices, values = _entries(bodies[replica, : lengths[replica]], sizes)
                total = tf.tensor_scatter_nd_add(total, indices[:, None], values)
            fits = tf.logical_and(finite, tf.reduce_all(tf.math.is_finite(total)))
            total = tf.where(fits, total, 0.0)
            parts = zip(tf.split(total, sizes), shapes, strict=True)
            return [tf.reshape(*pair) for pair in parts], fits

        def put_back(residuals: Sequence[tf.Tensor], payload: tf.Tensor) -> None:
            bodies, *_ = ops.payload_read(payload[tf.newaxis], inputs.step, **header)
            indices, values = _entries(bodies[0], sizes)
            sent = tf.split(tf.scatter_nd(indices[:, None], values, [sum(sizes)]), sizes)
            for residual, values_sent, spec in zip(residuals, sent, specs, strict=True):
                assign_state(
                    residual, read_state(residual, spec) + tf.reshape(values_sent, spec.shape), spec
                )

        payload, tensor_bytes = encode()
        payloads = yield AllGather(payload)
        return sum_payloads(inputs, payload, payloads, tensor_bytes, decode, put_back)


def _entries(body: tf.Tensor, sizes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the indices among all tensors' elements, int64, and the values.

    A body without words has no entries: the replica was not finite.
    """
    body = tf.cond(tf.size(body) > 0, lambda: body, lambda: tf.zeros([len(sizes)], tf.int32))
    counts, words_of_entries = body[: len(sizes)], body[len(sizes) :]
    indices, words = tf.split(words_of_entries, 2)
    sizes = tf.constant(sizes, tf.int64)
    indices = tf.cast(indices, tf.int64)
    with tf.control_dependencies(
        [
            tf.debugging.assert_non_negative(counts),
            tf.debugging.assert_equal(tf.reduce_sum(counts), tf.size(indices)),
        ]
    ):
        starts = tf.repeat(tf.cumsum(sizes, exclusive=True), counts)
        ends = tf.repeat(sizes, counts)
    with tf.control_dependencies(
        [tf.debugging.assert_non_negative(indices), tf.debugging.assert_less(indices, ends)]
    ):
        return starts + indices, tf.bitcast(words, tf.float32)
