"""One step of ScaleCom and RandomK in NumPy: all replicas at once."""

from __future__ import annotations

import dataclasses
import fractions
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tests.compressors.lockstep import Arrays, Outcome, State
from tf_gradcomp.compressors import RandomK, ScaleCom
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.policy import VECTOR, GradientSpec
from tf_gradcomp.reference import chunks, payload, value_bits
from tf_gradcomp.reference.leader import leader


def scalecom_oracle(
    compressor: ScaleCom,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
    settings: Sequence[int] | None = None,
) -> Outcome:
    rates = settings or [compressor.rate(spec) for spec in specs]
    groups = groups_of(specs, rates)
    chunk_sizes = list(dict(zip(groups, rates, strict=True)).values())
    leads = leader(step, len(gradients))
    had = chunks.joined(state[leads][RESIDUAL], groups)
    led = [m + g for m, g in zip(had, chunks.joined(gradients[leads], groups), strict=True)]
    offsets = [chunks.select(y, size) for y, size in zip(led, chunk_sizes, strict=True)]
    entry_bits, scale_bits, send = [], [], _as_floats
    size, few = len(gradients), compressor.value_bits
    for rate in rates:
        offset_bits = fractions.Fraction((rate - 1).bit_length(), size)
        entry_bits.append((few if rate > 1 else 32) + offset_bits)
        of_scale = fractions.Fraction(32, size if few == 16 else 1)
        scale_bits.append(of_scale if rate > 1 and few < 32 else 0)
    if few < 32:
        fingerprint, plan = compressor.fingerprint(specs), payload.plan_of(rates)
        header = payload.Header(value_bits.METHOD, fingerprint, step, len(specs), plan)
        send = functools.partial(_in_few_bits, few, chunk_sizes, leads, header)
    return chunked_oracle(
        specs,
        state,
        gradients,
        groups,
        chunk_sizes,
        offsets,
        entry_bits,
        scale_bits,
        compressor.beta,
        send,
    )


def groups_of(specs: Sequence[GradientSpec], rates: Sequence[int]) -> list[int]:
    """Vectors of one rate are cut into chunks together."""
    numbers: dict[int | str, int] = {}
    return [
        numbers.setdefault(rate if spec.kind == VECTOR else spec.path, len(numbers))
        for spec, rate in zip(specs, rates, strict=True)
    ]


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
    offsets = chunks.draw(sizes, chunk_sizes, compressor.seed, step)
    groups = list(range(len(specs)))
    bits, none = [32] * len(specs), [0] * len(specs)
    return chunked_oracle(specs, state, gradients, groups, chunk_sizes, offsets, bits, none)


class Sent(NamedTuple):
    """What the chosen entries, by replica and group, became."""

    payloads: Arrays
    totals: Arrays  # by group
    finite: bool
    rests: Sequence[Arrays | None]  # by replica and group; None: nothing is left


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
        [values if flag else np.zeros_like(values) for values in of_one]
        for of_one, flag in zip(taken, flags, strict=True)
    ]
    coded = [i for i, size in enumerate(chunk_sizes) if size > 1 and taken[0][i].size]
    parts = [[of_one[i] for i in coded] for of_one in taken]
    if bits == 16:
        payloads, sent, sums = _summed(parts, leads, flags)
    else:
        payloads, sent, sums = _gathered(parts, bits, header, flags)
    rests = [[np.zeros_like(values) for values in of_one] for of_one in taken]
    with np.errstate(over="ignore"):
        totals = [functools.reduce(np.add, of_group) for of_group in zip(*taken, strict=True)]
    for number, i in enumerate(coded):
        totals[i] = sums[number]
        for left, had, given in zip(rests, taken, sent, strict=True):
            left[i] = had[i] - given[number]
    finite = all(flags) and all(np.isfinite(total).all() for total in totals)
    return Sent(payloads, totals, finite, rests)


def _summed(
    parts: Sequence[Arrays], leads: int, flags: Sequence[bool]
) -> tuple[Arrays, list[Arrays], Arrays]:
    """What replicas sum in 16 bits, what each has sent with it, and the sums; by scale."""
    scales = [value_bits.largest(values) for values in parts[leads]]
    shares = [value_bits.shares(of_one, scales, len(parts)) for of_one in parts]
    payloads = [
        np.concatenate([*of_one, [0 if flag else np.nan]]).astype(np.float16)
        for of_one, flag in zip(shares, flags, strict=True)
    ]
    sent = [list(map(np.multiply, scales, of_one)) for of_one in shares]
    sums = [functools.reduce(np.add, of_part) for of_part in zip(*shares, strict=True)]
    return payloads, sent, list(map(np.multiply, scales, sums))


def _gathered(
    parts: Sequence[Arrays], bits: int, header: payload.Header, flags: Sequence[bool]
) -> tuple[Arrays, list[Arrays], Arrays]:
    """The payloads of fewer bits, what each says, and the sums; by scale."""
    bodies = [value_bits.encode(of_one, bits) for of_one in parts]
    flagged = dataclasses.replace(header, flags=payload.NON_FINITE)
    payloads = [
        payload.write(header, bytes(body)) if flag else payload.write(flagged, bytes(body.nbytes))
        for body, flag in zip(bodies, flags, strict=True)
    ]
    sizes = [values.size for values in parts[0]]
    sent = [value_bits.decode(body, sizes, bits) for body in bodies]
    with np.errstate(over="ignore"):
        sums = [functools.reduce(np.add, of_part) for of_part in zip(*sent, strict=True)]
    return payloads, sent, sums


def chunked_oracle(
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    groups: list[int],
    chunk_sizes: list[int],
    offsets: Arrays,
    entry_bits: Sequence[fractions.Fraction | int],
    scale_bits: Sequence[fractions.Fraction | int],
    beta: float = 1.0,
    send: Callable[[Sequence[Arrays], Sequence[bool]], Sent] = _as_floats,
) -> Outcome:
    """The outcome of a step in which the entries at `offsets` are chosen.

    Each of them takes `entry_bits`, and the scale of a group `scale_bits`, by its tensors.
    """
    at = [chunks.places(o, size) for o, size in zip(offsets, chunk_sizes, strict=True)]
    had = [chunks.joined(of_one[RESIDUAL], groups) for of_one in state]
    new = [chunks.joined(of_one, groups) for of_one in gradients]
    sums = [[m + g for m, g in zip(ms, gs, strict=True)] for ms, gs in zip(had, new, strict=True)]
    flags = [all(np.isfinite(y).all() for y in ys) for ys in sums]
    taken = [[y[i] for y, i in zip(ys, at, strict=True)] for ys in sums]
    sent = send(taken, flags)
    whole = [np.zeros_like(m) for m in had[0]]
    after = []
    for ms, gs, flag, rests in zip(had, new, flags, sent.rests, strict=True):
        if all(flags):
            of_groups = zip(ms, gs, at, rests or [None] * len(at), strict=True)
            left = [chunks.keep(m, g, i, beta, rest) for m, g, i, rest in of_groups]
        else:
            left = [m + np.float32(beta) * g if flag else m for m, g in zip(ms, gs, strict=True)]
        after.append({RESIDUAL: chunks.separated(left, groups, gradients[0])})
    if sent.finite:
        for vector, i, total in zip(whole, at, sent.totals, strict=True):
            vector[i] = total
    reduced = chunks.separated(whole, groups, gradients[0])
    number_of = dict(zip(dict.fromkeys(groups), range(len(at)), strict=True))
    tensor_bytes = []
    for spec, group, *bits in zip(specs, groups, entry_bits, scale_bits, strict=True):
        number = number_of[group]
        share = fractions.Fraction(spec.elements, max(1, whole[number].size))
        tensor_bytes.append(int((at[number].size * bits[0] + bits[1]) * share / 8))
    size = len(gradients)
    counted = np.array(tensor_bytes, np.int64)
    return Outcome([reduced] * size, [sent.finite] * size, after, sent.payloads, [counted] * size)
