"""Broken payloads of QSGD and SignSGD are InvalidArgumentErrors that name the replica."""

import dataclasses
import functools
import struct
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.adacomp_cases import FINGERPRINT, STEP, assert_same_bits, normal
from tests.reference import payload as payload_format
from tf_gradcomp import ops

SHAPES = [(7, 31), (1001,), (5,), (0,), (64,)]
QSGD_LAYOUT = {"bits": [4, 3, 0, 8, 2], "bucket_size": 96}


@dataclasses.dataclass(frozen=True)
class Method:
    label: str
    number: int
    encode: Callable
    decode: Callable
    put_back: Callable


METHODS = [
    Method(
        "QSGD",
        2,
        functools.partial(ops.qsgd_encode, replica=1, **QSGD_LAYOUT),
        functools.partial(ops.qsgd_decode, **QSGD_LAYOUT),
        functools.partial(ops.qsgd_put_back, **QSGD_LAYOUT),
    ),
    Method("SignSGD", 3, ops.sign_sgd_encode, ops.sign_sgd_decode, ops.sign_sgd_put_back),
]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)


def valid_payload(method):
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    gradients = [normal(shape, 0.3, i) for i, shape in enumerate(SHAPES)]
    payload, _ = method.encode(variables, gradients, STEP, fingerprint=FINGERPRINT)
    return payload.numpy()


def decode(method, payloads, **arguments):
    arguments = {"shapes": SHAPES, "fingerprint": FINGERPRINT, **arguments}
    return method.decode(np.stack(payloads), STEP, **arguments)


def error_of(method, payloads, **arguments):
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        decode(method, payloads, **arguments)
    return str(caught.value)


def decoded_or_error(method, payload):
    """None if the payload says something; then all of it must be finite."""
    try:
        reduced, _ = decode(method, [payload])
    except tf.errors.InvalidArgumentError as error:
        return str(error)
    assert all(np.isfinite(tensor).all() for tensor in reduced)
    return None


def resealed(payload, body, **changes):
    """The payload with another body and header, and a valid checksum."""
    header, _ = payload_format.read(payload)
    return payload_format.write(dataclasses.replace(header, **changes), body)


def qsgd_tensor(body, bits=3, size=33, **layout):
    """Returns the error for a payload of one tensor with such words."""
    header = payload_format.Header(2, FINGERPRINT, STEP, 1, payload_format.plan_of([bits]))
    return ops.qsgd_decode(
        payload_format.write(header, body)[None],
        STEP,
        shapes=[(size,)],
        fingerprint=FINGERPRINT,
        **{"bits": [bits], "bucket_size": 32, **layout},
    )


def sign_sgd_tensor(body, size=33):
    header = payload_format.Header(3, FINGERPRINT, STEP, 1, payload_format.plan_of())
    payload = payload_format.write(header, body)[None]
    return ops.sign_sgd_decode(payload, STEP, shapes=[(size,)], fingerprint=FINGERPRINT)


def test_the_words_that_the_other_tests_break_are_good():
    codes = sum(i % 8 << 3 * i for i in range(32)).to_bytes(12, "little")
    body = struct.pack("<ff", -1, 0.5) + codes + struct.pack("<ffI", 2, 0, 7)
    (reduced,), _ = qsgd_tensor(body)
    np.testing.assert_array_equal(reduced, [*[-1 + i % 8 / 2 for i in range(32)], 2])
    (reduced,), _ = sign_sgd_tensor(struct.pack("<fII", 1.5, 0b101, 1))
    np.testing.assert_array_equal(reduced, [-1.5, 1.5, -1.5, *[1.5] * 29, -1.5])


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ((-1, 0.5, 2, np.nan), "bucket 1: minimum 2 and unit nan; expected a unit"),
        ((-1, 0.5, 2, -1.0), "bucket 1: minimum 2 and unit -1; expected a unit that is not negat"),
        ((-1, 0.5, 2, -0.0), "bucket 1: minimum 2 and unit -0; expected a unit"),
        ((-1, np.inf, 2, 0), "bucket 0: minimum -1 and unit inf; expected a unit"),
        ((np.inf, 0, 2, 0), "bucket 0: minimum inf and unit 0; expected .* finite values"),
        ((np.nan, 0, 2, 0), "bucket 0: minimum nan and unit 0"),
        ((1e38, 1e38, 2, 0), "bucket 0: minimum 1e.38 and unit 1e.38"),
        ((-3e38, 1e38, 2, 0), "bucket 0: minimum -3e.38 and unit 1e.38"),
    ],
)
def test_buckets_of_values_that_are_not_finite(scale, message):
    first, second = scale[:2], scale[2:]
    body = struct.pack("<ff", *first) + bytes(12) + struct.pack("<ffI", *second, 0)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="payload of replica 0: tensor 0: " + message
    ):
        qsgd_tensor(body)


@pytest.mark.parametrize("mean", [np.inf, np.nan, -1.0, -0.0])
def test_means_that_are_no_magnitudes(mean):
    with pytest.raises(tf.errors.InvalidArgumentError, match="tensor 0: mean magnitude"):
        sign_sgd_tensor(struct.pack("<fII", mean, 0, 0))


def test_bits_behind_the_last_code():
    message = "the bits behind the last code are not 0"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        qsgd_tensor(struct.pack("<ff", 0, 0) + bytes(12) + struct.pack("<ffI", 0, 0, 8))
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        sign_sgd_tensor(struct.pack("<fII", 1, 0, 2))


def test_values_sent_whole_that_are_not_finite():
    body = struct.pack("<3f", 1, np.nan, 3)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="tensor 0: a value is not finite; exp"
    ):
        qsgd_tensor(body, bits=0, size=3)


@every_method
def test_other_lengths_than_the_layout_gives(method):
    payload = valid_payload(method)
    _, body = payload_format.read(payload)
    for wrong in (body[:-4], body + bytes(4), b""):
        error = error_of(method, [resealed(payload, wrong)])
        assert f"payload of replica 0: length of {14 + len(wrong) // 4} words; expected" in error
        assert f"expected {payload.size}, which tensors and settings give" in error


@every_method
def test_words_behind_the_non_finite_flag(method):
    payload = valid_payload(method)
    _, body = payload_format.read(payload)
    message = "a word behind the header is not 0; expected zeros with the non-finite flag"
    assert message in error_of(method, [payload, resealed(payload, body, flags=1)])
    flagged = resealed(payload, bytes(len(body)), flags=1)
    reduced, finite = decode(method, [payload, flagged])
    assert not finite
    assert not any(np.any(tensor) for tensor in reduced)


@every_method
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": 1}, "compression method 1; expected"),
        ({"step": STEP + 1}, f"step {STEP + 1}; expected {STEP}"),
        ({"num_tensors": 2}, "2 tensors; expected 5"),
        ({"plan": 7}, "plan 7; expected "),
        ({"flags": 2}, "flags 2; expected 0 or 1"),
        ({"fingerprint": 7}, "fingerprint 7; expected"),
    ],
)
def test_a_foreign_header_is_an_error_that_names_the_replica(method, changes, message):
    payload = valid_payload(method)
    foreign = resealed(payload, payload_format.read(payload)[1], **changes)
    error = error_of(method, [payload, foreign])
    assert "payload of replica 1: " + message in error


@every_method
def test_every_truncation_and_any_flipped_word_is_an_error(method):
    payload = valid_payload(method)
    for length in range(payload.size):
        error_of(method, [payload[:length]])
    for word in range(payload.size):
        flipped = payload.copy()
        flipped[word] ^= np.int32(1 << word % 31)
        assert "payload of replica 1" in error_of(method, [payload, flipped])


@every_method
@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_resealed_mutations_never_crash(method, data):
    payload = valid_payload(method)
    header, body = payload_format.read(payload)
    words = np.frombuffer(body, np.int32).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        words[data.draw(st.integers(0, words.size - 1))] = data.draw(
            st.sampled_from([0, -1, 2**31 - 1]) | st.integers(-(2**31), 2**31 - 1)
        )
    error = decoded_or_error(method, payload_format.write(header, words.tobytes()))
    assert error is None or "payload of replica 0: tensor " in error


@every_method
def test_put_back_refuses_a_broken_payload_and_leaves_the_residuals(method):
    variables = [tf.Variable(normal(shape, 1, i)) for i, shape in enumerate(SHAPES)]
    before = [variable.numpy() for variable in variables]
    payload = valid_payload(method)
    payload[-1] ^= 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="checksum"):
        method.put_back(variables, payload, fingerprint=FINGERPRINT)
    for variable, value in zip(variables, before, strict=True):
        assert_same_bits(variable.numpy(), value)


@every_method
def test_a_value_read_before_the_step_stays_as_it_was(method):
    variables = [tf.Variable(normal(shape)) for shape in SHAPES]
    snapshot = variables[0].read_value()
    expected = snapshot.numpy().copy()
    gradients = [normal(shape, 0.3, i) for i, shape in enumerate(SHAPES)]
    payload, _ = method.encode(variables, gradients, STEP, fingerprint=FINGERPRINT)
    after = variables[0].read_value()
    encoded = after.numpy().copy()
    method.put_back(variables, payload, fingerprint=FINGERPRINT)
    assert_same_bits(snapshot.numpy(), expected)
    assert_same_bits(after.numpy(), encoded)
    assert np.any(encoded != expected)
    assert np.any(variables[0].numpy() != encoded)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"bits": [4, 4]}, "bits has 2 entries; expected 1"),
        ({"bits": [1]}, r"bits\[0\] is 1; expected 2 to 8, or 0 to send the tensor whole"),
        ({"bits": [9]}, r"bits\[0\] is 9; expected 2 to 8"),
        ({"bucket_size": 33}, "bucket_size is 33; expected a multiple of 32 up to 65536"),
        ({"bucket_size": 0}, "bucket_size is 0"),
        ({"bucket_size": 65568}, "bucket_size is 65568"),
    ],
)
def test_layouts_out_of_range(layout, message):
    layout = {"bits": [4], "bucket_size": 32, "fingerprint": 0, **layout}
    ten = np.zeros(10, np.float32)
    variable = tf.Variable(ten)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.qsgd_encode([variable], [ten], 0, replica=0, **layout)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.qsgd_decode(np.zeros((1, 14), np.int32), 0, shapes=[(10,)], **layout)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.qsgd_put_back([variable], np.zeros(14, np.int32), **layout)


def test_gradients_that_do_not_fit_their_residuals():
    ten = np.zeros(10, np.float32)
    variable = tf.Variable(ten)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"gradient 0 has shape \[2,5\]"):
        ops.sign_sgd_encode([variable], [ten.reshape(2, 5)], 0, fingerprint=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="2 gradients for 1 residuals"):
        ops.sign_sgd_encode([variable], [ten, ten], 0, fingerprint=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a residual is given twice"):
        ops.sign_sgd_encode([variable, variable], [ten, ten], 0, fingerprint=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="step has shape"):
        ops.sign_sgd_encode([variable], [ten], [1], fingerprint=0)
