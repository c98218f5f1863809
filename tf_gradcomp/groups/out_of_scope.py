"""Makes variables of a process's own within a strategy's scope."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def out_of_scope(make: Callable[[], Result]) -> Result:
    """What `make` returns, called outside of the current strategy's scope.

    Within it, TensorFlow replicates each variable, for which workers have to meet. A scope is a
    thread's, so that another thread is in none.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
