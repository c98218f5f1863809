"""Other methods for one object, as long as a context lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def behaving_as(optimizer: Any, **overrides: Any) -> Iterator[None]:
    """Within this context, the optimizer has other methods and properties, by a derived class.

    Keras' optimizers call these on themselves, and Keras 3's refuse to have them set as attributes.
    """
    class_ = type(optimizer)
    derived = type(class_.__name__, (class_,), overrides)
    object.__setattr__(optimizer, "__class__", derived)
    try:
        yield
    finally:
        object.__setattr__(optimizer, "__class__", class_)
