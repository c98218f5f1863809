"""Counts a step's resources other than time; the workers of all frameworks import this."""

from __future__ import annotations

import resource
from typing import NamedTuple


class Used(NamedTuple):
    """Resources that this process has used so far, or in between.

    Attributes:
        cpu: Seconds of CPU time.
        page_faults: Pages that the kernel mapped without reading a file.
        switches: Context switches.
    """

    cpu: float
    page_faults: int
    switches: int

    @classmethod
    def now(cls) -> Used:
        """Returns what has been used so far."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(
            usage.ru_utime + usage.ru_stime, usage.ru_minflt, usage.ru_nvcsw + usage.ru_nivcsw
        )

    def since(self, before: Used) -> Used:
        """Returns what has been used since then."""
        return Used(*(now - then for now, then in zip(self, before, strict=True)))
