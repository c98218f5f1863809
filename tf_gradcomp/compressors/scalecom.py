"""ScaleCom: a leader, which changes in each step, chooses the entries that all replicas send."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import (
    FLOAT_BITS,
    leader,
    request_unless_empty,
    sum_chosen,
    tensor_bytes,
)
from tf_gradcomp.compressors.base import Reduced, StepInputs
from tf_gradcomp.compressors.plans import (
    Cost,
    Plannable,
    distinct,
    geometric,
    is_planned,
    sum_of_squares,
)
from tf_gradcomp.compressors.requests import Broadcast, Request
from tf_gradcomp.compressors.settings import (
    PerVariable,
    Valid,
    as_float32,
    is_number,
    is_whole_number,
    member_of,
)
from tf_gradcomp.compressors.value_bits import VALUE_BITS, sum_in_few_bits
from tf_gradcomp.ops.chunks import MAX_CHUNK_SIZE
from tf_gradcomp.policy import (
    CONVOLUTION,
    DENSE,
    EMBEDDING,
    RECURRENT,
    VECTOR,
    GradientSpec,
)

RULE = "rule"
_RATE = Valid(
    f"a whole number from 1 to {MAX_CHUNK_SIZE}, or {RULE!r}",
    lambda rate: rate == RULE or is_whole_number(rate, 1, MAX_CHUNK_SIZE),
)
_BETA = Valid(
    "a number above 0, also as float32, and at most 1",
    lambda beta: is_number(beta) and 0 < as_float32(beta) <= 1,
)
_DEFAULT_RATES: dict[str, int | str | None] = {
    CONVOLUTION: RULE,
    DENSE: RULE,
    RECURRENT: 400,
    EMBEDDING: 50,
    VECTOR: 25,
}
_SENT_WHOLE = 1  # a chunk of one entry


class ScaleCom(Plannable):
    """Scalable sparsified gradient compression: cyclic local top-k with a filtered residual.

    In each step one replica leads: it finds the largest entry of residual plus gradient in each
    chunk of `rate` entries, and broadcasts the positions. All replicas sum their values at these
    positions. The bytes of a replica therefore do not grow with the number of replicas, unlike with
    methods that gather. A chunk never spans variables, and the last, shorter chunk of a variable
    sends one entry, too. A small variable therefore sends an entry in every step, however large the
    gradients of other variables are.

    Use it if a simulation of your job shows that it trains well enough. It sent the fewest bytes of
    all methods, but with 32 workers it was behind on all three tasks; use `ArcTopK` or `Cast`
    there. The replicas' gradients should be alike, as they are if each replica gets its share of
    every batch. Without a warm-up, ScaleCom loses more accuracy early in training than AdaComp. In
    the paper, less than a tenth of the training is a dense warm-up. ScaleCom costs two passes over
    gradient and residual.

    With a `beta` below 1, the residual is low-pass filtered: a sent position releases only this
    share of the replica's residual. Use 0.1 if batch and learning rate are scaled up; otherwise 1,
    which is plain error feedback. With SGD, momentum and a scaled learning rate, training with 1
    fails where dense training does not, because entries wait for hundreds of steps.

    Args:
        rates: The number of entries per sent entry, 1 to 65536, for all variables or by layer kind
            (see `gc.Policy`; kinds not named keep the defaults). None sends variables whole.
            `"rule"` is the paper's rule, for 32 samples per replica and step (for other numbers,
            scale inversely): the first convolution is dense; other convolutions have rate 25 if
            their output has more than 196 pixels, 50 if it has 128 to 196, and 400 if it has fewer;
            dense layers have 400, and projections of attention 50. The sizes of outputs are known
            with `gc.Policy.from_model`. Without it, convolutions of up to 4 input channels are
            dense, and others have rate 25, 50 or 400 if the smaller of their two numbers of
            channels is up to 128, up to 256, or more.
        beta: The coefficient of the filter, above 0 and at most 1.
        overrides: Rate or None by regular expression over variable paths, with precedence over
            `rates`; the first expression that is found anywhere in the path counts.
        value_bits: The bits of each sent value: 32, 16, 8, 4 or 1. Below 32, each variable has a
            scale, and rounding errors stay in the residual. Values of 16 bits are summed exactly,
            as whole numbers in float16: each of K replicas has 2048 / K levels, rounded down to a
            power of two, up to the largest value of the leader. Values of 8, 4 and 1 bits are
            gathered, so the bytes grow with the number of replicas: they are fewer than with 32
            bits only below 64 / value_bits replicas. Variables sent whole stay float32, and are
            summed.
        **warmup: `warmup_steps` and `warmup`, as for every method: see `Compressor`.

    Raises:
        ValueError: If a rate, `beta`, `value_bits` or a layer kind is out of range, or a pattern is
            not a regular expression.

    Reference:
        Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
        Distributed Training", NeurIPS 2020, https://arxiv.org/abs/2104.11125
    """

    name = "scalecom"
    helped_by_precondition = True
    has_gpu_kernels = True
    whole_setting = _SENT_WHOLE

    def __init__(
        self,
        rates: int | str | Mapping[str, int | str | None] | None = _DEFAULT_RATES,
        beta: float = 1.0,
        overrides: Mapping[str, int | str | None] | None = None,
        value_bits: int = FLOAT_BITS,
        **warmup: Any,
    ) -> None:
        super().__init__(**warmup)
        self.rates: PerVariable[int | str] = PerVariable(
            "ScaleCom: rates", rates, _DEFAULT_RATES, overrides, _RATE
        )
        self.overrides = self.rates.overrides
        self.beta = self.residual_scale = float(_BETA.checked("ScaleCom: beta", beta))
        self.value_bits = member_of(*VALUE_BITS).checked("ScaleCom: value_bits", value_bits)

    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        """Entries in a chunk of each variable; 1 if it is sent whole."""
        return [_rate(spec, self.rates.of(spec)) for spec in specs]

    def choices(self, spec: GradientSpec, values: Sequence[Any] | None = None) -> list[int] | None:
        """Rates; by default a geometric sequence from a tenth to ten times the own rate."""
        (rate,) = self.settings([spec])
        if rate == _SENT_WHOLE or not is_planned(spec):
            return None
        if values is None:
            return geometric(rate, MAX_CHUNK_SIZE)
        self.rates.check_choices(values)
        return distinct(_rate(spec, value) for value in values)

    def costs(
        self, spec: GradientSpec, values: np.ndarray, settings: Sequence[int], replicas: int
    ) -> list[Cost]:
        """Returns the bytes that a leader sends, and its error without rounding."""
        residual = tf.Variable(tf.zeros(spec.shape))
        gradient = tf.constant(values)
        total = sum_of_squares(values)

        def error(rate: int) -> float:
            chunked = ops.Chunked([residual], [gradient], [rate])
            offsets, finite = ops.chunk_select(chunked, lead=True)
            sent = ops.chunk_take(chunked, offsets, finite).numpy()
            return math.sqrt(max(0.0, total - sum_of_squares(sent)))

        chunked = ops.Chunked([], [], settings)
        elements = [spec.elements] * len(settings)
        sizes = tensor_bytes(chunked, elements, leaders=replicas, value_bits=self.value_bits)
        return list(zip(sizes.numpy().tolist(), map(error, settings), strict=True))

    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Broadcasts the positions of the leader's entries, and sums there (paper, section 3)."""
        rates = self.settings_in_force(inputs)
        chunked = ops.Chunked(inputs.residuals, inputs.gradients, rates)
        leads = leader(inputs.step, inputs.size)
        offsets, local_finite = ops.chunk_select(chunked, tf.equal(leads, inputs.rank))
        if self.value_bits == FLOAT_BITS:
            offsets = yield from request_unless_empty(
                offsets, lambda words: Broadcast(words, leads)
            )
            reduced, finite = yield from sum_chosen(
                chunked, inputs, offsets, local_finite, self.beta
            )
        else:
            reduced, finite = yield from sum_in_few_bits(
                chunked,
                inputs,
                offsets,
                local_finite,
                leads,
                self.value_bits,
                self.beta,
                self.fingerprint(inputs.specs),
            )
        sizes = [spec.elements for spec in inputs.specs]
        counted = tensor_bytes(chunked, sizes, inputs.size, self.value_bits)
        return Reduced(reduced, finite, counted)


def _rate(spec: GradientSpec, rate: int | str | None) -> int:
    if spec.elements == 1:
        return _SENT_WHOLE
    if isinstance(rate, str):
        return _rate_by_rule(spec)
    return rate or _SENT_WHOLE


def _rate_by_rule(spec: GradientSpec) -> int:
    if spec.kind == CONVOLUTION:
        return _convolution_rate(spec)
    attention = spec.kind == DENSE and len(spec.shape) > 2
    return 50 if attention or spec.kind == EMBEDDING else 25 if spec.kind == VECTOR else 400


def _convolution_rate(spec: GradientSpec) -> int:
    if spec.positions is not None:
        if spec.first:
            return _SENT_WHOLE
        return 25 if spec.positions > 196 else 50 if spec.positions >= 128 else 400
    inputs, outputs = (1, 1, *spec.shape)[-2:]
    if inputs <= 4:
        return _SENT_WHOLE
    channels = min(inputs, outputs)
    return 25 if channels <= 128 else 50 if channels <= 256 else 400
