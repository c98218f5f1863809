"""LGC in NumPy: one step of each of its phases, for all replicas together.

The encoder and the decoder may be any functions; `Network` has the paper's. All arithmetic is in
the dtype of the gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

Arrays = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of a step.

    Attributes:
        total: The sum of what all replicas sent, dense; equal on all.
        residuals: What each replica keeps, [replicas, elements].
        shares: What each replica sent of the chosen entries, [replicas, entries].
        places: Where these entries are.
    """

    total: np.ndarray
    residuals: np.ndarray
    shares: np.ndarray
    places: np.ndarray


@dataclasses.dataclass(frozen=True)
class Coder:
    """An encoder and a decoder, of vectors that are filled up to a multiple of `shortening`.

    Attributes:
        encode: Makes a latent of a vector.
        decode: Makes a vector of a latent, with an innovation in the last channel of its output.
        share: Decodes a latent with the slopes of the mean latent; takes the mean and the latent.
        shortening: The entries for each place of a latent.
    """

    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray, np.ndarray | None], np.ndarray]
    share: Callable[[np.ndarray, np.ndarray], np.ndarray]
    shortening: int = 16

    def padded(self, vector: np.ndarray) -> np.ndarray:
        """A vector with zeros behind it."""
        return np.pad(vector, (0, -len(vector) % self.shortening))


def identity() -> Coder:
    """A coder that changes nothing, which makes LGC top-k by a leader, with plain error
    feedback."""
    return Coder(
        encode=lambda vector: vector,
        decode=lambda latent, innovation: latent,
        share=lambda mean, latent: latent,
        shortening=1,
    )


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Where the entries of largest magnitude are, the first of equals (specification, section 3).

    They are in the order of their values, and equal values in the order of their positions.
    """
    indices = np.sort(np.argsort(-np.abs(values), kind="stable")[:count])
    return indices[np.argsort(values[indices], kind="stable")]


def packed(indices: np.ndarray, elements: int) -> np.ndarray:
    """Places in a tensor as int32 words, each in as many bits as the last place there needs."""
    bits = max(1, (elements - 1).bit_length())
    index_bytes = indices.astype("<u4")[:, np.newaxis].view(np.uint8)
    flat = np.unpackbits(index_bytes, axis=1, bitorder="little")[:, :bits].reshape(-1)
    return np.packbits(np.pad(flat, (0, -flat.size % 32)), bitorder="little").view("<i4")


def scale(values: np.ndarray) -> np.floating:
    """The root mean square; 0 where that is not a positive number."""
    most = np.abs(values).max(initial=0)
    if not (most > 0 and np.isfinite(most)):
        return values.dtype.type(0)
    return most * np.sqrt(np.mean(np.square(values / most)))


def over(values: np.ndarray, s: np.floating) -> np.ndarray:
    """The values over their scale; zeros where that is 0."""
    return values / s if s > 0 else np.zeros_like(values)


def top_k_by_leader(
    values: np.ndarray, leader: int, counts: Sequence[int], sizes: Sequence[int]
) -> np.ndarray:
    """Where the leader's largest entries of each of several tensors are, in order of value."""
    ends = np.cumsum(sizes)
    return np.concatenate(
        [
            end - size + largest(values[leader][end - size : end], count)
            for end, size, count in zip(ends, sizes, counts, strict=True)
        ]
    )


def sum_entries(values: np.ndarray, indices: np.ndarray) -> Outcome:
    """Phase 2: the entries as they are (CLT-k with plain error feedback).

    Args:
        values: Residuals plus gradients, [replicas, elements], divided by the number of replicas.
        indices: Where the leader's largest entries are.
    """
    return _apply(values, indices, values[:, indices], _in_order(values[:, indices]))


def all_reduce(values: np.ndarray, indices: np.ndarray, leader: int, coder: Coder) -> Outcome:
    """Phase 3 with averaged latents: what each sent is its share of the decoded mean.

    Arguments as for `sum_entries`, with the leader's number and the coder.
    """
    chosen = values[:, indices]
    size, count = chosen.shape
    s = scale(chosen[leader])
    latents = [coder.encode(coder.padded(over(vector, s))) for vector in chosen]
    mean = sum(latents[1:], latents[0]) / chosen.dtype.type(size)
    decoded = coder.decode(mean, None)[:count] * s
    shares = np.stack([coder.share(mean, latent)[:count] * s for latent in latents])
    return _apply(values, indices, shares, decoded * chosen.dtype.type(size))


def parameter_server(
    values: np.ndarray, indices: np.ndarray, leader: int, coder: Coder, added: int
) -> Outcome:
    """Phase 3 with the leader's latent and each replica's innovation, of `added` entries."""
    chosen = values[:, indices]
    latent = coder.encode(coder.padded(over(chosen[leader], scale(chosen[leader]))))
    shares = []
    for vector in chosen:
        s = scale(vector)
        innovation = np.zeros_like(coder.padded(vector))
        kept = largest(vector, added)
        innovation[kept] = over(vector[kept], s)
        shares.append(coder.decode(latent, innovation)[: len(indices)] * s)
    return _apply(values, indices, np.stack(shares), _in_order(np.stack(shares)))


def dropping(values: np.ndarray, indices: np.ndarray, leader: int, coder: Coder) -> Outcome:
    """As `all_reduce`, but residuals are zero at `indices`, as a published program has them.

    Loses the coder's error; a test of conservation must find the loss.
    """
    outcome = all_reduce(values, indices, leader, coder)
    residuals = values.copy()
    residuals[:, indices] = 0
    return dataclasses.replace(outcome, residuals=residuals)


def _apply(
    values: np.ndarray, indices: np.ndarray, shares: np.ndarray, total: np.ndarray
) -> Outcome:
    dense = np.zeros_like(values[0])
    dense[indices] = total
    residuals = values.copy()
    residuals[:, indices] = values[:, indices] - shares
    return Outcome(dense, residuals, shares, indices)


def _in_order(rows: np.ndarray) -> np.ndarray:
    """The sum of rows, added one after the other."""
    return np.cumsum(rows, 0, dtype=rows.dtype)[-1]


class Network:
    """The convolutions of the paper's autoencoder, or of other sizes (specification, section 2).

    Args:
        layers: Filters, kernel size and stride of each layer of the encoder, and of the decoder.
        weights: Kernels and biases in their order, as Keras has them.
        slope: Of the leaky ReLU.
    """

    def __init__(
        self,
        layers: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
        weights: Arrays,
        slope: float = 0.01,
    ) -> None:
        pairs = list(zip(weights[::2], weights[1::2], strict=True))
        encoder, decoder = layers
        self._slope = slope
        self._encoder = list(zip(encoder, pairs[: len(encoder)], strict=True))
        self._decoder = list(zip(decoder, pairs[len(encoder) : -1], strict=True))
        self._output = pairs[-1]
        self._shortening = math.prod(stride for _, _, stride in encoder)

    def coder(self) -> Coder:
        """The network's encoder and decoder."""
        return Coder(self.encode, self.decode, self.share, self._shortening)

    def encode(self, vector: np.ndarray) -> np.ndarray:
        """[n] to [n / shortening, channels]."""
        x = vector[:, np.newaxis]
        for (_, _, stride), (kernel, bias) in self._encoder:
            x = self._leaky(_convolved(x, kernel, stride) + bias)
        return x

    def decode(self, latent: np.ndarray, innovation: np.ndarray | None = None) -> np.ndarray:
        """[n / shortening, channels] to [n], with innovations [n] in the output's last channel."""
        x = latent
        for (_, _, stride), (kernel, bias) in self._decoder:
            x = self._leaky(_transposed(x, kernel, stride) + bias)
        return self._out(x, innovation)

    def share(self, mean: np.ndarray, latent: np.ndarray) -> np.ndarray:
        """A latent decoded with the slopes of the mean (specification, `decode_frozen`)."""
        both = [mean, latent]
        for (_, _, stride), (kernel, bias) in self._decoder:
            both = [_transposed(x, kernel, stride) + bias for x in both]
            above = both[0] > 0
            both = [np.where(above, x, x.dtype.type(self._slope) * x) for x in both]
        return self._out(both[1], None)

    def _leaky(self, x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, x, x.dtype.type(self._slope) * x)

    def _out(self, x: np.ndarray, innovation: np.ndarray | None) -> np.ndarray:
        kernel, bias = self._output
        if innovation is not None:
            x = np.concatenate([x, innovation[:, np.newaxis]], 1)
        return (x @ kernel[0] + bias)[:, 0]


def _convolved(x: np.ndarray, kernel: np.ndarray, stride: int) -> np.ndarray:
    """A convolution with "same" padding: [n, inputs] to [n / stride, outputs]."""
    size = len(kernel)
    missing = max(size - stride, 0)
    padded = np.pad(x, ((missing // 2, missing - missing // 2), (0, 0)))
    starts = range(0, len(x), stride)
    windows = np.stack([padded[start : start + size].reshape(-1) for start in starts])
    return windows @ kernel.reshape(-1, kernel.shape[2])


def _transposed(x: np.ndarray, kernel: np.ndarray, stride: int) -> np.ndarray:
    """The transpose of `_convolved`: [n, inputs] to [n stride, outputs]; the kernel as Keras'."""
    size = len(kernel)
    missing = max(size - stride, 0)
    spread = np.zeros((len(x) * stride + missing, kernel.shape[1]), x.dtype)
    for index, values in enumerate(x):
        spread[index * stride : index * stride + size] += kernel @ values
    return spread[missing // 2 : missing // 2 + len(x) * stride]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The numbers from which the bytes of a step follow (specification, section 4).

    Attributes:
        elements: The number of elements of all gradients.
        dense: The number of elements of gradients that are summed whole.
        coded: The entries for the autoencoder.
        plain: The entries of the last layer.
        latent: The floats of a latent.
        replicas: Their number.
        place_bytes: Of where the entries are; on the wire, of `packed` places.
        index_bytes: Of where an innovation is among the entries for the autoencoder.
    """

    elements: int
    dense: int
    coded: int
    plain: int
    latent: int
    replicas: int
    place_bytes: float
    index_bytes: float = 4

    @property
    def _places(self) -> float:
        """One replica sends the places of the entries."""
        return self.place_bytes / self.replicas

    def top_k(self) -> float:
        """Bytes of a replica's payload in phase 2, without headers."""
        return 4 * (self.dense + self.coded + self.plain) + self._places

    def all_reduce(self) -> float:
        """Bytes in phase 3 with averaged latents."""
        return 4 * (self.dense + self.plain + self.latent) + self._places + 4 / self.replicas

    def parameter_server(self, added: int) -> float:
        """Bytes in phase 3 with the leader's latent and innovations."""
        latent = 4 * self.latent / self.replicas
        added_bytes = (4 + self.index_bytes) * added
        return 4 * (self.dense + self.plain) + latent + added_bytes + 4 + self._places

    def ratio(self, payload_bytes: float) -> float:
        """The payload ratio of a phase."""
        return 4 * self.elements / payload_bytes


def whole_run_ratio(
    steps: int, dense_steps: int, training_steps: int, ratios: tuple[float, float], sent: float
) -> float:
    """The ratio of a whole run, warm-up and weights counted.

    Args:
        steps: Of the run.
        dense_steps: Of phase 1.
        training_steps: Of phase 2.
        ratios: Of phases 2 and 3.
        sent: The autoencoder's weights, relative to the elements of all gradients.
    """
    training, coding = ratios
    rest = steps - dense_steps - training_steps
    return steps / (dense_steps + training_steps / training + rest / coding + sent)
