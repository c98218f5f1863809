"""Compressors are known by name."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tf_gradcomp import compressors
from tf_gradcomp.compressors import registry

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))


def subclass_named(new_name):
    class Halves(compressors.NoCompression):
        name: ClassVar[str] = new_name

    return Halves


def test_a_subclass_with_a_name_is_known_by_it_however_it_is_spelled():
    created = subclass_named("Halves")
    for spelled in ("Halves", "halves", "HALVES(warmup_steps=3)"):
        assert type(compressors.get(spelled)) is created


def test_a_name_that_another_method_has_is_refused():
    with pytest.raises(ValueError, match=r"'AdaComp' of .*Halves is already taken by AdaComp"):
        subclass_named("AdaComp")
    assert type(compressors.get("adacomp")) is compressors.AdaComp


def test_a_class_may_be_defined_again():
    """As a notebook does whose cell is run twice."""
    subclass_named("halves")
    again = subclass_named("halves")
    assert type(compressors.get("halves")) is again


@pytest.mark.parametrize("base", [compressors.Compressor, compressors.TopK])
def test_a_class_without_its_own_name_is_refused_at_its_definition(base):
    """A file of it would be read as its base class."""

    class Nameless(base):
        def reduce(self, inputs):
            yield from ()

    with pytest.raises(
        TypeError, match="Nameless does not define its own `name`; add one to the class"
    ):
        Nameless()
