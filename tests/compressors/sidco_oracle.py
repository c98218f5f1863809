"""Takes steps of SIDCo in NumPy, for all replicas at once."""

from __future__ import annotations

from collections.abc import Sequence

from tests.compressors.gathered import gathered
from tests.compressors.lockstep import Arrays, Outcome, State
from tests.reference import sidco
from tf_gradcomp.compressors import SIDCo
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.policy import GradientSpec


def sidco_oracle(
    compressor: SIDCo,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
) -> Outcome:
    shapes = [spec.shape for spec in specs]
    encoded = [
        sidco.encode_payload(
            replica[RESIDUAL],
            grads,
            step,
            compressor.fingerprint(specs),
            density=compressor.density,
        )
        for replica, grads in zip(state, gradients, strict=True)
    ]
    return gathered(encoded, shapes, lambda payload: sidco.decode_payload(payload, shapes))
