"""The ops of CountSketch: sketches of a vector, and the entries that are large in summed sketches.

Entry i of row r has word i of Philox 4x32-10 with the key `seed` and the counters from (r * 2^40,
step) on. Its lower 31 bits modulo the number of columns are the entry's column, and its highest bit
is the entry's sign. `tests.reference.count_sketch` computes the same in NumPy.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tf_gradcomp.ops import library


class SketchSettings(NamedTuple):
    """The settings of a sketch.

    Attributes:
        step: int64 scalar; each step draws another sketch.
        seed: From 0 to 2^63 - 1.
        rows: 1, 3 or 5.
        columns: Sums in each row.
    """

    step: tf.Tensor
    seed: int
    rows: int
    columns: int


def count_sketch(values: tf.Tensor, settings: SketchSettings) -> tf.Tensor:
    """Adds each entry, with a random sign, to a random sum of each row.

    Args:
        values: float32; the entries are added in their order.
        settings: Equal on all replicas that sum their sketches.

    Returns:
        float32 [rows * columns], row by row.
    """
    return library.load().count_sketch(values=values, **settings._asdict())


def count_sketch_largest(
    sums: tf.Tensor, settings: SketchSettings, *, size: int, count: int
) -> tf.Tensor:
    """Finds the entries whose estimates have the largest magnitudes.

    An estimate is the median over the rows of the entry's sum with its sign. A sum of NaN, which
    overflows make, counts as infinite.

    Args:
        sums: float32 [rows * columns], the sum of sketches.
        settings: Of the sketches.
        size: Entries in each sketched vector, below 2^31.
        count: Entries to find, up to `size`.

    Returns:
        Their places, int32 [count], by descending magnitude; of equal magnitudes, the first.
    """
    return library.load().count_sketch_largest(
        sums=sums, size=size, count=count, **settings._asdict()
    )
