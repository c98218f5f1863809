"""The compressors that the conformance tests run, each with its NumPy oracle.

A new method adds its lines to `METHODS`, and an oracle: a function that returns what each replica
sends, keeps and gets in one step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tests.compressors.lockstep import Arrays, Outcome
from tf_gradcomp.compressors import AdaComp, Compressor
from tf_gradcomp.policy import LAYER_KINDS, GradientSpec
from tf_gradcomp.reference import adacomp

Oracle = Callable[
    [Compressor, Sequence[GradientSpec], Sequence[Arrays], Sequence[Arrays], int], Outcome
]


@dataclasses.dataclass(frozen=True)
class Method:
    """A compressor with settings to be tested, and what it must do."""

    label: str
    compressor: Compressor
    oracle: Oracle


def adacomp_oracle(
    compressor: AdaComp,
    specs: Sequence[GradientSpec],
    residuals: Sequence[Arrays],
    gradients: Sequence[Arrays],
    step: int,
) -> Outcome:
    bin_sizes = [compressor.bin_size(spec) or 0 for spec in specs]
    shapes = [spec.shape for spec in specs]
    encoded = [
        adacomp.encode_payload(
            of_one,
            grads,
            step,
            bin_sizes=bin_sizes,
            fingerprint=compressor.fingerprint(specs),
            scale_factor=compressor.scale_factor,
        )
        for of_one, grads in zip(residuals, gradients, strict=True)
    ]
    payloads = [payload for payload, _, _ in encoded]
    left = [rest for _, rest, _ in encoded]
    sent = [adacomp.decode_payload(payload, shapes, bin_sizes) for payload in payloads]
    finite = all(values is not None for values in sent)
    if finite:
        reduced = [np.zeros(shape, np.float32) for shape in shapes]
        for of_one in sent:
            reduced = [total + values for total, values in zip(reduced, of_one, strict=True)]
    else:
        reduced = [np.zeros(shape, np.float32) for shape in shapes]
        left = [
            rest if values is None else [r + v for r, v in zip(rest, values, strict=True)]
            for rest, values in zip(left, sent, strict=True)
        ]
    size = len(encoded)
    tensor_bytes = [np.array(n, np.int64) for _, _, n in encoded]
    return Outcome([reduced] * size, [finite] * size, left, payloads, tensor_bytes)


METHODS = [
    Method("AdaComp", AdaComp(), adacomp_oracle),
    Method("AdaComp, bins of 7", AdaComp(bin_sizes=7), adacomp_oracle),
    Method("AdaComp, bins of 1", AdaComp(bin_sizes=1), adacomp_oracle),
    Method("AdaComp, whole", AdaComp(bin_sizes=dict.fromkeys(LAYER_KINDS)), adacomp_oracle),
    Method("AdaComp, scale factor 1", AdaComp(scale_factor=1), adacomp_oracle),
    Method("AdaComp, overrides", AdaComp(overrides={"_0": 10, "_2": None}), adacomp_oracle),
]
