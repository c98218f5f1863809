"""Something more to do for each object of a class of Keras."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any


def after_init(class_: type, then: Callable[[Any, Mapping[str, Any]], None]) -> None:
    """Has `then(object, keyword arguments)` called for each object of a class that is made."""
    original = class_.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        then(self, kwargs)

    class_.__init__ = hooked  # type: ignore[misc]
