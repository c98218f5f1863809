"""AdaComp: a bin sends the entries that reach its maximum when the latest gradient counts twice."""

from __future__ import annotations

import functools
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import sum_payloads
from tf_gradcomp.compressors.base import Reduced, StepInputs
from tf_gradcomp.compressors.plans import Cost, Plannable, distinct, geometric, is_planned
from tf_gradcomp.compressors.requests import AllGather
from tf_gradcomp.compressors.settings import PerVariable, Valid, as_float32, is_number, whole_number
from tf_gradcomp.policy import (
    CONVOLUTION,
    DENSE,
    EMBEDDING,
    RECURRENT,
    VECTOR,
    GradientSpec,
)

MAX_BIN_SIZE = 16383
_BIN_SIZE = whole_number(1, MAX_BIN_SIZE)
_FACTOR = Valid(
    "a number of at least 1, and finite as float32",
    lambda factor: is_number(factor) and 1 <= as_float32(factor) < math.inf,
)
SENT_WHOLE = 0  # in place of a bin size, to the ops
_DEFAULT_BIN_SIZES = {CONVOLUTION: 50, DENSE: 500, RECURRENT: 500, EMBEDDING: 500, VECTOR: 500}


class AdaComp(Plannable):
    """Sends the entries that stand out in their bin, as index and sign.

    The residual plus gradient of each variable is cut into bins. A bin sends every entry that
    reaches the bin's maximum if the latest gradient is counted `scale_factor` times. Each entry is
    sent as an index and a sign, with one magnitude for the whole variable; the rest stays in the
    residual. The ratio depends on the gradients: about 40 for bins of 50 and 200 for bins of 500,
    more if few entries matter. Payloads are gathered, so the bytes that each replica receives grow
    with the number of replicas.

    Use it by default: it needs no tuning, and pays on slow links for up to about 16 workers. With
    dozens of workers, use `ArcTopK` or `Cast`. AdaComp reads the gradient and the residual once or
    twice, without a sort.

    Args:
        bin_sizes: Elements in a bin, 1 to 16383, for all variables or by layer kind (see
            `gc.Policy`; kinds not named keep the defaults). Smaller bins send more and follow dense
            training more closely. Up to 63 elements, an entry costs one byte, above that two. A
            kind with None is sent whole, as float32 in the same payload.
        scale_factor: The weight of the latest gradient in the selection, at least 1; the paper
            studied 1.5 to 3. With 1, only the bin's maximum is sent: the paper's baseline "LS".
        overrides: Bin size or None by regular expression over variable paths, with precedence over
            `bin_sizes`; the first expression that is found anywhere in the path counts.
        **warmup: `warmup_steps` and `warmup`, as for every method: see `Compressor`.

    Raises:
        ValueError: If a bin size, the scale factor or a layer kind is out of range, or a pattern is
            not a regular expression.

    Reference:
        Chen et al., "AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed
        Training", AAAI 2018, https://arxiv.org/abs/1712.02679
    """

    name = "adacomp"
    helped_by_precondition = True
    fuses_precondition = True
    whole_setting = SENT_WHOLE
    has_gpu_kernels = True

    def __init__(
        self,
        bin_sizes: int | Mapping[str, int | None] | None = _DEFAULT_BIN_SIZES,
        scale_factor: float = 2.0,
        overrides: Mapping[str, int | None] | None = None,
        **warmup: Any,
    ) -> None:
        super().__init__(**warmup)
        self.bin_sizes = PerVariable(
            "AdaComp: bin_sizes", bin_sizes, _DEFAULT_BIN_SIZES, overrides, _BIN_SIZE
        )
        self.overrides = self.bin_sizes.overrides
        self.scale_factor = float(_FACTOR.checked("AdaComp: scale_factor", scale_factor))

    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        """Elements in a bin of each variable; 0 if it is sent whole."""
        return [self.bin_sizes.of(spec) or SENT_WHOLE for spec in specs]

    def choices(self, spec: GradientSpec, values: Sequence[Any] | None = None) -> list[int] | None:
        """Bin sizes; by default a geometric sequence from a tenth to ten times the own bin size."""
        bin_size = self.bin_sizes.of(spec)
        if bin_size is None or not is_planned(spec):
            return None
        if values is None:
            return geometric(bin_size, MAX_BIN_SIZE)
        self.bin_sizes.check_choices(values)
        return distinct(value or SENT_WHOLE for value in values)

    def costs(
        self, spec: GradientSpec, values: np.ndarray, settings: Sequence[int], replicas: int
    ) -> list[Cost]:
        """Returns the entries that the encoder packs, and the residual that starts from zeros."""
        zeros = tf.zeros(spec.shape)
        residual = tf.Variable(zeros)
        gradient = tf.constant(values)

        def cost(bin_size: int) -> Cost:
            residual.assign(zeros)
            _, sent = ops.adacomp_encode(
                [residual],
                [gradient],
                0,
                bin_sizes=[bin_size],
                scale_factor=self.scale_factor,
                fingerprint=0,
            )
            return float(sent[0]), math.sqrt(2 * float(tf.nn.l2_loss(residual)))

        return [cost(bin_size) for bin_size in settings]

    def reduce(self, inputs: StepInputs) -> Generator[AllGather, tf.Tensor, Reduced]:
        """Gathers and sums the payloads of all replicas (paper, section 3)."""
        layout: dict[str, Any] = {
            "bin_sizes": self.settings_in_force(inputs),
            "fingerprint": self.fingerprint(inputs.specs),
        }
        payload, tensor_bytes = ops.adacomp_encode(
            inputs.residuals,
            inputs.gradients,
            inputs.step,
            scale_factor=self.scale_factor,
            second_moments=inputs.second_moments,
            **layout,
        )
        payloads = yield AllGather(payload)
        decode = functools.partial(ops.adacomp_decode, **layout)
        put_back = functools.partial(ops.adacomp_put_back, **layout)
        return sum_payloads(inputs, payload, payloads, tensor_bytes, decode, put_back)
