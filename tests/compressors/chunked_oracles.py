"""Takes steps of ScaleCom and RandomK in NumPy, for all replicas at once."""

from __future__ import annotations

import dataclasses
import fractions
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tests.compressors.lockstep import Arrays, Outcome, State
from tests.reference import chunks, payload, value_bits
from tests.reference.leader import leader
from tf_gradcomp.compressors import RandomK, ScaleCom
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.policy import GradientSpec


def scalecom_oracle(
    compressor: ScaleCom,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
    settings: Sequence[int] | None = None,
) -> Outcome:
    rates = settings or compressor.settings(specs)
    leads = leader(step, len(gradients))
    pairs = zip(_flat(state[leads][RESIDUAL]), _flat(gradients[leads]), strict=True)
    offsets = [chunks.select(m + g, rate) for (m, g), rate in zip(pairs, rates, strict=True)]
    entry_bits, scale_bits, send = [], [], _as_floats
    size, few = len(gradients), compressor.value_bits
    for rate in rates:
        offset_bits = fractions.Fraction((rate - 1).bit_length(), size)
        entry_bits.append((few if rate > 1 else 32) + offset_bits)
        scale_share = fractions.Fraction(32, size if few == 16 else 1)
        scale_bits.append(scale_share if rate > 1 and few < 32 else 0)
    if few < 32:
        fingerprint, plan = compressor.fingerprint(specs), payload.plan_of(rates)
        header = payload.Header(value_bits.METHOD, fingerprint, step, len(specs), plan)
        send = functools.partial(_in_few_bits, few, rates, leads, header)
    return chunked_oracle(
        state, gradients, rates, offsets, entry_bits, scale_bits, compressor.beta, send
    )


def random_k_oracle(
    compressor: RandomK,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
    settings: Sequence[int] | None = None,
) -> Outcome:
    chunk_sizes = settings or [round(1 / (compressor.density.of(spec) or 1)) for spec in specs]
    sizes = [spec.elements for spec in specs]
    offsets = chunks.draw(sizes, chunk_sizes, step)
    bits, none = [32] * len(specs), [0] * len(specs)
    return chunked_oracle(state, gradients, chunk_sizes, offsets, bits, none)


def _flat(tensors: Arrays) -> Arrays:
    return [tensor.reshape(-1).astype(np.float32) for tensor in tensors]


def _shaped(vectors: Arrays, like: Arrays) -> Arrays:
    return [v.reshape(tensor.shape) for v, tensor in zip(vectors, like, strict=True)]


class Sent(NamedTuple):
    """Returns the values that the chosen entries became, by replica and tensor."""

    payloads: Arrays
    totals: Arrays  # by tensor
    finite: bool
    rests: Sequence[Arrays | None]  # by replica and tensor; None: nothing is left


def _as_floats(taken: Sequence[Arrays], flags: Sequence[bool]) -> Sent:
    given = [
        np.concatenate([*values, [0 if flag else np.nan]]).astype(np.float32)
        for values, flag in zip(taken, flags, strict=True)
    ]
    with np.errstate(over="ignore"):
        totals = functools.reduce(np.add, given)
    parts = np.split(totals[:-1], np.cumsum([part.size for part in taken[0]]))[: len(taken[0])]
    return Sent(given, parts, bool(np.isfinite(totals).all()), [None] * len(taken))


def _in_few_bits(
    bits: int,
    chunk_sizes: Sequence[int],
    leads: int,
    header: payload.Header,
    taken: Sequence[Arrays],
    flags: Sequence[bool],
) -> Sent:
    taken = [
        [values if flag else np.zeros_like(values) for values in replica_values]
        for replica_values, flag in zip(taken, flags, strict=True)
    ]
    coded = [i for i, size in enumerate(chunk_sizes) if size > 1 and taken[0][i].size]
    parts = [[replica_values[i] for i in coded] for replica_values in taken]
    if bits == 16:
        payloads, sent, sums = _summed(parts, leads, flags)
    else:
        payloads, sent, sums = _gathered(parts, bits, header, flags)
    rests = [[np.zeros_like(values) for values in replica_values] for replica_values in taken]
    with np.errstate(over="ignore"):
        totals = [
            functools.reduce(np.add, replica_values) for replica_values in zip(*taken, strict=True)
        ]
    for index, i in enumerate(coded):
        totals[i] = sums[index]
        for left, had, given in zip(rests, taken, sent, strict=True):
            left[i] = had[i] - given[index]
    finite = all(flags) and all(np.isfinite(total).all() for total in totals)
    return Sent(payloads, totals, finite, rests)


def _summed(
    parts: Sequence[Arrays], leads: int, flags: Sequence[bool]
) -> tuple[Arrays, list[Arrays], Arrays]:
    """Returns the 16-bit terms of the replicas, their values, and the sums; by scale."""
    scales = [value_bits.largest(values) for values in parts[leads]]
    shares = [value_bits.shares(replica_shares, scales, len(parts)) for replica_shares in parts]
    payloads = [
        np.concatenate([*replica_shares, [0 if flag else np.nan]]).astype(np.float16)
        for replica_shares, flag in zip(shares, flags, strict=True)
    ]
    sent = [list(map(np.multiply, scales, replica_shares)) for replica_shares in shares]
    sums = [functools.reduce(np.add, part_shares) for part_shares in zip(*shares, strict=True)]
    return payloads, sent, list(map(np.multiply, scales, sums))


def _gathered(
    parts: Sequence[Arrays], bits: int, header: payload.Header, flags: Sequence[bool]
) -> tuple[Arrays, list[Arrays], Arrays]:
    """The payloads of fewer bits, what each says, and the sums; by scale."""
    bodies = [value_bits.encode(part, bits) for part in parts]
    flagged = dataclasses.replace(header, flags=payload.NON_FINITE)
    payloads = [
        payload.write(header, bytes(body)) if flag else payload.write(flagged, bytes(body.nbytes))
        for body, flag in zip(bodies, flags, strict=True)
    ]
    sizes = [values.size for values in parts[0]]
    sent = [value_bits.decode(body, sizes, bits) for body in bodies]
    with np.errstate(over="ignore"):
        sums = [functools.reduce(np.add, part_values) for part_values in zip(*sent, strict=True)]
    return payloads, sent, sums


def chunked_oracle(
    state: Sequence[State],
    gradients: Sequence[Arrays],
    chunk_sizes: Sequence[int],
    offsets: Arrays,
    entry_bits: Sequence[fractions.Fraction | int],
    scale_bits: Sequence[fractions.Fraction | int],
    beta: float = 1.0,
    send: Callable[[Sequence[Arrays], Sequence[bool]], Sent] = _as_floats,
) -> Outcome:
    """The outcome of a step in which the entries at `offsets` are chosen.

    Each of them takes `entry_bits`, and the scale of a tensor `scale_bits`, by tensor.
    """
    at = [chunks.places(o, size) for o, size in zip(offsets, chunk_sizes, strict=True)]
    had = [_flat(replica[RESIDUAL]) for replica in state]
    new = [_flat(replica) for replica in gradients]
    sums = [[m + g for m, g in zip(ms, gs, strict=True)] for ms, gs in zip(had, new, strict=True)]
    flags = [all(np.isfinite(y).all() for y in ys) for ys in sums]
    taken = [[y[i] for y, i in zip(ys, at, strict=True)] for ys in sums]
    sent = send(taken, flags)
    whole = [np.zeros_like(m) for m in had[0]]
    after = []
    for ms, gs, flag, rests in zip(had, new, flags, sent.rests, strict=True):
        if all(flags):
            arguments = zip(ms, gs, at, rests or [None] * len(at), strict=True)
            left = [chunks.keep(m, g, i, beta, rest) for m, g, i, rest in arguments]
        else:
            left = [m + np.float32(beta) * g if flag else m for m, g in zip(ms, gs, strict=True)]
        after.append({RESIDUAL: _shaped(left, gradients[0])})
    if sent.finite:
        for vector, i, total in zip(whole, at, sent.totals, strict=True):
            vector[i] = total
    reduced = _shaped(whole, gradients[0])
    tensor_bytes = [
        int((i.size * bit + scale_bit_count) / 8) if i.size else 0
        for i, bit, scale_bit_count in zip(at, entry_bits, scale_bits, strict=True)
    ]
    size = len(gradients)
    counted = np.array(tensor_bytes, np.int64)
    return Outcome([reduced] * size, [sent.finite] * size, after, sent.payloads, [counted] * size)
