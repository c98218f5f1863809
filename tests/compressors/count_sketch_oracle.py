"""Takes steps of CountSketch in NumPy, for all replicas at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from tests.compressors.lockstep import Arrays, Outcome, State
from tests.reference import count_sketch
from tf_gradcomp.compressors import CountSketch
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.policy import VECTOR, GradientSpec


def count_sketch_oracle(
    compressor: CountSketch,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
) -> Outcome:
    size = len(gradients)
    sums = [
        [m + g.astype(np.float32) for m, g in zip(local[RESIDUAL], grads, strict=True)]
        for local, grads in zip(state, gradients, strict=True)
    ]
    flags = [all(np.isfinite(y).all() for y in local) for local in sums]
    sketched = [spec.kind != VECTOR and spec.elements > 1 for spec in specs]
    elements = sum(spec.elements for spec, one in zip(specs, sketched, strict=True) if one)
    columns, count = count_sketch.sizes(elements, compressor.density)
    sent = count_sketch.ROWS * columns + count
    if sent >= elements:
        sketched = [False] * len(specs)
    flat = [_joined(local, sketched) for local in sums]
    whole = [_joined(local, [not one for one in sketched]) for local in sums]
    with np.errstate(over="ignore", invalid="ignore"):
        whole_sum = functools.reduce(np.add, whole)
    total, rests = np.zeros_like(flat[0]), [values.copy() for values in flat]
    if any(sketched):
        hashed = count_sketch.hashes(step, flat[0].size, columns)
        tables = [count_sketch.sketch(values, hashed, columns) for values in flat]
        with np.errstate(over="ignore", invalid="ignore"):
            table = functools.reduce(np.add, tables)
        indices = count_sketch.largest(count_sketch.estimates(table, hashed), count)
        payloads = [v[indices] if all(flags) else np.zeros(count, np.float32) for v in flat]
        with np.errstate(over="ignore"):
            total[indices] = functools.reduce(np.add, payloads)
        for rest in rests:
            rest[indices] = 0
    else:
        payloads = [
            np.concatenate([replica_values, [0 if flag else np.nan]]).astype(np.float32)
            for replica_values, flag in zip(whole, flags, strict=True)
        ]
    finite = all(flags) and bool(np.isfinite(total).all() and np.isfinite(whole_sum).all())
    if not finite:
        total, whole_sum = np.zeros_like(total), np.zeros_like(whole_sum)
    after = []
    for local, had, rest, flag in zip(sums, state, rests, flags, strict=True):
        if all(flags):
            left = _join(np.zeros_like(whole[0]), rest, sketched, local)
        else:
            left = local if flag else had[RESIDUAL]
        after.append({RESIDUAL: left})
    reduced = _join(whole_sum, total, sketched, sums[0])
    tensor_bytes = [
        4 * (spec.elements * sent // elements if one else spec.elements)
        for spec, one in zip(specs, sketched, strict=True)
    ]
    counted = np.array(tensor_bytes, np.int64)
    return Outcome([reduced] * size, [finite] * size, after, payloads, [counted] * size)


def _joined(tensors: Arrays, wanted: Sequence[bool]) -> np.ndarray:
    some = [tensor.reshape(-1) for tensor, one in zip(tensors, wanted, strict=True) if one]
    return np.concatenate([np.zeros(0, np.float32), *some])


def _join(whole: np.ndarray, sketched: np.ndarray, which: Sequence[bool], like: Arrays) -> Arrays:
    """Returns vectors of entries as tensors again."""
    tensors, indices = [], {False: 0, True: 0}
    for tensor, one in zip(like, which, strict=True):
        place = indices[one]
        indices[one] += tensor.size
        values = (sketched if one else whole)[place : place + tensor.size]
        tensors.append(values.reshape(tensor.shape))
    return tensors
