"""The compressors that the conformance tests run, each with its NumPy oracle.

A new method adds its lines to `METHODS`, and an oracle: a function that returns what each replica
sends, keeps and gets in one step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tests.compressors.arc_top_k_oracle import arc_top_k_oracle
from tests.compressors.chunked_oracles import random_k_oracle, scalecom_oracle
from tests.compressors.count_sketch_oracle import count_sketch_oracle
from tests.compressors.gathered import gathered
from tests.compressors.lgc_oracle import lgc_oracle
from tests.compressors.lockstep import Arrays, Outcome, State
from tests.compressors.max_norm_oracle import max_norm_oracle
from tests.compressors.power_sgd_oracle import alternating_oracle, power_sgd_oracle
from tests.compressors.quantized_oracles import qsgd_oracle, sign_sgd_oracle
from tests.compressors.sidco_oracle import sidco_oracle
from tests.compressors.top_k_oracle import top_k_added, top_k_oracle
from tests.reference import adacomp, dense_sum
from tf_gradcomp.compressors import (
    LGC,
    QSGD,
    AdaComp,
    ArcTopK,
    Cast,
    Compressor,
    CountSketch,
    LGreCo,
    MaxNormQuantization,
    NoCompression,
    PowerSGD,
    RandomK,
    ScaleCom,
    SIDCo,
    SignSGD,
    TopK,
)
from tf_gradcomp.compressors.base import GRADIENT_SUM, RESIDUAL
from tf_gradcomp.policy import DENSE, LAYER_KINDS, GradientSpec

Oracle = Callable[
    [Compressor, Sequence[GradientSpec], Sequence[State], Sequence[Arrays], int], Outcome
]


@dataclasses.dataclass(frozen=True)
class Method:
    """A compressor with settings, and the expectations of its tests."""

    label: str
    compressor: Compressor
    oracle: Oracle
    header_bytes: int = 0  # of a payload
    padding: int = 0  # bytes that may be in it besides, at most
    tolerance: float = 0.0  # of all that the oracle gives, relative to the largest; 0: bits
    rounding: float = 1e-5  # of sent + residual, relative to the largest
    largest: float = 3e38  # that a sum may be
    # Whether a tensor of equal elements is sent completely in one step; False for a fixed number.
    sends_equals_at_once: bool = True
    sends_less: bool = False  # other values than the entries, or not the largest entries
    # What the gradients of one of so many replicas, with its state before, add to its residuals.
    added: Callable[[int, State, Arrays], Arrays] = lambda size, state, gradients: gradients

    @property
    def keeps_residuals(self) -> bool:
        return RESIDUAL in self.compressor.state(GradientSpec("a", (1,), "float32", "dense"))


def adacomp_oracle(
    compressor: AdaComp,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
    settings: Sequence[int] | None = None,
) -> Outcome:
    bin_sizes = settings or [compressor.bin_sizes.of(spec) or 0 for spec in specs]
    shapes = [spec.shape for spec in specs]
    encoded = [
        adacomp.encode_payload(
            replica[RESIDUAL],
            grads,
            step,
            bin_sizes=bin_sizes,
            fingerprint=compressor.fingerprint(specs),
            scale_factor=compressor.scale_factor,
        )
        for replica, grads in zip(state, gradients, strict=True)
    ]
    return gathered(
        encoded, shapes, lambda payload: adacomp.decode_payload(payload, shapes, bin_sizes)
    )


def sum_oracle(
    compressor: NoCompression | Cast,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
) -> Outcome:
    dtype = np.dtype(
        {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[compressor.dtype]
        if isinstance(compressor, Cast)
        else np.float32
    )
    sent, reduced = dense_sum.sum_as(dtype, gradients)
    finite = all(np.isfinite(total).all() for total in reduced)
    if not finite:
        reduced = [np.zeros_like(total) for total in reduced]
    size = len(gradients)
    if not sent[0].size:
        sent = []  # no replica asks for anything
    tensor_bytes = np.array([dtype.itemsize * spec.elements for spec in specs], np.int64)
    return Outcome([reduced] * size, [finite] * size, list(state), sent, [tensor_bytes] * size)


def adacomp_with(label: str, **settings: Any) -> Method:
    compressor = AdaComp(**settings)
    return Method(f"AdaComp{label}", compressor, adacomp_oracle, header_bytes=56, sends_less=True)


def qsgd_with(label: str, **settings: Any) -> Method:
    return Method(f"QSGD{label}", QSGD(**settings), qsgd_oracle, header_bytes=56, sends_less=True)


def top_k_with(label: str, **settings: Any) -> Method:
    compressor = TopK(**settings)
    return Method(
        f"TopK{label}",
        compressor,
        top_k_oracle,
        header_bytes=56,
        sends_equals_at_once=compressor.density.by_kind[DENSE] is None,
        sends_less=compressor.clip_norm is not None,
        added=functools.partial(top_k_added, compressor),
    )


def short_top_k_with(label: str, overrides: Any = None, **settings: Any) -> Method:
    return dataclasses.replace(
        top_k_with(label, overrides=overrides, **settings),
        padding=3 * 3 + 7 * 5,  # of three sections, and of the bits of each tensor
        sends_equals_at_once=False,
        sends_less=True,
    )


def lgreco_oracle(
    compressor: LGreCo,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
) -> Outcome:
    """Takes the method's own step, without a plan, and sums the first replica's gradients.

    These count times the number of replicas.
    """
    outcome = top_k_oracle(compressor.method, specs, state, gradients, step)
    for replica, (before, after) in enumerate(zip(state, outcome.state, strict=True)):
        counts = replica == 0 and outcome.finite[replica]
        after[GRADIENT_SUM] = [
            total + gradient.astype(np.float32) * len(state) if counts else total
            for total, gradient in zip(before[GRADIENT_SUM], gradients[replica], strict=True)
        ]
    return outcome


CHUNKED = {"header_bytes": 4, "padding": 8, "sends_equals_at_once": False}


def few_bits(bits: int, **settings: Any) -> Method:
    summed = bits == 16
    return Method(
        f"ScaleCom, {bits} bits",
        ScaleCom(**settings, value_bits=bits),
        scalecom_oracle,
        header_bytes=2 if summed else 56,
        padding=11,
        sends_equals_at_once=False,
    )


def power_sgd_with(label: str, **settings: Any) -> Method:
    return Method(
        f"PowerSGD{label}",
        PowerSGD(**settings),
        power_sgd_oracle,
        header_bytes=4,
        tolerance=1e-5,
        sends_equals_at_once=False,
    )


def alternating_with(label: str, **settings: Any) -> Method:
    return Method(
        f"PowerSGD, alternating{label}",
        PowerSGD(**settings, alternate=True),
        alternating_oracle,
        header_bytes=4,
        tolerance=1e-5,
        sends_equals_at_once=False,
        sends_less=True,
    )


def arc_top_k_with(label: str, **settings: Any) -> Method:
    return Method(
        f"ArcTopK{label}",
        ArcTopK(**settings),
        arc_top_k_oracle,
        header_bytes=4,
        sends_equals_at_once=False,
    )


def sidco_with(label: str, **settings: Any) -> Method:
    return Method(
        f"SIDCo{label}",
        SIDCo(**settings),
        sidco_oracle,
        header_bytes=56,
        sends_equals_at_once=False,
    )


def max_norm_with(label: str, **settings: Any) -> Method:
    return Method(
        f"MaxNormQuantization{label}",
        MaxNormQuantization(**settings),
        max_norm_oracle,
        header_bytes=56,
        sends_equals_at_once=False,
        sends_less=True,
    )


def count_sketch_with(label: str, **settings: Any) -> Method:
    return Method(
        f"CountSketch{label}",
        CountSketch(**settings),
        count_sketch_oracle,
        header_bytes=4,
        padding=4 * 5,  # of the tensors' shares of the sketch
        sends_equals_at_once=False,
    )


METHODS = [
    adacomp_with(""),
    adacomp_with(", bins of 7", bin_sizes=7),
    adacomp_with(", bins of 1", bin_sizes=1),
    adacomp_with(", whole", bin_sizes=dict.fromkeys(LAYER_KINDS)),
    adacomp_with(", scale factor 1", scale_factor=1),
    adacomp_with(", overrides", overrides={"_0": 10, "_2": None}),
    Method("ScaleCom", ScaleCom(), scalecom_oracle, **CHUNKED),
    Method("ScaleCom, rate 7", ScaleCom(7), scalecom_oracle, **CHUNKED),
    Method("ScaleCom, whole", ScaleCom(None), scalecom_oracle, header_bytes=4),
    Method(
        "ScaleCom, filtered",
        ScaleCom({"vector": 3}, 0.25, overrides={"_0": 20, "_1": None}),
        scalecom_oracle,
        **CHUNKED,
    ),
    few_bits(16),
    few_bits(4, beta=0.25, overrides={"_1": None, "_2": 7}),
    arc_top_k_with(""),
    arc_top_k_with(", small blocks", density=0.3, rank=2, block=8, overrides={"_0": None}),
    arc_top_k_with(", whole", density=None),
    Method("RandomK", RandomK(), random_k_oracle, **CHUNKED, sends_less=True),
    qsgd_with(""),
    qsgd_with(", 2 bits in small buckets", bits=2, bucket_size=32),
    qsgd_with(", 5 bits, vectors too", bits={"dense": 5, "vector": 3}, bucket_size=96),
    qsgd_with(", 8 bits in large buckets", bits=8, bucket_size=2080),
    qsgd_with(", overrides", bits=None, overrides={"_0": 7, "_2": 6, "_3": None}),
    count_sketch_with(""),
    count_sketch_with(", two in a hundred", density=0.02),
    max_norm_with(""),
    max_norm_with(", a pair", bits=(2, 6)),
    max_norm_with(", a third", bits=8, density=0.3, overrides={"_0": (3, 5), "_2": 2, "_3": None}),
    top_k_with(""),
    top_k_with(", a third", density=0.3),
    top_k_with(", whole", density=None),
    top_k_with(", overrides", overrides={"_0": 0.5, "_2": None}),
    top_k_with(", momentum", momentum=0.9),
    top_k_with(", momentum and clipping", density={"vector": None}, momentum=0.5, clip_norm=3.0),
    top_k_with(", clipping", clip_norm=20.0),
    short_top_k_with(", 2 bits in chunks", density=0.2, value_bits=2, chunk=64),
    short_top_k_with(", 1 bit", {"_0": 0.1, "_2": None}, momentum=0.9, value_bits=1),
    Method(
        "L-GreCo", LGreCo(TopK(0.3)), lgreco_oracle, header_bytes=56, sends_equals_at_once=False
    ),
    Method(
        "LGC",
        LGC(density=0.02, warmup_steps=0),
        lgc_oracle,
        header_bytes=8,
        padding=12,
        sends_equals_at_once=False,
    ),
    Method("SignSGD", SignSGD(), sign_sgd_oracle, header_bytes=56, sends_less=True),
    sidco_with(""),
    sidco_with(", a tenth", density=0.1),
    Method("NoCompression", NoCompression(), sum_oracle),
    Method("Cast to float16", Cast("float16"), sum_oracle, rounding=2e-3, largest=65504),
    Method("Cast to bfloat16", Cast("bfloat16"), sum_oracle, rounding=2e-2),
    power_sgd_with(""),
    power_sgd_with(", rank 1", rank=1),
    power_sgd_with(", rank 7", rank=7),
    power_sgd_with(", whole", rank=None),
    power_sgd_with(", overrides", rank={"convolution": 2}, overrides={"_0": 3, "_4": None}),
    alternating_with(""),
    alternating_with(", overrides", rank={"convolution": 2}, overrides={"_0": 3, "_4": None}),
]
