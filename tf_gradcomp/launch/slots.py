"""Decides which workers of a job take part in its next run, after one of them has died."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tf_gradcomp.launch.result import JobResult


class Slots:
    """The places for a job's workers: a host, and GPUs. The first run uses all of them, in order.

    A run that dies without a save is blamed on the slot of its first failed worker. A slot that is
    blamed twice is left out until the workers of the other slots have saved. If such a slot returns
    and is blamed before it has taken part in a save, it is left out at once.

    A run is blamed on the program if workers of several slots failed with the same exception, in
    this run or in earlier ones. It is also blamed if the workers only lost each other, or if the
    job may not run with fewer workers.

    Args:
        number: The number of slots.
        least: The least number of workers with which the job may run.
    """

    def __init__(self, number: int, least: int) -> None:
        self.number = number
        self.least = least
        self._blamed: dict[int | None, JobResult] = {}  # by slot; under None, the program
        self._left_out: set[int] = set()

    def usable(self, present: Collection[int], used: Collection[int]) -> list[int]:
        """Returns the slots for the next run.

        Args:
            present: The slots on hosts that can run workers.
            used: The slots of the last run. If hosts of some were lost, the program is not to
                blame for the end of that run.
        """
        if not {*used} <= {*present}:
            self._blamed.pop(None, None)
        return [slot for slot in range(self.number) if slot in {*present} - self._left_out]

    def forgive(self, used: Sequence[int]) -> None:
        """Takes the end of a run that has saved."""
        for slot in (None, *used):
            self._blamed.pop(slot, None)
        self._left_out.clear()

    def blame(self, result: JobResult, used: Sequence[int]) -> tuple[int | None, JobResult | None]:
        """Takes the end of a run that has died and has saved nothing.

        Returns:
            The slot that is left out from now on, if any. And if the next run would die like this
            one, the end of the first run that died so.
        """
        slot = self._guilty(result, used)
        if slot not in self._blamed:
            self._blamed[slot] = result
            return None, None
        if slot is None or len(used) <= self.least:
            return None, self._blamed[slot]
        self._left_out.add(slot)
        return slot, None

    def _guilty(self, result: JobResult, used: Sequence[int]) -> int | None:
        failed = result.first_failure
        if failed is None or failed.lost_another or self.least == self.number:
            return None
        slot = used[failed.index]
        earlier = (end.first_failure for other, end in self._blamed.items() if other != slot)
        others = (end for end in (*result.ends, *earlier) if end is not None and end is not failed)
        return None if any(map(failed.raised_as, others)) else slot
