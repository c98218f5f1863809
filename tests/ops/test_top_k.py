"""Tests TopK's ops: equal bits to the oracle, also on odd inputs, and refusals."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.adacomp_cases import DTYPES, FINGERPRINT, STEP, assert_same_bits, normal
from tests.reference import payload as payload_format
from tests.reference import top_k as reference
from tf_gradcomp import ops

SIZES = (1, 2, 1023, 1024, 1025, 131_072, 131_073, 300_001)  # around strips and blocks
SHAPES, ENTRIES = [(7, 31), (1001,), (5,), (0,)], [20, 1, 0, 3]
NON_FINITE = [np.inf, -np.inf, np.nan]


def encode(residuals, gradients, entries):
    variables = [tf.Variable(residual) for residual in residuals]
    payload, tensor_bytes = ops.top_k_encode(
        variables,
        [tf.constant(gradient) for gradient in gradients],
        STEP,
        entries=entries,
        fingerprint=FINGERPRINT,
    )
    left = [variable.numpy() for variable in variables]
    return payload.numpy(), left, tensor_bytes.numpy().tolist()


def assert_as_reference(residuals, gradients, entries):
    encoded = encode(residuals, gradients, entries)
    expected = reference.encode_payload(
        residuals, gradients, STEP, entries=entries, fingerprint=FINGERPRINT
    )
    np.testing.assert_array_equal(encoded[0], expected[0])
    for left, right in zip(encoded[1], expected[1], strict=True):
        assert_same_bits(left, right)
    assert encoded[2] == expected[2]
    return encoded


def decode(payloads, shapes=SHAPES, entries=ENTRIES):
    return ops.top_k_decode(
        np.stack(payloads), STEP, shapes=shapes, entries=entries, fingerprint=FINGERPRINT
    )


def valid_payload():
    gradients = [normal(shape, 0.3, i) for i, shape in enumerate(SHAPES)]
    return encode([np.zeros_like(g) for g in gradients], gradients, ENTRIES)[0]


def payload_of(words, entries=3, **header):
    """A payload with a valid header and checksum around any words."""
    fields = {"method": 4, "fingerprint": FINGERPRINT, "step": STEP, "num_tensors": 1}
    fields |= {"plan": payload_format.plan_of([entries]), **header}
    return payload_format.write(payload_format.Header(**fields), words.tobytes())


def one_tensor(indices, values, **header):
    parts = np.array(indices, np.uint32), np.array(values, np.float32).view(np.uint32)
    return payload_of(np.concatenate(parts), **header)


def error_of(payloads, shapes=SHAPES, entries=ENTRIES):
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        decode(payloads, shapes, entries)
    return str(caught.value)


def decoded_or_error(payload, shapes=SHAPES, entries=ENTRIES):
    """None if the payload says something; then all of it must be finite."""
    try:
        reduced, _ = decode([payload], shapes, entries)
    except tf.errors.InvalidArgumentError as error:
        return str(error)
    assert all(np.all(np.isfinite(tensor)) for tensor in reduced)
    return None


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_payload_and_residual_equal_the_reference(dtype):
    for size in SIZES:
        for entries in sorted({1, max(1, size // 100), max(1, size // 2), size, 0}):
            assert_as_reference([normal(size, 1.0, 1)], [normal(size, 0.3, 2, dtype)], [entries])


def test_many_tensors_of_all_kinds_share_one_payload():
    shapes = [(3, 3, 5, 7), (), (500, 30), (0, 4), (30,), (17,), (3, 40000)]
    entries = [31, 1, 0, 0, 0, 17, 1200]
    residuals = [normal(shape, 1.0, i) for i, shape in enumerate(shapes)]
    gradients = [normal(shape, 0.3, 10 + i, DTYPES[i % 3]) for i, shape in enumerate(shapes)]
    residuals[1], gradients[1] = np.asarray(residuals[1]), np.asarray(gradients[1])
    payload, _, tensor_bytes = assert_as_reference(
        [np.asarray(r, np.float32) for r in residuals], gradients, entries
    )
    assert payload.nbytes == 56 + sum(tensor_bytes)
    assert tensor_bytes == [31 * 8, 8, 15000 * 4, 0, 30 * 4, 17 * 8, 1200 * 8]


@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_of_equal_magnitudes_the_first_are_sent(kinds):
    rng = np.random.default_rng(kinds)
    values = (rng.choice([-1, 1], 200_000) * rng.integers(0, kinds, 200_000)).astype(np.float32)
    assert_as_reference([np.zeros_like(values)], [values], [3000])


def test_denormals_are_not_flushed_and_zeros_are_sent_when_nothing_else_is_left():
    tiny = normal(1000) * np.float32(1e-40)
    tiny[::3] = -0.0
    for entries in (10, 900):
        assert_as_reference([tiny], [tiny[::-1].copy()], [entries])


def test_more_entries_than_elements_mean_all():
    values = normal(7)
    assert_same_bits(
        encode([values], [values], [9])[0][14:], encode([values], [values], [7])[0][14:]
    )


@pytest.mark.parametrize("bad", NON_FINITE)
@pytest.mark.parametrize("place", [0, 131_072, 200_000])
def test_a_value_that_is_not_finite_leaves_residuals_and_length_as_they_were(bad, place):
    residuals, gradients = [normal(200_001, 1, 1), normal(5)], [normal(200_001), normal(5)]
    gradients[0][place] = bad
    payload, left, _ = assert_as_reference(residuals, gradients, [100, 0])
    for after, before in zip(left, residuals, strict=True):
        assert_same_bits(after, before)
    assert payload.size == 14 + 200 + 5
    assert not payload[14:].any()
    reduced, finite = decode([payload], [(200_001,), (5,)], [100, 0])
    assert not finite
    assert not any(np.any(tensor) for tensor in reduced)


def test_replicas_are_added_in_their_order():
    shapes, entries = [(300, 500), (70,)], [9000, 0]
    payloads = []
    for i in range(5):
        residuals, gradients = ([normal(s, d, i) for s in shapes] for d in (1, 10.0**i))
        payloads.append(encode(residuals, gradients, entries)[0])
    reduced, finite = decode(payloads, shapes, entries)
    expected = [np.zeros(shape, np.float32) for shape in shapes]
    for payload in payloads:
        sent = reference.decode_payload(payload, shapes, entries)
        expected = [total + values for total, values in zip(expected, sent, strict=True)]
    for actual, total in zip(reduced, expected, strict=True):
        assert_same_bits(actual.numpy(), total)
    assert finite


def test_the_payload_that_the_other_tests_break_is_good():
    (reduced,), finite = decode([one_tensor([1, 4, 10], [1, -2, 3])], [(11,)], [3])
    np.testing.assert_array_equal(np.flatnonzero(reduced), [1, 4, 10])
    assert finite


@pytest.mark.parametrize(
    ("indices", "values", "message"),
    [
        ([1, 1, 10], [1, 2, 3], "index 1 of entry 1; expected one above 1 and below 11"),
        ([4, 1, 10], [1, 2, 3], "index 1 of entry 1; expected one above 4 and below 11"),
        ([1, 4, 11], [1, 2, 3], "index 11 of entry 2; expected one above 4 and below 11"),
        ([1, 4, 2**32 - 1], [1, 2, 3], "index 4294967295 of entry 2"),
        ([2**31, 4, 5], [1, 2, 3], "index 2147483648 of entry 0; expected one above -1"),
        ([1, 4, 10], [1, np.inf, 3], "a value is not finite"),
        ([1, 4, 10], [1, 2, np.nan], "a value is not finite"),
        ([1, 4], [1, 2], "length of 18 words; expected 20"),
        ([1, 4, 6, 10], [1, 2, 3, 4], "length of 22 words; expected 20"),
    ],
)
def test_entries_that_no_encoder_writes(indices, values, message):
    good = one_tensor([1, 4, 10], [1, 2, 3])
    bad = one_tensor(indices, values)
    row = np.zeros((2, max(good.size, bad.size)), np.int32)
    row[0, : good.size], row[1, : bad.size] = good, bad
    error = error_of(row, [(11,)], [3])
    assert "payload of replica 1: " in error
    assert message in error


def test_tensors_sent_whole_are_checked():
    bad = payload_of(np.array([1, np.nan, 3], np.float32), 0)
    assert "payload of replica 0: tensor 0: a value is not finite" in error_of([bad], [(3,)], [0])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"method": 1}, "compression method 1; expected 4"),
        ({"step": STEP + 1}, f"step {STEP + 1}; expected {STEP}"),
        ({"num_tensors": 2}, "2 tensors; expected 1"),
        ({"plan": 7}, "plan 7; expected "),
        ({"flags": 2}, "flags 2; expected 0 or 1"),
        ({"flags": 1}, "a word behind the header is not 0"),
        ({"fingerprint": 7}, "replicas were built with different variables"),
    ],
)
def test_a_foreign_header_is_an_error_that_names_replica_and_difference(header, message):
    good, foreign = (one_tensor([1, 4, 10], [1, 2, 3], **fields) for fields in ({}, header))
    error = error_of([good, foreign], [(11,)], [3])
    assert "payload of replica 1: " in error
    assert message in error


def test_every_truncation_and_flipped_word_is_an_error():
    payload = valid_payload()
    for length in range(payload.size):
        error_of([payload[:length]])
    for word in range(payload.size):
        flipped = payload.copy()
        flipped[word] ^= np.int32(1 << word % 31)
        assert "payload of replica 1" in error_of([payload, flipped])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8), st.integers(4, 70))
@settings(deadline=None, max_examples=300)
def test_random_words_behind_a_valid_header_never_crash(words, size):
    error = decoded_or_error(payload_of(np.array(words, np.uint32), 4), [(size,)], [4])
    assert error is None or "payload of replica 0: tensor 0: " in error


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_resealed_mutations_never_crash(data):
    header, body = payload_format.read(valid_payload())
    words = np.frombuffer(body, np.int32).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        words[data.draw(st.integers(0, words.size - 1))] = data.draw(
            st.sampled_from([0, 1, -1, 2**31 - 1]) | st.integers(-(2**31), 2**31 - 1)
        )
    error = decoded_or_error(payload_format.write(header, words.tobytes()))
    assert error is None or "payload of replica 0: " in error


@pytest.mark.parametrize(
    ("entries", "message"),
    [([3], r"entries has 1 entries; expected 2"), ([3, -1], r"entries\[1\] is -1; expected 1")],
)
def test_numbers_of_entries_that_fit_no_tensors_are_refused(entries, message):
    values = [normal(7), normal(5)]
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        encode(values, values, entries)


def test_put_back_refuses_a_broken_payload_and_leaves_the_residuals():
    variables = [tf.Variable(normal(shape, 1, i)) for i, shape in enumerate(SHAPES)]
    before = [variable.numpy() for variable in variables]
    payload = valid_payload()
    payload[-1] ^= 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="checksum"):
        ops.top_k_put_back(variables, payload, entries=ENTRIES, fingerprint=FINGERPRINT)
    for variable, value in zip(variables, before, strict=True):
        assert_same_bits(variable.numpy(), value)


@pytest.mark.parametrize(("sent", "flags"), [(True, 0), (False, 0), (False, 1)])
def test_velocities_are_kept_as_in_the_reference(sent, flags):
    velocities = [normal(shape, 1, i) for i, shape in enumerate(SHAPES)]
    corrected = [normal(shape, 1, 10 + i) for i, shape in enumerate(SHAPES)]
    if flags:
        corrected[1][3] = np.nan
    payload = encode([np.zeros_like(c) for c in corrected], corrected, ENTRIES)[0]
    variables = [tf.Variable(velocity) for velocity in velocities]
    ops.top_k_keep_velocity(
        variables, corrected, payload, sent, entries=ENTRIES, fingerprint=FINGERPRINT
    )
    expected = reference.kept_velocities(velocities, corrected, payload, ENTRIES, sent)
    for variable, value in zip(variables, expected, strict=True):
        assert_same_bits(variable.numpy(), value)


def test_a_value_that_was_read_before_is_not_changed_by_keeping_velocities():
    variable = tf.Variable(normal(50))
    before = variable.read_value()
    copy = before.numpy().copy()
    payload = encode([np.zeros(50, np.float32)], [normal(50, 1, 1)], [5])[0]
    ops.top_k_keep_velocity(
        [variable], [normal(50, 1, 1)], payload, True, entries=[5], fingerprint=FINGERPRINT
    )
    assert_same_bits(before.numpy(), copy)
    assert np.count_nonzero(variable.numpy()) == 45


def test_keeping_velocities_refuses_a_broken_payload_and_leaves_them():
    variable = tf.Variable(normal(50))
    before = variable.numpy()
    payload = encode([np.zeros(50, np.float32)], [normal(50)], [5])[0]
    payload[-1] ^= 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="checksum"):
        ops.top_k_keep_velocity(
            [variable], [normal(50)], payload, True, entries=[5], fingerprint=FINGERPRINT
        )
    assert_same_bits(variable.numpy(), before)


@pytest.mark.parametrize(
    ("dtype", "clip_norm"), list(itertools.product(DTYPES, (np.inf, 100.0, 1e6))), ids=str
)
def test_corrected_gradients_equal_the_reference(dtype, clip_norm):
    sizes = [0, 1, 7, 65_536, 65_537, 200_003]
    velocities = [normal(size, 1, size) for size in sizes]
    gradients = [normal(size, 1, size + 1, dtype) for size in sizes]
    for given_velocities in (velocities, []):
        corrected = ops.momentum_correction(
            given_velocities, gradients, momentum=0.9, clip_norm=clip_norm
        )
        expected = reference.momentum_correction(given_velocities, gradients, 0.9, clip_norm)
        for actual, value in zip(corrected, expected, strict=True):
            assert_same_bits(actual.numpy(), value)


@pytest.mark.parametrize("bad", NON_FINITE)
def test_clipping_does_not_make_a_gradient_finite(bad):
    gradients = [normal(70), normal(5)]
    gradients[0][8] = bad
    corrected = ops.momentum_correction([], gradients, momentum=0.0, clip_norm=1.0)
    assert not np.isfinite(corrected[0][8])


@pytest.mark.parametrize(
    ("velocities", "message"),
    [
        ([np.zeros(3, np.float32)], "1 velocities for 2 gradients"),
        ([np.zeros(3, np.float32)] * 2, r"velocity 1 has shape \[3\]; expected \[4\]"),
    ],
)
def test_velocities_that_fit_no_gradients_are_refused(velocities, message):
    gradients = [np.zeros(3, np.float32), np.zeros(4, np.float32)]
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.momentum_correction(velocities, gradients, momentum=0.9)


def test_shapes_are_known_in_a_graph():
    @tf.function
    def shapes(gradient):
        (corrected,) = ops.momentum_correction([], [gradient], momentum=0.0, clip_norm=1.0)
        (reduced,), finite = ops.top_k_decode(
            tf.zeros([2, 18], tf.int32), 0, shapes=[(11,)], entries=[3], fingerprint=0
        )
        found.extend([corrected.shape, reduced.shape, finite.shape])

    found = []
    shapes.get_concrete_function(tf.TensorSpec([5, 7]))
    assert found == [[5, 7], [11], []]
