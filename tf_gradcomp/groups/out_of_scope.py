"""Makes variables of a process's own within a strategy's scope."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def out_of_scope(make: Callable[[], Result]) -> Result:
    """Calls `make` outside the current strategy's scope and returns its result.

    Within the scope, TensorFlow replicates each variable, which synchronizes the workers. A scope
    belongs to one thread, so a new thread is outside every scope.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
