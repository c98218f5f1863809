"""The oracles of QSGD and SignSGD."""

from __future__ import annotations

from collections.abc import Sequence

from tests.compressors.gathered import gathered
from tests.compressors.lockstep import Arrays, Outcome, State
from tests.reference import qsgd, sign_sgd
from tf_gradcomp.compressors import QSGD, SignSGD
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.policy import GradientSpec


def qsgd_oracle(
    compressor: QSGD,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
    settings: Sequence[int] | None = None,
) -> Outcome:
    bits = settings or [compressor.bits.of(spec) or 0 for spec in specs]
    encoded = [
        qsgd.encode_payload(
            tensors[RESIDUAL],
            grads,
            step,
            replica=replica,
            bits=bits,
            bucket_size=compressor.bucket_size,
            fingerprint=compressor.fingerprint(specs),
        )
        for replica, (tensors, grads) in enumerate(zip(state, gradients, strict=True))
    ]
    shapes = [spec.shape for spec in specs]
    return gathered(
        encoded,
        shapes,
        lambda payload: qsgd.decode_payload(payload, shapes, bits, compressor.bucket_size),
    )


def sign_sgd_oracle(
    compressor: SignSGD,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
) -> Outcome:
    fingerprint = compressor.fingerprint(specs)
    encoded = [
        sign_sgd.encode_payload(replica[RESIDUAL], grads, step, fingerprint=fingerprint)
        for replica, grads in zip(state, gradients, strict=True)
    ]
    shapes = [spec.shape for spec in specs]
    return gathered(encoded, shapes, lambda payload: sign_sgd.decode_payload(payload, shapes))
