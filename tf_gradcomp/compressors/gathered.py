"""The exchange of methods whose payloads are gathered and summed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.base import Exchanged, ExchangeInputs
from tf_gradcomp.compressors.requests import AllGather


def sum_gathered(
    inputs: ExchangeInputs,
    encode: Callable[..., tuple[tf.Tensor, tf.Tensor]],
    decode: Callable[..., tuple[list[tf.Tensor], tf.Tensor]],
    put_back: Callable[..., Any],
    *,
    same_length: bool,
    keep: Callable[[tf.Tensor, tf.Tensor], Any] | None = None,
) -> Generator[AllGather, tf.Tensor, Exchanged]:
    """Encodes, gathers and decodes.

    If the step is skipped, the packed values return to the residuals. They are discarded if only a
    sum is too large, because the sums of all later steps would be too large, too. A method that
    keeps more than residuals passes `keep`, which is called last with the payload and with whether
    the packed values are gone.
    """
    payload, tensor_bytes = encode(inputs.residuals, inputs.gradients, inputs.step)
    payloads = yield AllGather(payload, same_length)
    shapes = [spec.shape for spec in inputs.specs]
    reduced, finite = decode(payloads, inputs.step, shapes=shapes)
    gone = tf.logical_and(ops.payloads_finite(payloads), inputs.finite)

    def put_packed_back() -> None:  # `put_back` may return anything
        put_back(inputs.residuals, payload)

    tf.cond(gone, lambda: None, put_packed_back)
    if keep:
        keep(payload, gone)
    return Exchanged(reduced, tf.logical_and(finite, inputs.finite), tensor_bytes)
