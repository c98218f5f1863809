"""CountSketch: the largest entries of the sum are found in summed sketches, and then summed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import zero_if_too_large
from tf_gradcomp.compressors.base import Compressor, Reduced, StepInputs
from tf_gradcomp.compressors.requests import AllReduce
from tf_gradcomp.compressors.settings import SHARE
from tf_gradcomp.policy import VECTOR, GradientSpec

_ROWS = 3  # of a sketch, in the kernel, too
# Sums in each row, and entries that are summed exactly, in multiples of the entries that `density`
# asks for. Estimates are noisy, so more candidates contain more of the largest entries.
_COLUMNS = 4
_CANDIDATES = 4


class _Plan(NamedTuple):
    """The parts of a step, as indices of tensors."""

    whole: list[int]
    sketched: list[int]
    columns: int
    candidates: int


class CountSketch(Compressor):
    """Sums the entries that are large in summed sketches.

    A sketch has three rows of sums. In each row, every entry of residual plus gradient is added to
    one sum at random, with a random sign. The replicas' sketches are summed, and from the summed
    sketch all replicas compute the same estimate of each entry of the summed gradient. The entries
    with the largest estimates are then summed exactly; the others stay in the residual. No index
    travels, and the bytes do not grow with the number of replicas. All variables share a sketch, so
    their entries compete. Vectors (biases, normalization) are summed whole.

    Use it to compare sketches with other choices of entries: ScaleCom sent less and trained better.
    Below 16 replicas, TopK of the same density sends less, and with 8 replicas it trained better.
    This method takes longer to encode and decode than TopK, because it draws a random number for
    each entry and row twice in a step. The host draws them, with a GPU as well.

    Args:
        density: The share of the entries that the sketch can recover, above 0 and up to 1.
        **warmup: `warmup_steps` and `warmup`, as for every method: see `Compressor`.

    Raises:
        ValueError: If `density` is out of range.

    Reference:
        After Xian et al., "Communication-Efficient Adam-Type Algorithms for Distributed Data
        Mining", ICDM 2022, https://arxiv.org/abs/2210.07454 (SketchedAMSGrad). Here, Adam's second
        moment divides gradients before they are sketched, the exact values of all candidates are
        used, and each step draws another sketch.
    """

    name = "count_sketch"
    helped_by_precondition = True

    def __init__(self, density: float = 0.001, **warmup: Any) -> None:
        super().__init__(**warmup)
        self.density = float(SHARE.checked("CountSketch: density", density))

    def delayed(self, inputs: StepInputs) -> tf.Tensor:
        """True for the variables in the sketch: bool [tensors]."""
        sketched = self._plan(inputs.specs).sketched
        return tf.constant([i in sketched for i in range(len(inputs.specs))], tf.bool)

    def payload_bytes(self, specs: Sequence[GradientSpec]) -> int:
        """Returns the bytes of the flag, the sketch, the candidates and whole variables."""
        plan = self._plan(specs)
        whole_elements = sum(specs[index].elements for index in plan.whole)
        return 4 * (1 + whole_elements + _ROWS * plan.columns + plan.candidates)

    def reduce(self, inputs: StepInputs) -> Generator[AllReduce, tf.Tensor, Reduced]:
        """Sums the sketches, then the entries with the largest estimates."""
        specs = inputs.specs
        plan = self._plan(specs)
        chunked = ops.Chunked(inputs.residuals, inputs.gradients, [1] * len(specs))
        _, local_finite = ops.chunk_select(chunked, lead=False)
        offsets = tf.zeros([0], tf.int32)  # chunks of one entry have none
        taken = ops.chunk_take(chunked, offsets, local_finite)
        *parts, flag = tf.split(taken, [*(spec.elements for spec in specs), 1])
        values = _concat([parts[index] for index in plan.sketched])
        whole = _concat([parts[index] for index in plan.whole])
        settings = ops.SketchSettings(inputs.step, plan.columns)
        sketch = ops.count_sketch(values, settings) if plan.sketched else tf.zeros([0])
        answer = yield AllReduce(tf.concat([whole, sketch, flag], 0))
        whole_sum, sums, flag = tf.split(answer, [tf.size(whole), tf.size(sketch), 1])
        finite = tf.math.is_finite(flag[0])
        total, rest = tf.zeros_like(values), values
        if plan.sketched:
            indices = ops.count_sketch_largest(
                sums, settings, size=values.shape.num_elements(), count=plan.candidates
            )
            chosen = tf.where(finite, tf.gather(values, indices), 0.0)
            exact = yield AllReduce(chosen)
            indices = indices[:, tf.newaxis]
            total = tf.tensor_scatter_nd_update(total, indices, exact)
            rest = tf.tensor_scatter_nd_update(rest, indices, tf.zeros_like(exact))

        def by_tensor(whole: tf.Tensor, sketched: tf.Tensor) -> tf.Tensor:
            """Returns the entries of all tensors, in the order of the tensors."""
            whole_parts = _split(whole, [specs[index].elements for index in plan.whole])
            parts = _split(sketched, [specs[index].elements for index in plan.sketched])
            by_index = dict(zip([*plan.whole, *plan.sketched], [*whole_parts, *parts], strict=True))
            return tf.concat([by_index[index] for index in range(len(specs))], 0)

        totals, fits = zero_if_too_large(by_tensor(whole_sum, total), finite)
        reduced, finite = ops.chunk_apply(
            chunked,
            offsets,
            tf.concat([totals, [0.0]], 0),
            local_finite,
            tf.logical_and(finite, inputs.finite),
            rests=by_tensor(tf.zeros_like(whole), rest),
        )
        tensor_bytes = tf.constant(self._tensor_bytes(specs, plan), tf.int64)
        return Reduced(reduced, tf.logical_and(finite, fits), tensor_bytes)

    def _plan(self, specs: Sequence[GradientSpec]) -> _Plan:
        """Returns the tensors to sketch; none if a sketch would send more than all entries."""
        indices = range(len(specs))
        sketched = [n for n in indices if specs[n].kind != VECTOR and specs[n].elements > 1]
        elements = sum(specs[n].elements for n in sketched)
        unit = max(1, round(self.density * elements))
        columns, candidates = _COLUMNS * unit, _CANDIDATES * unit
        if _ROWS * columns + candidates >= elements:
            return _Plan(list(indices), [], 0, 0)
        return _Plan([n for n in indices if n not in sketched], sketched, columns, candidates)

    def _tensor_bytes(self, specs: Sequence[GradientSpec], plan: _Plan) -> list[int]:
        """Returns the bytes of each tensor: of the sketch and the candidates, by its elements."""
        elements = sum(specs[index].elements for index in plan.sketched)
        shared = _ROWS * plan.columns + plan.candidates
        return [
            4 * (spec.elements * shared // elements if index in plan.sketched else spec.elements)
            for index, spec in enumerate(specs)
        ]


def _concat(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.zeros([0]), *parts], 0)


def _split(vector: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
    return tf.split(vector, list(sizes)) if sizes else []
