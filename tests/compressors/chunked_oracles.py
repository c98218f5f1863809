"""One step of ScaleCom and RandomK in NumPy: all replicas at once."""

from __future__ import annotations

import dataclasses
import fractions
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tests.compressors.lockstep import Arrays, Outcome, State
from tf_gradcomp.compressors import RandomK, ScaleCom
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.policy import VECTOR, GradientSpec
from tf_gradcomp.reference import chunks, payload, value_bits


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
    leader = step % len(gradients)
    had = chunks.joined(state[leader][RESIDUAL], groups)
    led = [m + g for m, g in zip(had, chunks.joined(gradients[leader], groups), strict=True)]
    offsets = [chunks.select(y, size) for y, size in zip(led, chunk_sizes, strict=True)]
    bits, of_scale = [], []
    for rate in rates:
        offset_bits = fractions.Fraction((rate - 1).bit_length(), len(gradients))
        bits.append((compressor.value_bits if rate > 1 else 32) + offset_bits)
        if rate == 1 or compressor.value_bits == 32:
            of_scale.append(0)
        else:
            of_scale.append(
                fractions.Fraction(32, len(gradients) if compressor.value_bits == 16 else 1)
            )
    send = _as_floats
    if compressor.value_bits < 32:
        fingerprint = compressor.fingerprint(specs)
        header = payload.Header(
            value_bits.METHOD, fingerprint, step, len(specs), payload.plan_of(rates)
        )
        send = functools.partial(
            _in_few_bits, compressor.value_bits, chunk_sizes, leader, header
        )
    return chunked_oracle(
        specs,
        state,
        gradients,
        groups,
        chunk_sizes,
        offsets,
        bits,
        of_scale,
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
    bits, of_scale = [32] * len(specs), [0] * len(specs)
    return chunked_oracle(
        specs, state, gradients, groups, chunk_sizes, offsets, bits, of_scale
    )


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
    leader: int,
    header: payload.Header,
    taken: Sequence[Arrays],
    flags: Sequence[bool],
) -> Sent:
    is_coded = [size > 1 and part.size > 0 for size, part in zip(chunk_sizes, taken[0], strict=True)]
    coded = [
        [part if flag else np.zeros_like(part) for part in itertools.compress(parts, is_coded)]
        for parts, flag in zip(taken, flags, strict=True)
    ]
    if bits == 16:
        most = value_bits.most_of(len(taken))
        scales = [value_bits.largest(part) for part in coded[leader]]
        levels = [
            [value_bits.levels(part, scale, most) for part, scale in zip(parts, scales, strict=True)]
            for parts in coded
        ]
        payloads = [
            np.concatenate([*parts, [0 if flag else np.nan]]).astype(np.float16)
            for parts, flag in zip(levels, flags, strict=True)
        ]
        of_all = [
            [value_bits.value(part, scale, most) for part, scale in zip(parts, scales, strict=True)]
            for parts in [*levels, [functools.reduce(np.add, part) for part in zip(*levels)]]
        ]
        sent, sums = of_all[:-1], of_all[-1]
    else:
        bodies = [value_bits.encode(parts, bits) for parts in coded]
        flagged = dataclasses.replace(header, flags=payload.NON_FINITE)
        payloads = [
            payload.write(header if flag else flagged, bytes(body) if flag else bytes(body.nbytes))
            for body, flag in zip(bodies, flags, strict=True)
        ]
        sizes = [part.size for part in coded[0]]
        sent = [value_bits.decode(body, sizes, bits) for body in bodies]
        with np.errstate(over="ignore"):
            sums = [functools.reduce(np.add, of_part) for of_part in zip(*sent, strict=True)]
    rests, totals = [[np.zeros_like(part) for part in parts] for parts in taken], []
    next_coded = iter(range(len(sums)))
    for group, has_scale in enumerate(is_coded):
        if has_scale:
            number = next(next_coded)
            totals.append(sums[number])
            for of_one, had, given in zip(rests, coded, sent, strict=True):
                of_one[group] = had[number] - given[number]
        else:
            with np.errstate(over="ignore"):
                totals.append(functools.reduce(np.add, [parts[group] for parts in taken]))
    finite = all(flags) and all(np.isfinite(total).all() for total in totals)
    return Sent(payloads, totals, finite, rests)


def chunked_oracle(
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    groups: list[int],
    chunk_sizes: list[int],
    offsets: Arrays,
    bits: Sequence[fractions.Fraction | int],
    of_scale: Sequence[fractions.Fraction | int],
    beta: float = 1.0,
    send: Callable[[Sequence[Arrays], Sequence[bool]], Sent] = _as_floats,
) -> Outcome:
    """The outcome of a step in which the entries at `offsets` are chosen.

    Each of them takes `bits`, and the scale of a group `of_scale`, by the tensors in it.
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
        if sent.finite:
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
    for spec, group, of_entry, scale_bits in zip(specs, groups, bits, of_scale, strict=True):
        number = number_of[group]
        share = fractions.Fraction(spec.elements, max(1, whole[number].size))
        tensor_bytes.append(int((at[number].size * of_entry + scale_bits) * share / 8))
    size = len(gradients)
    counted = np.array(tensor_bytes, np.int64)
    return Outcome([reduced] * size, [sent.finite] * size, after, sent.payloads, [counted] * size)
