"""RandomK: all replicas send the same random entries."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import CHUNK_SHARE, sum_chosen, tensor_bytes
from tf_gradcomp.compressors.base import Compressor, Reduced, StepInputs
from tf_gradcomp.compressors.requests import AllReduce
from tf_gradcomp.compressors.settings import PerVariable
from tf_gradcomp.policy import GradientSpec

_DEFAULT_DENSITY = 0.01
_SENT_WHOLE = 1  # a chunk of one entry


class RandomK(Compressor):
    """Sums a random share of the entries, and keeps the others in the residual.

    Each variable is cut into chunks, of 1 / density entries, rounded; the step determines one
    random entry of each chunk, the same on all replicas. No index travels, the bytes do not grow
    with the number of replicas, and one all-reduce sums the entries. The choice ignores the
    gradient, so RandomK needs a higher density than other sparse methods. On digits and MNIST,
    ScaleCom sent less and was more accurate.

    Use it only as a baseline for sparse methods. It was 8 points of accuracy behind dense on
    digits, and 1.9 bits per character on an LSTM. RandomK costs two passes over gradient and
    residual.

    Args:
        density: The share of entries that is sent, from 1/65536 to 1, for all variables or by layer
            kind (see `gc.Policy`); at least one of each variable. None sends variables whole.
        overrides: Density or None by regular expression over variable paths, with precedence over
            `density`; the first expression that is found anywhere in the path counts.
        **warmup: `warmup_steps` and `warmup`, as for every method: see `Compressor`.

    Raises:
        ValueError: If a density or a layer kind is out of range, or a pattern is not a regular
            expression.

    Reference:
        Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, https://arxiv.org/abs/1809.07599
    """

    name = "random_k"
    whole_setting = _SENT_WHOLE
    has_gpu_kernels = True

    def __init__(
        self,
        density: float | Mapping[str, float | None] | None = _DEFAULT_DENSITY,
        overrides: Mapping[str, float | None] | None = None,
        **warmup: Any,
    ) -> None:
        super().__init__(**warmup)
        self.density = PerVariable(
            "RandomK: density",
            density,
            _DEFAULT_DENSITY,
            overrides,
            CHUNK_SHARE,
        )
        self.overrides = self.density.overrides

    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        """Entries in a chunk of each variable; 1 if it is sent whole."""
        return [round(1 / (self.density.of(spec) or _SENT_WHOLE)) for spec in specs]

    def reduce(self, inputs: StepInputs) -> Generator[AllReduce, tf.Tensor, Reduced]:
        """Sums the entries that are drawn for this step."""
        settings = self.settings_in_force(inputs)
        chunked = ops.Chunked(inputs.residuals, inputs.gradients, settings)
        _, local_finite = ops.chunk_select(chunked, lead=False)
        offsets = ops.chunk_draw(chunked, inputs.step)
        reduced, finite = yield from sum_chosen(chunked, inputs, offsets, local_finite)
        sizes = [spec.elements for spec in inputs.specs]
        return Reduced(reduced, finite, tensor_bytes(chunked, sizes))
