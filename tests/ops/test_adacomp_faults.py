"""Broken, foreign and random payloads are InvalidArgumentErrors that name the replica."""

import struct

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.adacomp_cases import FINGERPRINT, STEP, assert_same_bits, decode, encode, normal
from tests.reference import payload as payload_format
from tf_gradcomp import ops

SHAPES = [(7, 31), (1001,), (5,), (0,)]
BIN_SIZES = [50, 500, 0, 63]
PLAN = payload_format.plan_of(BIN_SIZES)
HEADER = payload_format.Header(1, FINGERPRINT, STEP, len(SHAPES), PLAN)


def valid_payload():
    gradients = [normal(shape, 0.3, i) for i, shape in enumerate(SHAPES)]
    return encode([np.zeros_like(g) for g in gradients], gradients, BIN_SIZES).payload


def error_of(payloads, **arguments):
    arguments = {"shapes": SHAPES, "bin_sizes": BIN_SIZES, **arguments}
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        decode(payloads, **arguments)
    return str(caught.value)


def decoded_or_error(payloads, shapes, bin_sizes):
    """None if the payload says something; then all of it must be finite."""
    try:
        reduced, _ = decode(payloads, shapes, bin_sizes)
    except tf.errors.InvalidArgumentError as error:
        return str(error)
    assert all(np.all(np.isfinite(tensor)) for tensor in reduced)
    return None


def one_tensor(scale, code_words, codes, bin_size=4, **header):
    """A payload of one tensor with a valid header and checksum around anything."""
    fields = {"method": 1, "fingerprint": FINGERPRINT, "step": STEP, "num_tensors": 1}
    fields |= {"plan": payload_format.plan_of([bin_size]), **header}
    body = struct.pack("<fI", scale, code_words) + bytes(codes)
    return payload_format.write(payload_format.Header(**fields), body)


def error_of_codes(codes, size=11, bin_size=4, scale=1.0):
    payload = one_tensor(scale, len(codes) // 4, codes, bin_size)
    return error_of([payload], shapes=[(size,)], bin_sizes=[bin_size])


def test_the_codes_that_the_other_tests_break_are_good():
    payload = one_tensor(1.0, 1, [0, 5, 253, 9])
    (reduced,), _ = decode([payload], [(11,)], [4])
    assert np.flatnonzero(reduced).tolist() == [0, 1, 10]


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([], "the codes end in bin 0; expected those of 3 bins from bin 0"),
        ([0, 5, 253, 8], "the codes end in bin 2; expected those of 3 bins from bin 0"),
        ([0, 5, 253, 13], "index 3 in bin 2; expected one above -1 and below 3"),
        ([0, 17, 253, 9], "index 4 in bin 0; expected one above 0 and below 4"),
        ([4, 1, 253, 9], "index 0 in bin 0; expected one above 1"),
        ([4, 5, 253, 9], "index 1 in bin 0; expected one above 1"),
        ([0, 253, 253, 9], "index 63 in bin 0"),
        ([255, 253, 253, 0], "index 63 in bin 0"),
        ([252, 1, 253, 9], "index 63 in bin 0"),
        ([253, 253, 253, 1], "4 codes from bin 0; expected 3"),
        ([253, 253, 253, 0, 0, 0, 0, 0], "5 codes from bin 0; expected 3"),
    ],
)
def test_codes_that_no_encoder_writes(codes, message):
    assert message in error_of_codes(codes)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([0, 8], "the codes end in bin 0; expected those of 4 bins from bin 0"),
        ([6, 8], "the codes end in bin 3; expected those of 4 bins from bin 0"),
        ([10, 8], "5 codes from bin 0; expected 4"),
        ([8, 10], "5 codes from bin 4; expected 4"),
        ([8, 9], "block 1 has 9 bytes of codes; expected at most 12, whole codes"),
        ([8, 12], "6 codes from bin 4; expected 4"),
        ([8, 14], "block 1 has 14 bytes of codes; expected at most 12"),
        ([2**32 - 2, 8], "block 0 has 4294967294 bytes of codes; expected at most 20"),
    ],
)
def test_lying_lengths_of_blocks(lengths, message):
    """9 bins of 16,383 elements, 4 in a block."""
    bins, bin_size = 9, 16383
    escapes = struct.pack("<9H", *[0xFFFD] * bins)

    def error(lengths):
        codes = struct.pack("<2I", *lengths) + escapes + bytes(2)
        return decoded_or_error(
            [one_tensor(1.0, len(codes) // 4, codes, bin_size)], [(bins * bin_size,)], [bin_size]
        )

    assert error([8, 8]) is None
    assert message in error(lengths)


@pytest.mark.parametrize("codes", [bytes(4), b"\xff" * 8], ids=repr)
def test_codes_of_a_tensor_without_elements(codes):
    for bin_size in (50, 500):
        error = error_of_codes(codes, size=0, bin_size=bin_size)
        assert "expected none for a tensor without elements" in error


def test_lengths_of_blocks_that_are_cut_off():
    payload = one_tensor(1.0, 1, bytes(4), 16383)
    error = error_of([payload], shapes=[(9 * 16383,)], bin_sizes=[16383])
    assert "1 words; expected at least 2, the lengths of its blocks" in error


@pytest.mark.parametrize("scale", [np.inf, np.nan, -1.0, -0.0])
def test_scale_must_be_finite_and_not_negative(scale):
    assert "scale" in error_of_codes([0, 5, 253, 9], scale=scale)


def test_tensors_sent_whole_are_checked():
    def error(scale, values):
        payload = one_tensor(scale, len(values), np.array(values, np.float32).tobytes(), 0)
        return error_of([payload], shapes=[(3,)], bin_sizes=[0])

    assert "2 words; expected 3, one per element" in error(0.0, [1, 2])
    assert "expected 0 for a tensor sent whole" in error(1.0, [1, 2, 3])
    assert "a value is not finite" in error(0.0, [1, np.nan, 3])


def test_a_lying_table_is_refused():
    for code_words in (0, 2, 2**31, 2**32 - 1):
        payload = one_tensor(1.0, code_words, [0, 5, 253, 9])
        error_of([payload], shapes=[(11,)], bin_sizes=[4])
    header_alone = payload_format.write(HEADER)
    assert "0 words behind the header; expected at least 8" in error_of([header_alone])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"method": 2}, "compression method 2; expected 1"),
        ({"step": STEP + 1}, f"step {STEP + 1}; expected {STEP}"),
        ({"num_tensors": 2}, "2 tensors; expected 1"),
        ({"plan": 7}, "plan 7; expected "),
        ({"flags": 2}, "flags 2; expected 0 or 1"),
        ({"flags": 1}, "with the non-finite flag; expected 14"),
        (
            {"fingerprint": 7},
            "replicas were built with different variables, compressor settings or versions of "
            "tf_gradcomp; start all workers with the same program",
        ),
    ],
)
def test_a_foreign_header_is_an_error_that_names_replica_and_difference(header, message):
    good = one_tensor(1.0, 1, [0, 5, 253, 9])
    foreign = one_tensor(1.0, 1, [0, 5, 253, 9], **header)
    error = error_of([good, foreign], shapes=[(11,)], bin_sizes=[4])
    assert "payload of replica 1: " in error
    assert message in error


def test_other_formats_are_refused_before_anything_else():
    payload = valid_payload()
    payload[1] = 1 | 1 << 16
    assert "format version 1; expected 2; install the same version" in error_of([payload])
    payload[0] = 1
    assert "the start of a payload" in error_of([payload])


def test_lengths_that_do_not_add_up():
    payload = valid_payload()
    assert "the received length" in error_of([payload[:-1]])
    followed = np.r_[payload, np.int32([0, 3])]
    assert "payload of replica 0: other words than zeros behind" in error_of([followed])
    assert "payload of replica 1: it starts with 0" in error_of([payload, payload[:0]])
    assert "payload of replica 0: only 0 words" in error_of([payload[:0]])
    for length in (-1, 0, 13, 2**31, 2**62, -(2**63)):
        lying = payload.copy()
        lying[10:12] = np.frombuffer(struct.pack("<q", length), np.int32)
        assert "payload of replica 0: length of" in error_of([lying])


def test_every_truncation_is_an_error():
    payload = valid_payload()
    for length in range(payload.size):
        error_of([payload[:length]])


def test_a_flipped_bit_in_any_word_is_an_error():
    payload = valid_payload()
    rng = np.random.default_rng(0)
    for word in range(payload.size):
        flipped = payload.copy()
        flipped[word] ^= np.int32(1 << int(rng.integers(31)))
        assert "payload of replica 1" in error_of([payload, flipped])


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=100))
@settings(deadline=None, max_examples=200)
def test_random_vectors_are_errors(words):
    error_of([np.array(words, np.int32)])


@given(st.binary(max_size=120), st.integers(1, 70), st.sampled_from([0, 1, 4, 50, 64, 500]))
@settings(deadline=None, max_examples=500)
def test_random_codes_behind_a_valid_header_never_crash(codes, size, bin_size):
    codes = codes[: len(codes) // 4 * 4]
    payload = one_tensor(1.0, len(codes) // 4, codes, bin_size)
    error = decoded_or_error([payload], [(size,)], [bin_size])
    assert error is None or "payload of replica 0: tensor 0: " in error


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_resealed_mutations_never_crash(data):
    payload = valid_payload()
    header, body = payload_format.read(payload)
    words = np.frombuffer(body, np.int32).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        words[data.draw(st.integers(0, words.size - 1))] = data.draw(
            st.sampled_from([0, -1, 2**31 - 1]) | st.integers(-(2**31), 2**31 - 1)
        )
    error = decoded_or_error([payload_format.write(header, words.tobytes())], SHAPES, BIN_SIZES)
    assert error is None or "payload of replica 0: " in error


def test_put_back_refuses_a_broken_payload_and_leaves_the_residuals():
    variables = [tf.Variable(normal(shape, 1, i)) for i, shape in enumerate(SHAPES)]
    before = [variable.numpy() for variable in variables]
    payload = valid_payload()
    payload[-1] ^= 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="checksum"):
        ops.adacomp_put_back(variables, payload, bin_sizes=BIN_SIZES, fingerprint=FINGERPRINT)
    for variable, value in zip(variables, before, strict=True):
        assert_same_bits(variable.numpy(), value)
