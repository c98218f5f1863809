"""What several methods share: sums of gathered payloads and of chosen entries, digests, leaders."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.base import Reduced, StepInputs
from tf_gradcomp.compressors.requests import AllReduce, Request
from tf_gradcomp.compressors.settings import Valid, is_number
from tf_gradcomp.ops.chunks import MAX_CHUNK_SIZE
from tf_gradcomp.policy import GradientSpec


def sum_payloads(
    inputs: StepInputs,
    payload: tf.Tensor,
    payloads: tf.Tensor,
    tensor_bytes: tf.Tensor,
    decode: Callable[..., tuple[list[tf.Tensor], tf.Tensor]],
    put_back: Callable[..., Any],
) -> Reduced:
    """Sums the gathered payloads of all replicas.

    The method has taken the packed values out of its residuals before it gathers, and has left the
    residuals as they are if its own values are not finite. If the step is skipped, the packed
    values return to the residuals. They are discarded if only a sum is too large, because the sums
    of all later steps would be too large, too.

    Args:
        inputs: The inputs of the step.
        payload: int32 [length] of this replica.
        payloads: int32 [replicas, longest], of all replicas.
        tensor_bytes: int64 [tensors], the bytes of each tensor in `payload`.
        decode: Takes the payloads, the step and `shapes`, and returns sums and whether all replicas
            are finite.
        put_back: Takes the residuals and this replica's payload, and adds the packed values to the
            residuals; nothing, if the payload is flagged as not finite.
    """
    shapes = [spec.shape for spec in inputs.specs]
    gradients, finite = decode(payloads, inputs.step, shapes=shapes)

    def return_values() -> None:  # `put_back` may return anything
        put_back(inputs.residuals, payload)

    tf.cond(are_taken(inputs, payloads), lambda: None, return_values)
    return Reduced(gradients, tf.logical_and(finite, inputs.finite), tensor_bytes)


def read_state(handle: tf.Tensor, spec: GradientSpec) -> tf.Tensor:
    """Returns the value of a state variable of one gradient, float32 in the shape of `spec`.

    For methods in plain TensorFlow; `handle` is one of `StepInputs.state`.
    """
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    return tf.ensure_shape(value, spec.shape)


def assign_state(handle: tf.Tensor, value: tf.Tensor, spec: GradientSpec) -> None:
    """Writes the value of a state variable of one gradient; `value` may be flat."""
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.reshape(value, spec.shape))


def are_taken(inputs: StepInputs, payloads: tf.Tensor) -> tf.Tensor:
    """True if the packed values are taken out of the residuals for good: bool scalar."""
    return tf.logical_and(ops.payloads_finite(payloads), inputs.finite)


def sum_as(dtype: tf.DType, inputs: StepInputs) -> Generator[AllReduce, tf.Tensor, Reduced]:
    """Casts all gradients to `dtype` and sums them, as one vector.

    A gradient that is not finite makes the sum not finite on all replicas, so no flag is needed.
    """
    sizes = [spec.elements for spec in inputs.specs]
    flat = [tf.reshape(tf.cast(gradient, dtype), [-1]) for gradient in inputs.gradients]
    total = tf.concat(flat, 0)
    if sum(sizes) > 0:
        total = yield AllReduce(total)
    finite = tf.logical_and(inputs.finite, tf.reduce_all(tf.math.is_finite(total)))
    total = tf.cond(finite, lambda: total, lambda: tf.zeros_like(total))
    reduced = [
        tf.reshape(tf.cast(part, tf.float32), spec.shape)
        for part, spec in zip(tf.split(total, sizes), inputs.specs, strict=True)
    ]
    tensor_bytes = tf.constant(np.array(sizes, np.int64) * dtype.size)
    return Reduced(reduced, finite, tensor_bytes)


def zero_if_too_large(total: tf.Tensor, inputs_finite: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Replaces a sum by zeros if the sum is not finite although all its terms are finite.

    The step is then skipped, and the method discards the terms: in the residuals, they would make
    the sums of all later steps too large as well. Returns the sum or zeros, and whether the sum
    fits.
    """
    finite = tf.reduce_all(tf.math.is_finite(total))
    too_large = tf.logical_and(inputs_finite, tf.logical_not(finite))
    safe_total = tf.cond(too_large, lambda: tf.zeros_like(total), lambda: tf.identity(total))
    return safe_total, tf.logical_not(too_large)


OneRequest = TypeVar("OneRequest", bound=Request)


def request_unless_empty(
    vector: tf.Tensor, request: Callable[[tf.Tensor], OneRequest]
) -> Generator[OneRequest, tf.Tensor, tf.Tensor]:
    """Requests the communication of a vector, unless the vector is empty.

    If the graph does not determine the vector's length, because settings change between steps, a
    zero is sent in place of an empty vector.
    """
    length = vector.shape.num_elements()
    if length == 0:
        return vector
    if length is not None:
        return (yield request(vector))
    size = tf.size(vector)
    answer = yield request(tf.pad(vector, [[0, tf.cast(tf.equal(size, 0), tf.int32)]]))
    return answer[:size]


MIXING = np.int64(-7046029254386353131)  # 0x9e3779b97f4a7c15, as in the checksum of payloads


def digest(words: tf.Tensor) -> tf.Tensor:
    """Returns an int64 scalar that changes if any int64 changes or two are swapped."""
    positions = tf.range(1, tf.size(words) + 1, dtype=tf.int64)
    mixed = (words + positions * MIXING) * MIXING
    mixed ^= tf.bitwise.right_shift(mixed, 31)
    return tf.reduce_sum(mixed * MIXING)


def digest_of_floats(values: tf.Tensor) -> tf.Tensor:
    """Returns the `digest` of the bits of float32 numbers."""
    return digest(tf.cast(tf.bitcast(tf.reshape(values, [-1]), tf.int32), tf.int64))


def leader(step: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the leader of a step: each replica leads once in a run of `size` steps.

    The replicas lead in cyclic order. Each run begins with a pseudo-random replica, except that the
    first run begins with the first replica. Steps that are a fixed number apart therefore soon have
    every replica as leader. An optimizer that alternates between several sets of variables trains
    each set in such steps. `tests.reference.leader` computes the same for Python's integers.
    """
    mixed = step // size * MIXING
    mixed = (mixed ^ tf.bitwise.right_shift(mixed, 32)) * MIXING
    begin = tf.bitwise.right_shift(mixed, 33)
    return tf.cast((begin + step % size) % size, tf.int32)


CHUNK_SHARE = Valid(  # of entries, if one of each chunk is sent
    f"a number from 1/{MAX_CHUNK_SIZE} to 1",
    lambda share: is_number(share) and 1 / MAX_CHUNK_SIZE <= share <= 1,
)
FLOAT_BITS = 32
SUMMED_BITS = 16


def sum_chosen(
    chunked: ops.Chunked,
    inputs: StepInputs,
    offsets: tf.Tensor,
    local_finite: tf.Tensor,
    filter: float = 1.0,
) -> Generator[AllReduce, tf.Tensor, tuple[list[tf.Tensor], tf.Tensor]]:
    """Sums the chosen entries; returns the reduced gradients, and whether they are finite."""
    values = ops.chunk_take(chunked, offsets, local_finite)
    totals = yield AllReduce(values)
    totals, fits = zero_if_too_large(totals, tf.math.is_finite(totals[-1]))
    reduced, finite = ops.chunk_apply(
        chunked, offsets, totals, local_finite, inputs.finite, filter=filter
    )
    return reduced, tf.logical_and(finite, fits)


def tensor_bytes(
    chunked: ops.Chunked,
    sizes: Sequence[int],
    leaders: int | None = None,
    value_bits: int = FLOAT_BITS,
) -> tf.Tensor:
    """Returns the bytes of each tensor in a payload, rounded down; int64 [tensors].

    `leaders` is the number of replicas that send offsets in turn; None if offsets are not sent.
    """
    chunk_sizes = tf.convert_to_tensor(chunked.chunk_sizes, tf.int64)
    elements = tf.constant(sizes, tf.int64)
    senders = leaders or 1
    coded = chunk_sizes > 1
    bits = tf.where(coded, tf.constant(value_bits, tf.int64), FLOAT_BITS) * senders
    bits += 0 if leaders is None else _offset_bits(chunk_sizes)
    scale_bits = 0 if value_bits == FLOAT_BITS else FLOAT_BITS
    if value_bits != SUMMED_BITS:  # whose scales only the leader sends
        scale_bits *= senders
    has_scale = tf.logical_and(coded, elements > 0)
    tensor_scale_bits = tf.where(has_scale, tf.constant(scale_bits, tf.int64), 0)
    return (-(-elements // chunk_sizes) * bits + tensor_scale_bits) // (8 * senders)


def _offset_bits(chunk_sizes: tf.Tensor) -> tf.Tensor:
    """Bits of an offset in a chunk; int64 [tensors]."""
    powers = tf.constant([2**bits for bits in range(MAX_CHUNK_SIZE.bit_length())], tf.int64)
    return tf.math.count_nonzero(chunk_sizes[:, tf.newaxis] > powers, 1)
