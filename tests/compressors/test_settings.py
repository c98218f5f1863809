"""The setting that each variable gets of a method's main one."""

import pytest

from tf_gradcomp.compressors.settings import PerVariable, Valid
from tf_gradcomp.policy import LAYER_KINDS, GradientSpec

DEFAULTS = {kind: 10 * (i + 1) for i, kind in enumerate(LAYER_KINDS)}


def setting(given=DEFAULTS, overrides=None):
    valid = Valid("from 1 to 999", lambda value: value in range(1, 1000))
    return PerVariable("Method: sizes", given, DEFAULTS, overrides, valid)


def spec(kind="dense", path="dense/kernel"):
    return GradientSpec(path, (30, 20), "float32", kind)


def test_by_default_each_kind_has_its_own():
    assert {kind: setting().of(spec(kind)) for kind in LAYER_KINDS} == DEFAULTS


@pytest.mark.parametrize("value", [63, None])
def test_one_value_for_all_kinds(value):
    assert {setting(value).of(spec(kind)) for kind in LAYER_KINDS} == {value}


def test_kinds_not_named_keep_their_defaults():
    given = setting({"dense": 100, "vector": None})
    assert given.of(spec("dense")) == 100
    assert given.of(spec("vector")) is None
    assert given.of(spec("convolution")) == DEFAULTS["convolution"]


def test_overrides_go_ahead_and_the_first_found_counts():
    given = setting(overrides={r"^first/": 20, "kernel$": None})
    assert given.of(spec(path="first/kernel")) == 20
    assert given.of(spec(path="second/kernel")) is None
    assert given.of(spec("vector", "second/bias")) == DEFAULTS["vector"]


@pytest.mark.parametrize("value", [0, 1000, "50"])
def test_a_value_that_is_not_good_is_refused_by_its_name(value):
    message = r"Method: sizes{} must be from 1 to 999, or None to send .*; received {!r}\."
    with pytest.raises(ValueError, match=message.format("", value)):
        setting(value)
    with pytest.raises(ValueError, match=message.format(" of 'dense'", value)):
        setting({"dense": value})
    with pytest.raises(ValueError, match=message.format(" of 'bias'", value)):
        setting(overrides={"bias": value})


def test_an_unknown_layer_kind_is_refused():
    with pytest.raises(ValueError, match="sizes: unknown layer kind 'conv'; expected one of conv"):
        setting({"conv": 50})


@pytest.mark.parametrize("pattern", ["(", 3])
def test_a_pattern_that_is_no_regular_expression_is_refused(pattern):
    with pytest.raises(ValueError, match="in overrides is not a regular expression"):
        setting(overrides={pattern: 50})
