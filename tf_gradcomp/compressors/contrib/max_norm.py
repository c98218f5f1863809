"""Max-norm quantization: entries are rounded to levels of one scale, so codes can be summed."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import CHUNK_SHARE, request_unless_empty, zero_if_too_large
from tf_gradcomp.compressors.base import Reduced, StepInputs
from tf_gradcomp.compressors.plans import Cost, Plannable, distinct, is_planned
from tf_gradcomp.compressors.requests import AllGather, AllReduce, Request
from tf_gradcomp.compressors.settings import PerVariable, Valid, is_whole_number
from tf_gradcomp.ops.payload import MAX_NORM
from tf_gradcomp.policy import LAYER_KINDS, VECTOR, GradientSpec

MIN_BITS, MAX_BITS, MAX_FINER_BITS = 2, 8, 16
SENT_WHOLE = 0  # in place of bits
_DEFAULT_BITS = {**dict.fromkeys(LAYER_KINDS, 4), VECTOR: 8}
_WORD_BITS = 63  # of an int64 that is never negative
_SMALLEST = 1e-35  # of a scale; fractions of smaller ones would be denormal
_PHILOX = 1  # TensorFlow's number of the generator
_MOST_BLOCKS = 2**40  # of random numbers for a variable
_STEPS = 2.0 ** np.arange(MAX_FINER_BITS + 1, dtype=np.float32) - 1  # units in a scale, by bits

Bits: TypeAlias = int | Sequence[int]


class MaxNormQuantization(Plannable):
    """Rounds every entry to a few bits, in a unit that all workers share, and sums the codes.

    The unit is the largest magnitude of a variable over all replicas, divided by 2^bits - 1. Each
    replica rounds its residual plus gradient up or down at random to multiples of the unit; the
    rounding error stays in the residual. The multiples of all replicas are summed in int64 words.
    Each field of a word has room for its sum, so no sum is rounded or overflows. On digits with 2
    and 8 replicas, AdaComp sent less, was as accurate and took less time.

    Use it where QSGD would suit, with 4 workers or more. The bytes that a worker sends hardly grow
    with the number of workers. The largest magnitudes, one float32 for each variable, are gathered
    in a separate collective. The method is plain TensorFlow, and takes longer to encode than QSGD.

    Args:
        bits: The bits of a magnitude, without its sign. From 2 to 8, for all layer kinds but
            vectors (biases, normalization), which take 8; or by layer kind (see `gc.Policy`; kinds
            not named keep the defaults). A pair such as (2, 6) has two units: codes have 2 bits,
            and an entry takes the unit of 6 bits if its code in it has 2 bits on all replicas. Two
            units take one more sum, of a flag for each entry. A kind with None, and a variable of
            one entry, is summed whole, as float32.
        density: The share of the entries that is sent in a step, from 1/65536 to 1: one entry of
            each 1 / density, drawn at random and equal on all replicas, as with `RandomK`. The
            other entries stay in the residual. None: all entries.
        overrides: Bits, a pair or None by regular expression over variable paths, with precedence
            over `bits`; the first expression that is found anywhere in the path counts.
        **warmup: `warmup_steps` and `warmup`, as for every method: see `Compressor`.

    Raises:
        ValueError: If bits, the density or a layer kind are out of range, or a pattern is
            not a regular expression.

    Reference:
        Vineeth S, "Quantization for Distributed Optimization", 2021,
        https://arxiv.org/abs/2109.12497. In the paper, one scale serves the whole model, there is
        no residual, and the unit of an entry depends on its rounding, which introduces a bias.
    """

    name = "max_norm"

    def __init__(
        self,
        bits: Bits | Mapping[str, Bits | None] | None = 4,
        density: float | None = None,
        overrides: Mapping[str, Bits | None] | None = None,
        **warmup: Any,
    ) -> None:
        super().__init__(**warmup)
        if bits is not None and not isinstance(bits, Mapping):
            bits = {kind: bits for kind in LAYER_KINDS if kind != VECTOR}
        self.bits: PerVariable[Bits] = PerVariable(
            "MaxNormQuantization: bits", bits, _DEFAULT_BITS, overrides, _BITS
        )
        self.overrides = self.bits.overrides
        self.density = CHUNK_SHARE.or_none().checked("MaxNormQuantization: density", density)
        self._chunk_size = round(1 / (density or 1))

    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        """Bits of a code of each variable; 0 if it is sent whole."""
        return [(self._bits(spec) or (SENT_WHOLE,))[0] for spec in specs]

    def delayed(self, inputs: StepInputs) -> tf.Tensor:
        """True for variables whose entries are mostly not chosen: bool [tensors]."""
        several = [self._chunk_size > 1 and spec.elements > 1 for spec in inputs.specs]
        return tf.constant(several, tf.bool)

    def choices(self, spec: GradientSpec, values: Sequence[Any] | None = None) -> list[int] | None:
        """Numbers of bits; by default from half to twice the own number. A pair is not planned."""
        units = self._bits(spec)
        if len(units) != 1 or not is_planned(spec):
            return None
        if values is None:
            (bits,) = units
            values = range(max(MIN_BITS, bits // 2), min(MAX_BITS, 2 * bits) + 1)
        self.bits.check_choices(values)
        for value in values:
            if not isinstance(value, int):
                raise ValueError(
                    "MaxNormQuantization: bits among the choices must be whole numbers; received "
                    f"{value!r}."
                )
        return distinct(values)

    def costs(
        self, spec: GradientSpec, values: np.ndarray, settings: Sequence[int], replicas: int
    ) -> list[Cost]:
        """Returns bytes, and roots of the expected squares of errors."""
        entries = self._entries(spec)
        sent = entries / max(1, values.size)  # the share
        magnitudes = np.abs(values, dtype=np.float64)
        squares, largest = float(np.sum(np.square(magnitudes))), magnitudes.max(initial=0.0)

        def cost(bits: int) -> Cost:
            rounding = 0.0
            if bits != SENT_WHOLE and largest != 0:
                steps = 2**bits - 1
                up = magnitudes / largest * steps
                up -= np.floor(up)
                rounding = float(np.sum(up * (1 - up))) * (largest / steps) ** 2
            error = math.sqrt((1 - sent) * squares + sent * rounding)
            return float(self._bytes(spec, bits, replicas)), error

        return list(map(cost, settings))

    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Agrees on the scales, and sums codes in units of these scales."""
        specs, replicas = inputs.specs, inputs.size
        defaults = self.settings(specs)
        settings = (
            defaults if inputs.settings is None else tf.unstack(inputs.settings, len(defaults))
        )
        chunked = ops.Chunked(
            inputs.residuals, inputs.gradients, [self._chunk_size] * len(defaults)
        )
        _, local_finite = ops.chunk_select(chunked, lead=False)
        offsets = ops.chunk_draw(chunked, inputs.step)
        taken = ops.chunk_take(chunked, offsets, local_finite)
        parts = tf.split(taken, [*map(self._entries, specs), 1])[:-1]
        coded = [index for index, bits in enumerate(defaults) if bits != SENT_WHOLE]
        whole = [index for index in range(len(defaults)) if index not in coded]

        values = [parts[index] for index in coded]
        scales, finite = yield from self._scales(inputs, values, local_finite)
        shares = list(map(tf.math.divide_no_nan, values, scales))
        bits = [settings[index] for index in coded]
        finer = [self._bits(specs[index])[1:] for index in coded]
        chosen = yield from _choose_units(shares, bits, finer, replicas)
        codes = [
            _rounded(share * tf.gather(_STEPS, units), self._uniform(inputs, index, share.shape))
            for index, share, units in zip(coded, shares, chosen, strict=True)
        ]
        sums = yield from _sum(
            [code + tf.gather(_STEPS, coarse) for code, coarse in zip(codes, bits, strict=True)],
            [_code_width(coarse, replicas) for coarse in bits],
        )
        given = [tf.where(finite, parts[index], 0.0) for index in whole]
        answer = yield from request_unless_empty(tf.concat([tf.zeros([0]), *given], 0), AllReduce)

        totals = dict(zip(whole, _split(answer, given), strict=True))
        rests = dict(zip(whole, map(tf.zeros_like, given), strict=True))
        for i, index in enumerate(coded):
            # Not a constant: a graph would multiply the scale by its inverse, and the largest code
            # would not be exactly the scale.
            steps = tf.where(finite, tf.gather(_STEPS, chosen[i]), 1.0)
            total = tf.cast(sums[i] - replicas * (2 ** bits[i] - 1), tf.float32)
            totals[index] = scales[i] * (total / steps)
            rests[index] = values[i] - scales[i] * (codes[i] / steps)
        total, fits = zero_if_too_large(_joined(totals), finite)
        reduced, finite = ops.chunk_apply(
            chunked,
            offsets,
            tf.concat([total, [0.0]], 0),
            local_finite,
            tf.logical_and(finite, inputs.finite),
            rests=_joined(rests),
        )
        counted = [self._bytes(*pair, replicas) for pair in zip(specs, settings, strict=True)]
        tensor_bytes = tf.convert_to_tensor(counted, tf.int64)
        return Reduced(reduced, tf.logical_and(finite, fits), tensor_bytes)

    def _bits(self, spec: GradientSpec) -> tuple[int, ...]:
        """Returns the bits of each unit of a variable, the coarse unit first; () for whole."""
        bits = self.bits.of(spec)
        if bits is None or spec.elements == 1:
            return ()
        return (bits,) if isinstance(bits, int) else tuple(bits)

    def _entries(self, spec: GradientSpec) -> int:
        """Returns how many entries of a variable are sent in a step."""
        return -(-spec.elements // self._chunk_size)

    def _bytes(self, spec: GradientSpec, bits: Any, replicas: int) -> Any:
        """Returns the bytes of a variable; `bits`, and so the bytes, may be a tensor."""
        entries, units = self._entries(spec), self._bits(spec)
        if not units:
            return 4 * entries
        widths = [_code_width(bits, replicas)] + [_flag_width(replicas)] * (len(units) - 1)
        return 4 + sum(8 * _words(entries, width) for width in widths)

    def _scales(
        self, inputs: StepInputs, values: Sequence[tf.Tensor], local_finite: tf.Tensor
    ) -> Generator[AllGather, tf.Tensor, tuple[list[tf.Tensor], tf.Tensor]]:
        """Returns the largest magnitudes over all replicas, and whether all replicas are finite.

        If a replica is not finite, the step is skipped; scales are zeros, so zeros are sent.
        """
        header: dict[str, Any] = {
            "settings": self.settings_in_force(inputs),
            "method": MAX_NORM,
            "fingerprint": self.fingerprint(inputs.specs),
        }
        # An empty tensor has 0.
        maxima = [tf.maximum(0.0, tf.reduce_max(tf.abs(value))) for value in values]
        body = tf.bitcast(tf.stack(maxima) if maxima else tf.zeros([0]), tf.int32)
        payload = ops.payload_write(body, inputs.step, local_finite, **header)
        payloads = yield AllGather(payload, same_length=True)
        bodies, finite, _ = ops.payload_read(payloads, inputs.step, **header)
        scales = tf.reduce_max(tf.bitcast(bodies, tf.float32), 0)
        scales = tf.where(tf.logical_and(finite, scales >= _SMALLEST), scales, 0.0)
        return tf.unstack(scales, len(values)), finite

    def _uniform(self, inputs: StepInputs, index: int, shape: tf.TensorShape) -> tf.Tensor:
        """Returns random numbers from 0 to 1, by replica, step, tensor and entry alone."""
        key = tf.bitwise.left_shift(tf.cast(inputs.rank, tf.int64), 32)
        counter = tf.stack([tf.constant(index * _MOST_BLOCKS, tf.int64), inputs.step])
        return tf.raw_ops.StatelessRandomUniformV2(
            shape=shape,
            key=tf.cast(key[tf.newaxis], tf.uint64),
            counter=tf.cast(counter, tf.uint64),
            alg=_PHILOX,
            dtype=tf.float32,
        )


def _are_bits(bits: Any) -> bool:
    first, *finer = bits if isinstance(bits, (list, tuple)) and bits else [bits]
    good = is_whole_number(first, MIN_BITS, MAX_BITS) and len(finer) <= 1
    return good and all(is_whole_number(bits, first + 1, MAX_FINER_BITS) for bits in finer)


_BITS = Valid(
    f"a whole number from {MIN_BITS} to {MAX_BITS}, or a pair of such a number and a larger "
    f"number up to {MAX_FINER_BITS}",
    _are_bits,
)


def _choose_units(
    shares: Sequence[tf.Tensor], bits: Sequence[Any], finer: Sequence[Sequence[int]], replicas: int
) -> Generator[AllReduce, tf.Tensor, list[Any]]:
    """Returns the bits that determine the unit: of a tensor, or with a pair of each entry.

    The choice depends on the value and not on its rounding, so sent values are right on average.
    """
    chosen = list(bits)
    pairs = [index for index, finer_bits in enumerate(finer) if finer_bits]
    flags = [
        tf.cast(tf.abs(shares[i]) * _STEPS[finer[i][0]] > tf.gather(_STEPS, bits[i]), tf.float32)
        for i in pairs
    ]
    counts = yield from _sum(flags, [_flag_width(replicas)] * len(pairs))
    for index, count in zip(pairs, counts, strict=True):
        coarse = tf.cast(bits[index], tf.int64)
        chosen[index] = tf.where(count > 0, coarse, tf.constant(finer[index][0], tf.int64))
    return chosen


def _rounded(positions: tf.Tensor, uniform: tf.Tensor) -> tf.Tensor:
    """Returns one of the two nearest whole numbers, with the position as the mean; float32.

    A position that is a whole number is returned as it is.
    """
    below = tf.floor(positions)
    return below + tf.cast(uniform < positions - below, tf.float32)


def _code_width(bits: Any, replicas: int) -> Any:
    """Returns the bits of a sum of codes, each from 0 to 2 (2^bits - 1)."""
    return bits + 1 + (replicas - 1).bit_length()


def _flag_width(replicas: int) -> int:
    return replicas.bit_length()


def _words(entries: int, width: Any) -> Any:
    return -(-entries // (_WORD_BITS // width))


def _sum(
    vectors: Sequence[tf.Tensor], widths: Sequence[Any]
) -> Generator[AllReduce, tf.Tensor, list[tf.Tensor]]:
    """Sums whole numbers, exactly.

    Args:
        vectors: float32 vectors, 0 or more.
        widths: For each vector, the maximum bits of its sums; a number or a scalar tensor.

    Returns:
        int64 vectors.
    """
    words = list(map(_packed, vectors, widths))
    answer = yield from request_unless_empty(
        tf.concat([tf.zeros([0], tf.int64), *words], 0), AllReduce
    )
    return [
        _unpacked(part, width, values.shape.num_elements())
        for part, width, values in zip(_split(answer, words), widths, vectors, strict=True)
    ]


def _packed(values: tf.Tensor, width: Any) -> tf.Tensor:
    """Packs whole numbers into int64 words; neighbours are in neighbouring words."""
    entries = values.shape.num_elements()
    lanes, words = _WORD_BITS // width, _words(entries, width)
    padded = tf.pad(tf.cast(values, tf.int64), [[0, lanes * words - entries]])
    shifted = tf.bitwise.left_shift(tf.reshape(padded, [lanes, words]), _shifts(width))
    return tf.reduce_sum(shifted, 0)


def _unpacked(words: tf.Tensor, width: Any, entries: int) -> tf.Tensor:
    shifted = tf.bitwise.right_shift(words[tf.newaxis], _shifts(width))
    return tf.reshape(tf.bitwise.bitwise_and(shifted, 2**width - 1), [-1])[:entries]


def _shifts(width: Any) -> tf.Tensor:
    """Returns the lowest bit of each number in a word; int64 [lanes, 1]."""
    return (tf.range(_WORD_BITS // width, dtype=tf.int64) * width)[:, tf.newaxis]


def _split(vector: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Splits a vector into parts with the lengths of other vectors."""
    return tf.split(vector, list(map(tf.size, like))) if like else []


def _joined(by_index: Mapping[int, tf.Tensor]) -> tf.Tensor:
    """Returns the concatenated vectors, in the order of their numbers."""
    return tf.concat([by_index[index] for index in sorted(by_index)], 0)
