"""Settings of the GNU C library's `malloc` for workers, so that memory is mapped once.

By default `malloc` maps new pages for each large tensor, the kernel fills the pages with zeros on
first use, and `free` unmaps them. In a training step that may take longer than the arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from tf_gradcomp.environment import MALLOC

TUNABLES = "GLIBC_TUNABLES"
TUNED, DEFAULT = "tuned", "default"
_SETTINGS = (
    "glibc.malloc.hugetlb=1",  # ask for huge pages
    "glibc.malloc.mmap_max=0",  # take large tensors from the heap
    "glibc.malloc.trim_threshold=1000000000000",  # keep freed memory
    "glibc.malloc.arena_max=1",  # let threads reuse each other's memory
)


def settings(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment variables that tune a worker's `malloc`.

    `GRADCOMP_MALLOC=default` turns the tuning off, and the user's own `GLIBC_TUNABLES` wins.
    """
    wanted = env.get(MALLOC, TUNED)
    if wanted not in (TUNED, DEFAULT):
        raise ValueError(f"{MALLOC}: expected {TUNED} or {DEFAULT}; received {wanted!r}.")
    if wanted == DEFAULT or TUNABLES in env:
        return {}
    return {TUNABLES: ":".join(_SETTINGS)}
