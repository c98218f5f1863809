"""TopK: the largest entries are sent; with momentum, this is Deep Gradient Compression."""

from __future__ import annotations

import functools
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import FLOAT_BITS, are_taken, sum_payloads
from tf_gradcomp.compressors.base import (
    VELOCITY,
    Reduced,
    StateSpec,
    StepInputs,
)
from tf_gradcomp.compressors.plans import Cost, Plannable, distinct, is_planned, whole
from tf_gradcomp.compressors.requests import AllGather
from tf_gradcomp.compressors.settings import (
    SHARE,
    PerVariable,
    Valid,
    as_float32,
    is_number,
    is_whole_number,
    member_of,
)
from tf_gradcomp.compressors.top_k_coding import VALUE_BITS, Coding, ShortPayloads
from tf_gradcomp.ops.chunks import MAX_CHUNK_SIZE
from tf_gradcomp.policy import GradientSpec

SENT_WHOLE = 0  # in place of a number of entries, to the ops
_DEFAULT_DENSITY = 0.01
_MOMENTUM = Valid(
    "a number from 0 to below 1, also as float32", lambda m: is_number(m) and 0 <= as_float32(m) < 1
)
_NORM = Valid(
    "a number above 0, also as float32", lambda n: is_number(n) and 0 < as_float32(n) < math.inf
)
_CHUNK = Valid(
    f"a power of two from 2 to {MAX_CHUNK_SIZE}",
    lambda chunk: is_whole_number(chunk, 2, MAX_CHUNK_SIZE) and not chunk & (chunk - 1),
)


class TopK(Plannable):
    """Sends the largest entries of each variable, as index and value.

    A variable with N elements sends the max(1, floor(density N)) entries of residual plus gradient
    with the largest magnitudes, as a 32-bit index and a float32 value each; the rest stays in the
    residual. If magnitudes are equal, the first entries are sent. The ratio is therefore known
    beforehand: 1 / (2 density). A variable that would send half of its entries or more is sent
    whole, as float32 in the same payload. Payloads are gathered, so the bytes that each replica
    receives grow with the number of replicas. On digits, MNIST and an LSTM with 2 and 8 replicas,
    AdaComp sent less and was as accurate; with 32, TopK sent less.

    Use it when the ratio must be fixed, or as the baseline of sparse methods. TopK reads gradient
    and residual twice, without a sort.

    With `momentum` it is Deep Gradient Compression: with u the velocity and v the residual,

        u <- momentum u + gradient;  v <- v + u;  the largest entries of v are sent;
        u = v = 0 where an entry was sent

    **Then give plain SGD without momentum as the inner optimizer**, because the momentum is applied
    here. Conservation: v plus the sent values equals the earlier v plus u. The velocity of entries
    that were sent is dropped on purpose (paper, section 3.3). Variables that are sent whole keep
    their velocity, and therefore have ordinary momentum. There is no momentum in a job of one
    replica, which exchanges nothing, and in the steps of a `warmup` by another method.

    With `value_bits` and `chunk`, an entry takes fewer bits than 64. The same entries are sent, and
    rounding errors stay in the residual.

    Args:
        density: The share of entries that is sent, above 0 and up to 1, for all variables or by
            layer kind (see `gc.Policy`; kinds not named keep 0.01). Variables with None are sent
            whole.
        momentum: From 0, which is none, to below 1.
        clip_norm: Before gradients are accumulated, each replica scales its own down if their
            common norm is above `clip_norm` divided by the square root of the number of
            replicas (paper, section 3.2). None: gradients are not clipped.
        overrides: Density or None by regular expression over variable paths, with precedence over
            `density`; the first expression that is found anywhere in the path counts.
        value_bits: The bits of each value: 32, 16, 8, 4, 2 or 1. Below 32, each variable has a
            scale: the largest magnitude for 16, 8 and 4 bits, and the mean magnitude for 1 bit.
            With 2 bits, a value is sent as a sign and one of two means: of the magnitudes up to the
            overall mean, or of the larger magnitudes.
        chunk: The length of the chunks in which indices are counted, a power of two from 2 to
            65536. With 4096, an index takes 12 bits, and each chunk takes 13 bits for the number of
            its entries. About 8 / density takes the fewest bits. None: 32 bits for each index.
        **warmup: `warmup_steps` and `warmup`, as for every method: see `Compressor`.

    Raises:
        ValueError: If a density, `momentum`, `clip_norm`, `value_bits`, `chunk` or a layer kind is
            out of range, or a pattern is not a regular expression.

    Reference:
        Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
        Training", ICLR 2018, https://arxiv.org/abs/1712.01887; without momentum, Aji and Heafield,
        "Sparse Communication for Distributed Gradient Descent", EMNLP 2017,
        https://arxiv.org/abs/1704.05021
    """

    name = "top_k"
    helped_by_precondition = True
    whole_setting = SENT_WHOLE

    def __init__(
        self,
        density: float | Mapping[str, float | None] | None = _DEFAULT_DENSITY,
        momentum: float = 0.0,
        clip_norm: float | None = None,
        overrides: Mapping[str, float | None] | None = None,
        value_bits: int = FLOAT_BITS,
        chunk: int | None = None,
        **warmup: Any,
    ) -> None:
        super().__init__(**warmup)
        self.density = PerVariable(
            "TopK: density",
            density,
            _DEFAULT_DENSITY,
            overrides,
            SHARE,
        )
        self.overrides = self.density.overrides
        self.momentum = float(_MOMENTUM.checked("TopK: momentum", momentum))
        _NORM.or_none().checked("TopK: clip_norm", clip_norm)
        self.clip_norm = None if clip_norm is None else float(clip_norm)
        self.value_bits = member_of(*VALUE_BITS).checked("TopK: value_bits", value_bits)
        self.chunk = _CHUNK.or_none().checked("TopK: chunk", chunk)
        self._coding = Coding(self.chunk, self.value_bits)
        plain = self._coding.is_plain
        self.has_gpu_kernels = not self.momentum and self.clip_norm is None and plain

    def state(self, spec: GradientSpec) -> dict[str, StateSpec]:
        """A residual; with momentum, also a velocity."""
        state = super().state(spec)
        return {**state, VELOCITY: StateSpec(spec.shape)} if self.momentum else state

    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        """Returns the number of sent entries of each variable; 0 if the variable is sent whole."""
        return [self._entries(spec, self.density.of(spec)) for spec in specs]

    def choices(self, spec: GradientSpec, values: Sequence[Any] | None = None) -> list[int] | None:
        """Numbers of entries; by default, for a tenth of the density to ten times it."""
        density = self.density.of(spec)
        if density is None or not is_planned(spec):
            return None
        if values is None:
            values = [min(density * tenths / 10, 1.0) for tenths in range(1, 101)]
        self.density.check_choices(values)
        return distinct(self._entries(spec, value) for value in values)

    def costs(
        self, spec: GradientSpec, values: np.ndarray, settings: Sequence[int], replicas: int
    ) -> list[Cost]:
        """Returns bytes, and errors without rounding; one sort serves all settings."""
        sums = np.square(np.sort(np.abs(values), axis=None), dtype=np.float64)
        np.cumsum(sums, out=sums)

        def cost(entries: int) -> Cost:
            if entries == SENT_WHOLE:
                return whole(spec)
            delayed = max(0, spec.elements - entries)
            sent_bytes = self._coding.tensor_bits(spec.elements, spec.elements - delayed) // 8
            return float(sent_bytes), math.sqrt(sums[delayed - 1]) if delayed else 0.0

        return [cost(entries) for entries in settings]

    def reduce(self, inputs: StepInputs) -> Generator[AllGather, tf.Tensor, Reduced]:
        """Gathers and sums the payloads of all replicas (paper, section 3)."""
        entries, fingerprint = self.settings_in_force(inputs), self.fingerprint(inputs.specs)
        layout: dict[str, Any] = {"entries": entries, "fingerprint": fingerprint}
        corrected = self._corrected(inputs)
        operations: Any = (
            functools.partial(op, **layout)
            for op in (ops.top_k_encode, ops.top_k_decode, ops.top_k_put_back)
        )
        short = None
        if not self._coding.is_plain:
            sizes = [spec.elements for spec in inputs.specs]
            short = ShortPayloads(self._coding, sizes, entries, inputs.step, fingerprint)
            operations = short.encode, short.decode, short.put_back
        encode, decode, put_back = operations
        payload, tensor_bytes = encode(inputs.residuals, corrected, inputs.step)
        payloads = yield AllGather(payload, same_length=True)
        reduced = sum_payloads(inputs, payload, payloads, tensor_bytes, decode, put_back)
        if self.momentum:
            plain = short.as_plain(payload) if short else payload
            taken = are_taken(inputs, payloads)
            ops.top_k_keep_velocity(inputs.state[VELOCITY], corrected, plain, taken, **layout)
        return reduced

    def _entries(self, spec: GradientSpec, density: float | None) -> int:
        """Returns the number of entries to send, or 0 if the whole variable takes no more bytes."""
        if density is None:
            return SENT_WHOLE
        entries = max(1, math.floor(density * spec.elements))
        bits = self._coding.tensor_bits(spec.elements, entries)
        return entries if bits < FLOAT_BITS * spec.elements else SENT_WHOLE

    def _corrected(self, inputs: StepInputs) -> Sequence[tf.Tensor]:
        """Returns the values to accumulate: the gradients after clipping and momentum."""
        if not self.momentum and self.clip_norm is None:
            return inputs.gradients
        clip_norm = math.inf if self.clip_norm is None else self.clip_norm / math.sqrt(inputs.size)
        velocities = [
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
            for handle in inputs.state.get(VELOCITY, [])
        ]
        return ops.momentum_correction(
            velocities, inputs.gradients, momentum=self.momentum, clip_norm=clip_norm
        )
