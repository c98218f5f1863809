"""A replica and its payloads, for the tests of the AdaComp ops."""

import dataclasses

import numpy as np
import tensorflow as tf

from tests.reference import adacomp as reference
from tests.reference.precondition import precondition
from tf_gradcomp import ops

FINGERPRINT = -(2**40) - 3
STEP = 2**33 + 5
DTYPES = (tf.float32, tf.float16, tf.bfloat16)


@dataclasses.dataclass
class Encoded:
    payload: np.ndarray
    residuals: list[np.ndarray]
    tensor_bytes: list[int]
    moments: list[np.ndarray] = dataclasses.field(default_factory=list)


def normal(size, deviation=1.0, seed=0, dtype=tf.float32):
    values = np.random.default_rng(seed).normal(scale=deviation, size=size)
    return values.astype(dtype.as_numpy_dtype)


def encode(residuals, gradients, bin_sizes, moments=(), adam=None, **settings):
    """Takes a step by the op; with `moments`, `adam` has the settings of the division."""
    variables = [tf.Variable(residual) for residual in residuals]
    second_moments = [tf.Variable(moment) for moment in moments]
    settings = {"fingerprint": FINGERPRINT, "step": STEP, **settings}
    if moments:
        settings["second_moments"] = ops.SecondMoments(second_moments, **adam)
    payload, tensor_bytes = ops.adacomp_encode(
        variables, [tf.constant(g) for g in gradients], bin_sizes=bin_sizes, **settings
    )
    left = [variable.numpy() for variable in variables]
    after = [variable.numpy() for variable in second_moments]
    return Encoded(payload.numpy(), left, tensor_bytes.numpy().tolist(), after)


def encode_by_reference(residuals, gradients, bin_sizes, **settings):
    """The same step by the oracle."""
    settings = {"fingerprint": FINGERPRINT, "step": STEP, **settings}
    return Encoded(*reference.encode_payload(residuals, gradients, bin_sizes=bin_sizes, **settings))


def divide_and_encode_by_reference(residuals, gradients, bin_sizes, moments, adam, **settings):
    """The same step with second moments: one oracle after the other."""
    adam = dict(adam)
    squares = adam.pop("squares", None) or [None] * len(gradients)
    triples = zip(moments, gradients, squares, strict=True)
    pairs = [precondition(m, g, squares=given, **adam) for m, g, given in triples]
    divided, after = ([pair[i] for pair in pairs] for i in (0, 1))
    encoded = encode_by_reference(residuals, divided, bin_sizes, **settings)
    return dataclasses.replace(encoded, moments=after)


def decode(payloads, shapes, bin_sizes, **settings):
    settings = {"fingerprint": FINGERPRINT, "step": STEP, **settings}
    return ops.adacomp_decode(rows(payloads), shapes=shapes, bin_sizes=bin_sizes, **settings)


def rows(payloads):
    """A row for each payload, as they are gathered."""
    longest = max(payload.size for payload in payloads)
    return np.stack([np.pad(payload, (0, longest - payload.size)) for payload in payloads])


def assert_same_bits(actual, expected):
    """Equal to the last bit, the sign of zero included."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    different = np.flatnonzero(actual.view(np.uint32) != expected.view(np.uint32))
    assert actual.tobytes() == expected.tobytes(), f"different at {different[:10]}"
