"""The exchange of the methods whose payloads are gathered and added up."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import tensorflow as tf

from tf_gradcomp.compressors.base import Exchanged, ExchangeInputs
from tf_gradcomp.compressors.wishes import AllGather


def sum_gathered(
    inputs: ExchangeInputs,
    encode: Callable[..., tuple[tf.Tensor, tf.Tensor]],
    decode: Callable[..., tuple[list[tf.Tensor], tf.Tensor]],
    put_back: Callable[..., Any],
    *,
    same_length: bool,
    keep: Callable[[tf.Tensor, tf.Tensor], Any] | None = None,
) -> Generator[AllGather, tf.Tensor, Exchanged]:
    """Encodes, gathers and decodes; where the step is to be skipped, puts back what was packed.

    Args:
        inputs: This replica's side.
        encode: The method's op that encodes, called with residuals, gradients and step.
        decode: The method's op that decodes, called with rows of payloads, step and `shapes`.
        put_back: The method's op for steps that are skipped, called with residuals and payload.
        same_length: Whether payloads have as many words on all replicas.
        keep: Called last, with the payload and whether the step counts, by a method that keeps more
            than residuals.
    """
    payload, tensor_bytes = encode(inputs.residuals, inputs.gradients, inputs.step)
    payloads = yield AllGather(payload, same_length)
    shapes = [spec.shape for spec in inputs.specs]
    reduced, finite = decode(payloads, inputs.step, shapes=shapes)
    finite = tf.logical_and(finite, inputs.finite)
    tf.cond(finite, tf.no_op, lambda: put_back(inputs.residuals, payload))
    if keep:
        keep(payload, finite)
    return Exchanged(reduced, finite, tensor_bytes)
