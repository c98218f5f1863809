"""The accuracy of the network benchmark's predictions, and the choices of `auto` based on them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from cells import AUTO
from network_rows import Record, milliseconds, rows

from tf_gradcomp.compressors.auto import CANDIDATES

CLOSE = 0.2  # of the measured median


def accuracy(tables: Mapping[tuple[Any, ...], Sequence[Record]]) -> str:
    """Returns a sentence on the number of close predictions; empty without predictions."""
    predicted = [
        abs(row.predicted / row.median - 1)
        for records in tables.values()
        for row in rows(records)
        if row.predicted is not None
    ]
    close = sum(error <= CLOSE for error in predicted)
    return (
        f"Of {len(predicted)} predictions {close} are within {CLOSE:.0%} of the measured median; "
        f"the median error is {statistics.median(predicted):.0%}."
        if predicted
        else ""
    )


def choices(tables: Mapping[tuple[Any, ...], Sequence[Record]]) -> Iterator[list[str]]:
    """Yields the cells of a table that compares the choice of `auto` with its best candidate."""
    for (job, workers, link), records in tables.items():
        by_name = {record["contender"]: record for record in records}
        candidates = [by_name[name] for name in CANDIDATES if name in by_name]
        if AUTO not in by_name or not candidates:
            continue
        best = min(candidates, key=milliseconds)
        median = milliseconds(best)
        low, high = 1e3 * np.quantile(best["seconds"], [0.25, 0.75])
        ratio = milliseconds(by_name[AUTO]) / median
        where = f"{job}, {workers} workers, {link}"
        yield [where, best["contender"], f"{ratio:.2f}", f"{(high - low) / median:.2f}"]
