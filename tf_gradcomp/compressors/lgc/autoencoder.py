"""LGC's autoencoder in plain TensorFlow: its sizes, and its functions for given weights.

`tests.reference.lgc` is the same in NumPy, and `gc.Autoencoder` the same as a Keras
model.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.settings import is_whole_number

_LARGEST = 2**20  # of any size
_EXPECTED = (
    "LGC: autoencoder must be a gc.Autoencoder, or its description: a mapping with "
    "'encoder' and 'decoder', lists of (filters, kernel size, stride) whose strides have the same "
    "product, and optionally 'slope' and 'weights'"
)


class Convolution(NamedTuple):
    """A layer: a convolution in the encoder, or a transposed convolution in the decoder."""

    filters: int
    kernel: int
    stride: int


@runtime_checkable
class Described(Protocol):
    """An object that can replace the description of an autoencoder, such as the Keras model."""

    def description(self) -> dict[str, Any]:
        """Returns the description that `Architecture.of` takes."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The sizes of an autoencoder of vectors and, optionally, its initial weights.

    The encoder turns a vector into a latent, and the decoder turns the latent into channels. The
    output, a convolution of kernel size 1, turns the channels into a vector. A leaky ReLU follows
    every layer except the output.
    """

    # The layers of the encoder; by default the paper's.
    encoder: tuple[Convolution, ...] = (
        Convolution(64, 3, 2),
        Convolution(128, 3, 2),
        Convolution(256, 3, 2),
        Convolution(64, 3, 2),
        Convolution(4, 1, 1),
    )
    # The layers of the decoder, without the output.
    decoder: tuple[Convolution, ...] = (
        Convolution(32, 3, 2),
        Convolution(64, 3, 2),
        Convolution(128, 3, 2),
        Convolution(32, 3, 2),
    )
    slope: float = 0.01  # of the leaky ReLU below zero; with 1, the autoencoder is linear
    # All kernels and biases, float32, flat and in the order of the layers; None: a new model's
    # weights. Weights are not compared: see `digest`.
    weights: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def of(cls, architecture: Mapping[str, Any] | Described | None) -> Architecture:
        """The architecture of a description or of an object that has one; the paper's for None."""
        if architecture is None:
            return cls()
        if isinstance(architecture, Described):
            architecture = architecture.description()
        try:
            return cls._checked(dict(architecture))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{_EXPECTED}; received {_shortened(architecture)} ({error})."
            ) from None

    @classmethod
    def _checked(cls, settings: dict[str, Any]) -> Architecture:
        unknown = set(settings) - {"encoder", "decoder", "slope", "weights"}
        if unknown:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        default = cls()
        encoder, decoder = (
            tuple(Convolution(*layer) for layer in settings.get(name, getattr(default, name)))
            for name in ("encoder", "decoder")
        )
        sizes = [size for layer in (*encoder, *decoder) for size in layer]
        if not all(is_whole_number(size, 1, _LARGEST) for size in sizes):
            raise ValueError("sizes are whole numbers of at least 1")
        slope = settings.get("slope", default.slope)
        if isinstance(slope, bool) or not isinstance(slope, (int, float)) or not 0 <= slope <= 1:
            raise ValueError("a slope is a number from 0 to 1")
        if math.prod(c.stride for c in encoder) != math.prod(c.stride for c in decoder):
            raise ValueError("the strides of encoder and decoder have different products")
        weights = settings.get("weights")
        if isinstance(weights, str):
            weights = np.frombuffer(base64.b64decode(weights), "<f4")
        if weights is not None:
            weights = np.asarray(weights, np.float32).reshape(-1)
        return cls(encoder, decoder, float(slope), weights)

    def checked_weights(self, innovations: bool) -> Architecture:
        """Returns itself; raises ValueError if it has too many or too few weights."""
        needed = self.parameters(innovations)
        if self.weights is not None and self.weights.size != needed:
            raise ValueError(
                f"LGC: the autoencoder has {self.weights.size:,} weights; expected {needed:,}. A "
                "model for the other pattern has one weight more or one fewer; create a model "
                f"with innovations={innovations}."
            )
        return self

    def description(self) -> dict[str, Any]:
        """Returns the description that `of` takes, JSON-serializable."""
        description: dict[str, Any] = {
            "encoder": [list(layer) for layer in self.encoder],
            "decoder": [list(layer) for layer in self.decoder],
            "slope": self.slope,
        }
        if self.weights is not None:
            data = self.weights.astype("<f4").tobytes()
            description["weights"] = base64.b64encode(data).decode("ascii")
        return description

    @property
    def shortening(self) -> int:
        """Number of entries of a vector per position of its latent."""
        return math.prod(layer.stride for layer in self.encoder)

    @property
    def channels(self) -> int:
        """The number of floats at each position of a latent."""
        return self.encoder[-1].filters if self.encoder else 1

    def padded(self, entries: int) -> int:
        """The length of a vector for a number of entries, padded to a multiple of `shortening`."""
        return -(-entries // self.shortening) * self.shortening

    def latents(self, entries: int) -> int:
        """The number of floats in the latent for a number of entries."""
        return self.padded(entries) // self.shortening * self.channels

    def shapes(self, innovations: bool) -> list[tuple[int, ...]]:
        """Returns the shapes of kernel and bias of each layer, in their order, as Keras has them.

        With `innovations`, the output has one more channel, for a worker's innovation to a shared
        latent.
        """
        shapes: list[tuple[int, ...]] = []
        inputs = 1
        for layer in self.encoder:
            shapes += [(layer.kernel, inputs, layer.filters), (layer.filters,)]
            inputs = layer.filters
        for layer in self.decoder:  # whose kernels Keras has transposed
            shapes += [(layer.kernel, layer.filters, inputs), (layer.filters,)]
            inputs = layer.filters
        return [*shapes, (1, inputs + innovations, 1), (1,)]

    def parameters(self, innovations: bool) -> int:
        """The number of all weights."""
        return sum(math.prod(shape) for shape in self.shapes(innovations))


def _shortened(architecture: Any) -> str:
    if isinstance(architecture, Mapping) and "weights" in architecture:
        architecture = {**architecture, "weights": "..."}
    return repr(architecture)


def weights_text(architecture: Architecture) -> str:
    """A short text that differs if weights differ; empty without any."""
    if architecture.weights is None:
        return ""
    return hashlib.sha256(architecture.weights.astype("<f4").tobytes()).hexdigest()[:16]


class Network:
    """An autoencoder with its weights.

    Vectors are [rows, n], n a multiple of `Architecture.shortening`; latents [rows, n / shortening,
    channels]; and the decoder's results are [rows, n, channels of its last layer].
    """

    def __init__(self, architecture: Architecture, weights: tf.Tensor, innovations: bool) -> None:
        """Cuts flat weights, float32, into kernels and biases."""
        shapes = architecture.shapes(innovations)
        parts = tf.split(weights, [math.prod(shape) for shape in shapes])
        tensors = [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
        pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
        count = len(architecture.encoder)
        self._architecture = architecture
        self._encoder, self._decoder, self._output = pairs[:count], pairs[count:-1], pairs[-1]

    def encode(self, vectors: tf.Tensor) -> tf.Tensor:
        """The latents of vectors."""
        x = vectors[:, :, tf.newaxis]
        for layer, (kernel, bias) in zip(self._architecture.encoder, self._encoder, strict=True):
            x = tf.nn.conv1d(x, kernel, layer.stride, "SAME") + bias
            x = self._leaky(x, x)
        return x

    def expand(self, latents: tf.Tensor, *, frozen: bool = False) -> tf.Tensor:
        """Runs the decoder on latents; the result is the input of `output`.

        If `frozen`, all rows use the slopes of the first row, so that the decoder is affine. If the
        first latent is then the mean of the others, the first result is the mean of the other
        results.
        """
        x = latents
        for layer, (kernel, bias) in zip(self._architecture.decoder, self._decoder, strict=True):
            rows, length, _ = tf.unstack(tf.shape(x))
            shape = [rows, length * layer.stride, layer.filters]
            x = tf.nn.conv1d_transpose(x, kernel, shape, layer.stride, "SAME") + bias
            x = self._leaky(x, x[:1] if frozen else x)
        return x

    def output(self, expanded: tf.Tensor, innovations: tf.Tensor | None = None) -> tf.Tensor:
        """Returns the vectors of the output: float32 [rows, n].

        Innovations, float32 [rows, n], go in the last channel. There may be more rows of
        innovations if there is one row of `expanded`.
        """
        kernel, bias = self._output
        weights = kernel[0, :, 0]
        if innovations is None:
            return tf.linalg.matvec(expanded, weights) + bias
        shared = tf.linalg.matvec(expanded, weights[:-1]) + bias
        return shared + weights[-1] * innovations

    def _leaky(self, x: tf.Tensor, sloped: tf.Tensor) -> tf.Tensor:
        return tf.where(sloped > 0, x, self._architecture.slope * x)
