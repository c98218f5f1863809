"""One step of TopK in NumPy: all replicas at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.compressors.gathered import gathered
from tests.compressors.lockstep import Arrays, Outcome, State
from tests.reference import top_k
from tf_gradcomp.compressors import TopK
from tf_gradcomp.compressors.base import RESIDUAL, VELOCITY
from tf_gradcomp.policy import GradientSpec


def top_k_oracle(
    compressor: TopK,
    specs: Sequence[GradientSpec],
    state: Sequence[State],
    gradients: Sequence[Arrays],
    step: int,
    settings: Sequence[int] | None = None,
) -> Outcome:
    entries = settings or compressor.settings(specs)
    shapes = [spec.shape for spec in specs]
    size = len(gradients)
    corrected = [
        top_k_added(compressor, size, *of_one) for of_one in zip(state, gradients, strict=True)
    ]
    encoded = [
        top_k.encode_payload(
            of_one[RESIDUAL],
            added,
            step,
            entries=entries,
            fingerprint=compressor.fingerprint(specs),
        )
        for of_one, added in zip(state, corrected, strict=True)
    ]
    outcome = gathered(
        encoded, shapes, lambda payload: top_k.decode_payload(payload, shapes, entries)
    )
    if compressor.momentum:
        for replica, after in enumerate(outcome.state):
            after[VELOCITY] = top_k.kept_velocities(
                state[replica][VELOCITY],
                corrected[replica],
                outcome.payloads[replica],
                entries,
                outcome.finite[replica],
            )
    return outcome


def top_k_added(compressor: TopK, size: int, state: State, gradients: Arrays) -> Arrays:
    """Returns the amount that one of `size` replicas adds to its residuals."""
    if not compressor.momentum and compressor.clip_norm is None:
        return gradients
    limit = np.inf if compressor.clip_norm is None else compressor.clip_norm / np.sqrt(size)
    velocities = state.get(VELOCITY, [])
    return top_k.momentum_correction(velocities, gradients, compressor.momentum, limit)
