"""The header of payloads whose body is plain TensorFlow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tf_gradcomp.ops import payload

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[2]


def plain(name):
    return name.replace("_", "").lower()


def test_numbers_of_methods_are_equal_in_the_format_the_kernels_and_python():
    header = (ROOT / "custom_ops/kernels/payload.h").read_text()
    native = {plain(name): int(number) for name, number in re.findall(r"  k(\w+) = (\d+),", header)}
    (row,) = re.findall(r"\| method \|.*", (ROOT / "docs/payload_format.md").read_text())
    documented = {plain(name): int(number) for number, name in re.findall(r"(\d+): (\w+)", row)}
    python = {
        plain(name): value
        for name, value in vars(payload).items()
        if name.isupper() and not name.startswith("_")
    }
    assert documented == native
    assert sorted(native.values()) == list(range(1, len(native) + 1))
    assert python.items() <= native.items()
