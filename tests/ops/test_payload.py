"""The header of payloads whose body is plain TensorFlow."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.reference import payload as payload_format
from tf_gradcomp import ops
from tf_gradcomp.ops import payload

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[2]


def plain(name):
    return name.replace("_", "").lower()


def test_numbers_of_methods_are_equal_in_the_format_the_kernels_and_python():
    header = (ROOT / "custom_ops/kernels/payload.h").read_text()
    native = {plain(name): int(number) for name, number in re.findall(r"  k(\w+) = (\d+),", header)}
    page = (ROOT / "docs/payload_format.md").read_text()
    (row,) = re.findall(r"^The methods are .*", page, re.M)
    documented = {plain(name): int(number) for number, name in re.findall(r"(\d+): (\w+)", row)}
    python = {
        plain(name): value
        for name, value in vars(payload).items()
        if name.isupper() and not name.startswith("_")
    }
    assert documented == native
    assert sorted(native.values()) == list(range(1, len(native) + 1))
    assert python.items() <= native.items()


HEADER = {"settings": None, "num_tensors": 3, "method": 7, "fingerprint": 11, "same_length": False}
STEP = tf.constant(3, tf.int64)


def written(*body, finite=True, **other):
    words = tf.constant(body, tf.int32)
    return ops.payload_write(words, STEP, tf.constant(finite), **{**HEADER, **other}).numpy()


def rows(*payloads, words=20):
    return np.stack([np.pad(result, (0, words - len(result))) for result in payloads])


def test_payloads_of_different_lengths_are_read_with_their_lengths():
    given = rows(written(1, 2, 3), written(), written(4), words=14 + 3)
    bodies, finite, lengths = ops.payload_read(given, STEP, **HEADER)
    assert bodies.numpy().tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    assert lengths.numpy().tolist() == [3, 0, 1]
    assert finite


def test_a_payload_of_any_length_that_is_not_finite_is_its_header():
    bad = written(1, 2, 3, finite=False)
    assert len(bad) == 14
    bodies, finite, lengths = ops.payload_read(rows(bad, written(5)), STEP, **HEADER)
    assert bodies.numpy()[:, 0].tolist() == [0, 5]
    assert lengths.numpy().tolist() == [0, 1]
    assert not finite
    longer = written(1, 2, 3, finite=False, same_length=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"replica 1: .*the header alone"):
        ops.payload_read(rows(written(5), longer), STEP, **HEADER)


def test_a_method_without_settings_has_the_plan_of_an_empty_list():
    plan = payload_format.plan_of()
    header = payload_format.Header(7, 11, 3, 3, plan)
    expected = payload_format.write(header, np.array([1, 2], np.int32).tobytes())
    np.testing.assert_array_equal(written(1, 2), expected)


def test_payloads_of_another_number_of_tensors_and_words_behind_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="replica 0: 2 tensors; expected 3"):
        ops.payload_read(rows(written(1, num_tensors=2)), STEP, **HEADER)
    behind = rows(written(1))
    behind[0, -1] = 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="other words than zeros behind"):
        ops.payload_read(behind, STEP, **HEADER)


def test_one_length_is_refused_where_rows_are_longer():
    with pytest.raises(tf.errors.InvalidArgumentError, match="length of 15 words; expected 20"):
        ops.payload_read(rows(written(1)), STEP, **{**HEADER, "same_length": True})


@pytest.mark.parametrize("settings", [None, [1, 2]])
def test_either_settings_or_the_number_of_tensors_is_needed(settings):
    number = None if settings is None else 2
    with pytest.raises(ValueError, match="either the settings of its tensors or their number"):
        written(1, settings=settings, num_tensors=number)


def test_shapes_are_known_in_graphs():
    shapes = []

    @tf.function
    def trace(payloads, step):
        for same_length in (True, False):
            header = {**HEADER, "same_length": same_length}
            read = ops.payload_read(payloads, step, **header)
            one = ops.payload_write(read[0][0], step, read[1], **header)
            shapes.append([tensor.shape.as_list() for tensor in (*read, one)])

    trace.get_concrete_function(tf.TensorSpec([2, 20], tf.int32), STEP)
    assert shapes == [[[2, 6], [], [2], [20]], [[2, 6], [], [2], [None]]]
