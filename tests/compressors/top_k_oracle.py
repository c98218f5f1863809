"""Takes steps of TopK in NumPy, for all replicas at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from tests.compressors.gathered import gathered
from tests.compressors.lockstep import Arrays, Outcome, State
from tests.reference import top_k
from tests.reference.top_k_short import Short
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
        top_k_added(compressor, size, *pair) for pair in zip(state, gradients, strict=True)
    ]
    layout = {"entries": entries, "fingerprint": compressor.fingerprint(specs)}
    pairs = list(zip(state, corrected, strict=True))
    encoded = plain = [top_k.encode_payload(s[RESIDUAL], a, step, **layout) for s, a in pairs]
    decode = functools.partial(top_k.decode_payload, shapes=shapes, entries=entries)
    config = compressor.get_config()
    if (config["chunk"], config["value_bits"]) != (None, 32):
        sent = [min(count, spec.elements) for count, spec in zip(entries, specs, strict=True)]
        short = Short(sent, config["chunk"], config["value_bits"])
        encoded = [short.encode(*one) for one in plain]
        decode = functools.partial(short.decode, shapes=shapes)
    outcome = gathered(encoded, shapes, decode)
    if compressor.momentum:
        for replica, after in enumerate(outcome.state):
            after[VELOCITY] = top_k.kept_velocities(
                state[replica][VELOCITY],
                corrected[replica],
                plain[replica][0],
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
