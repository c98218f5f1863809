"""Checks of a method's requests and results; all checks run when a step is traced."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.compressors.base import Exchanged
from tf_gradcomp.compressors.requests import AllGather, AllReduce, Broadcast, Request
from tf_gradcomp.policy import GradientSpec

_SUMMED = (tf.float32, tf.float16, tf.bfloat16, tf.int64)


def checked(
    name: str, exchange: Any, specs: Sequence[GradientSpec]
) -> Generator[Request, Any, Exchanged]:
    """Passes on the requests and the result of a method's `exchange`, if they are well-formed.

    Args:
        name: The method's name, for messages.
        exchange: What `exchange` returned.
        specs: The specs of the gradients.

    Raises:
        TypeError: If `exchange` is not a generator, or yields or returns other objects.
        ValueError: If a field has a wrong dtype, rank, shape or number. The message names it.
    """
    if not isinstance(exchange, Generator):
        raise TypeError(
            f"{name}: exchange must be a generator, which yields its requests (`yield from ()` if "
            f"it has none) and returns an Exchanged; received {exchange!r}."
        )
    answer: Any = None
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as end:
            _check_result(name, end.value, specs)
            return end.value
        _check_request(name, request)
        answer = yield request


def _check_request(name: str, request: Any) -> None:
    if isinstance(request, AllReduce):
        _check(f"{name}: AllReduce.values", request.values, _SUMMED, [None])
        _check_some(f"{name}: AllReduce.values", request.values)
        if request.metadata is not None:
            raise ValueError(f"{name}: AllReduce.metadata must be None; the exchange adds it.")
    elif isinstance(request, AllGather):
        _check(f"{name}: AllGather.payload", request.payload, [tf.int32], [None])
        if not isinstance(request.same_length, bool):
            raise TypeError(
                f"{name}: AllGather.same_length must be a bool; received {request.same_length!r}."
            )
    elif isinstance(request, Broadcast):
        _check(f"{name}: Broadcast.payload", request.payload, [tf.int32], [None])
        _check_some(f"{name}: Broadcast.payload", request.payload)
        _check(f"{name}: Broadcast.root", request.root, [tf.int32], [])
    else:
        raise TypeError(
            f"{name}: exchange must yield an AllGather, AllReduce or Broadcast of "
            f"compressors/requests.py; received {request!r}."
        )


def _check_result(name: str, result: Any, specs: Sequence[GradientSpec]) -> None:
    if not isinstance(result, Exchanged):
        raise TypeError(f"{name}: exchange must return an Exchanged; received {result!r}.")
    if len(result.reduced) != len(specs):
        raise ValueError(
            f"{name}: Exchanged.reduced must have a tensor for each of {len(specs)} gradients; "
            f"received {len(result.reduced)}."
        )
    for number, (total, spec) in enumerate(zip(result.reduced, specs, strict=True)):
        _check(f"{name}: Exchanged.reduced[{number}]", total, [tf.float32], spec.shape)
    _check(f"{name}: Exchanged.finite", result.finite, [tf.bool], [])
    _check(f"{name}: Exchanged.tensor_bytes", result.tensor_bytes, [tf.int64], [len(specs)])


def _check(field: str, value: Any, dtypes: Sequence[tf.DType], shape: Sequence[int | None]) -> None:
    """Refuses values other than tensors of one of the dtypes and of the shape, if known."""
    expected = f"must be a tensor of {' or '.join(dtype.name for dtype in dtypes)} and shape"
    if not tf.is_tensor(value):
        raise TypeError(f"{field} {expected} {tf.TensorShape(shape)}; received {value!r}.")
    if value.dtype not in dtypes or not value.shape.is_compatible_with(shape):
        raise ValueError(
            f"{field} {expected} {tf.TensorShape(shape)}; received {value.dtype.name} of shape "
            f"{value.shape}."
        )


def _check_some(field: str, value: tf.Tensor) -> None:
    if value.shape.num_elements() == 0:
        raise ValueError(
            f"{field} must not be empty; send a vector that may be empty through "
            "`request_unless_empty` of compressors/aggregation.py."
        )
