"""Jobs, numbers of workers, links and contenders that the network benchmark measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import jobs
from links import LOOPBACK, SPEEDS, UNSHAPED

from tf_gradcomp import compressors
from tf_gradcomp.compressors.auto import CANDIDATES

AUTO = "auto"  # chooses again on each link
# Without plans, L-GreCo is another of these; and LGC begins with hundreds of dense steps.
_LEFT_OUT = (compressors.LGreCo.name, compressors.LGC.name)
ALTERNATING = "power_sgd(alternate=True)"  # sends half of PowerSGD's bytes, in one collective
METHODS = [*(name for name in compressors.names() if name not in _LEFT_OUT), ALTERNATING]
EVERYONE = (jobs.ALL_REDUCE, jobs.FLOAT16, *METHODS, jobs.NOTHING)
SOME = (
    *(jobs.ALL_REDUCE, jobs.FLOAT16, *CANDIDATES, "scalecom", "power_sgd", AUTO, jobs.NOTHING),
    *jobs.HOROVOD,
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A job on some number of workers, on some links, by some contenders."""

    job: str
    workers: int
    links: Sequence[str]
    contenders: Sequence[str]

    @property
    def by_framework(self) -> dict[str, list[str]]:
        """The contenders that each framework runs, where it runs any."""
        of = {name: jobs.framework(name) for name in self.contenders}
        return {one: [n for n in of if of[n] == one] for one in jobs.DENSE if one in of.values()}


_OTHERS = (*jobs.HOROVOD, *jobs.TORCH)
_ALL_LINKS = (*SPEEDS, UNSHAPED)
_FAST = ("100 Mbit/s", "1 Gbit/s", UNSHAPED)  # at 10 Mbit/s, a large dense step takes minutes
FULL = (
    Cell(jobs.EXCHANGE, 2, _FAST, (*EVERYONE, *_OTHERS)),
    Cell(jobs.MLP, 2, _ALL_LINKS, (*EVERYONE, jobs.GOSSIP, *_OTHERS)),
    Cell(jobs.LSTM, 2, _ALL_LINKS, SOME),
    Cell(jobs.RESNET, 2, _ALL_LINKS, SOME),
    Cell(jobs.EXCHANGE, 4, _FAST, (*EVERYONE, *_OTHERS)),
    Cell(jobs.MLP, 4, _FAST, (*EVERYONE, jobs.GOSSIP, *_OTHERS)),
    Cell(jobs.LSTM, 4, _FAST, SOME),
    Cell(jobs.RESNET, 4, _FAST, SOME),
)
SHORT = (
    Cell(
        jobs.EXCHANGE,
        2,
        ("100 Mbit/s", UNSHAPED),
        (jobs.ALL_REDUCE, "adacomp", "scalecom", AUTO, jobs.NOTHING),  # dense takes 10 s a step
    ),
    Cell(
        jobs.MLP,
        2,
        ("100 Mbit/s", UNSHAPED),
        (jobs.ALL_REDUCE, *CANDIDATES, "scalecom", AUTO, jobs.NOTHING, *_OTHERS),
    ),
)


def chosen(
    cells: Sequence[Cell],
    *,
    only_jobs: Collection[str] = (),
    only_workers: Collection[int] = (),
    only_links: Collection[str] = (),
    only_contenders: Collection[str] = (),
    frameworks: Collection[str] = tuple(jobs.DENSE),
    shaped: bool = True,
) -> list[Cell]:
    """Returns the requested parts of the cells that can be measured here."""

    def keep(cell: Cell) -> Cell:
        links = [link for link in cell.links if not only_links or link in only_links]
        there = [name for name in cell.contenders if jobs.framework(name) in frameworks]
        names = [name for name in there if not only_contenders or name in only_contenders]
        dense = [jobs.DENSE[jobs.framework(name)] for name in names]  # all are compared with it
        names = [name for name in there if name in {*names, *dense}]
        return Cell(cell.job, cell.workers, links if shaped else [LOOPBACK], names)

    kept = [
        keep(cell)
        for cell in cells
        if (not only_jobs or cell.job in only_jobs)
        and (not only_workers or cell.workers in only_workers)
    ]
    return [cell for cell in kept if cell.links and cell.contenders]
