"""Takes steps of max-norm quantization in NumPy, for all replicas at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from tests.compressors.chunked_oracles import Sent, chunked_oracle
from tests.compressors.lockstep import Arrays, Outcome, State
from tests.reference import chunks, max_norm, payload
from tf_gradcomp.compressors import MaxNormQuantization
from tf_gradcomp.policy import GradientSpec


def max_norm_oracle(
    compressor: MaxNormQuantization,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
    settings: Sequence[int] | None = None,
) -> Outcome:
    bits = [_bits(compressor, spec) for spec in specs]
    if settings:
        bits = [[setting, *bit[1:]] for setting, bit in zip(settings, bits, strict=True)]
    size, chunk_size = len(gradients), round(1 / (compressor.density or 1))
    header = payload.Header(
        max_norm.METHOD,
        compressor.fingerprint(specs),
        step,
        len(specs),
        payload.plan_of([bit[0] if bit else 0 for bit in bits]),
    )
    chunk_sizes = [chunk_size] * len(specs)
    offsets = chunks.draw([spec.elements for spec in specs], chunk_sizes, step)
    nothing = [0] * len(specs)
    outcome = chunked_oracle(
        state,
        gradients,
        chunk_sizes,
        offsets,
        nothing,
        nothing,
        send=functools.partial(_send, bits, header),
    )
    tensor_bytes = []
    for bit, drawn in zip(bits, offsets, strict=True):
        if not bit:
            tensor_bytes.append(4 * drawn.size)
            continue
        widths = [max_norm.width_of_codes(bit[0], size), *([size.bit_length()] * len(bit))]
        sent = [max_norm.words(drawn.size, width) for width in widths[: len(bit)]]
        tensor_bytes.append(4 + 8 * sum(sent))
    return outcome._replace(tensor_bytes=[np.array(tensor_bytes, np.int64)] * size)


def _bits(compressor: MaxNormQuantization, spec: GradientSpec) -> list[int]:
    bits = compressor.bits.of(spec)
    if bits is None or spec.elements == 1:
        return []
    return [bits] if isinstance(bits, int) else list(bits)


def _send(
    bits: Sequence[Sequence[int]],
    header: payload.Header,
    taken: Sequence[Arrays],
    flags: Sequence[bool],
) -> Sent:
    size, figures = len(taken), range(len(bits))
    rests = [[np.zeros_like(values) for values in replica_values] for replica_values in taken]
    totals = [np.zeros_like(values) for values in taken[0]]
    maxima: list[list[np.float32]] = [[] for _ in taken]
    words: list[list[np.ndarray]] = [[] for _ in taken]
    for i in figures:
        values = [replica_values[i] for replica_values in taken]
        if not bits[i]:
            with np.errstate(over="ignore", invalid="ignore"):
                totals[i] = functools.reduce(np.add, values)
            continue
        for replica_maxima, vectors in zip(maxima, values, strict=True):
            replica_maxima.append(np.abs(vectors).max(initial=0))
        scale = (
            max(replica_maxima[-1] for replica_maxima in maxima) if all(flags) else np.float32(0)
        )
        shares = [max_norm.shares(vectors, scale) for vectors in values]
        steps = max_norm.steps_of(shares, bits[i])
        codes = [
            max_norm.rounded(share * steps, max_norm.uniform(replica, i, header.step, share.size))
            for replica, share in enumerate(shares)
        ]
        used = scale if scale >= max_norm.SMALLEST else np.float32(0)
        with np.errstate(over="ignore"):
            totals[i] = used * (functools.reduce(np.add, codes) / steps)
        width = max_norm.width_of_codes(bits[i][0], size)
        for replica, code in enumerate(codes):
            rests[replica][i] = values[replica] - used * (code / steps)
            words[replica].append(max_norm.pack(code + (2 ** bits[i][0] - 1), width))
    whole = [i for i in figures if not bits[i]]
    payloads = []
    for replica, flag in enumerate(flags):
        if whole and sum(taken[0][i].size for i in whole):
            vectors = np.concatenate([taken[replica][i] for i in whole])
            payloads.append(vectors if all(flags) else np.zeros_like(vectors))
        elif sum(map(len, words[replica])):
            payloads.append(np.concatenate(words[replica]))
        else:
            body = np.array(maxima[replica], np.float32)
            flagged = dataclasses.replace(header, flags=0 if flag else payload.NON_FINITE)
            payloads.append(payload.write(flagged, body.tobytes()))
    finite = all(flags) and all(np.isfinite(total).all() for total in totals)
    return Sent(payloads, totals, finite, rests)
