"""LGC's autoencoder as a Keras model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.lgc.autoencoder import Architecture, Convolution
from tf_gradcomp.keras_version import keras

_DEFAULT = Architecture()
_FLOATS = {"dtype": "float32", "data_format": "channels_last"}  # independent of Keras' settings


@keras.saving.register_keras_serializable(package="tf_gradcomp")
class Autoencoder(keras.Model):
    """The autoencoder with which `LGC` codes the largest entries of gradients.

    The encoder turns a vector of n entries into a latent, and the decoder turns the latent into a
    vector again; n is a multiple of the product of the encoder's strides. With the default sizes,
    the paper's, 16 entries become 4 floats.

    Inspect the model with `summary(expand_nested=True)` and save it with `save`.
    `gc.compressors.LGC(autoencoder=...)` continues training from its weights. The model has its own
    variables; the variables that a job trains are in the state of the job, and
    `gc.callbacks.AutoencoderTraining.autoencoder` returns a copy.

    Args:
        innovations: Whether the output has a channel for each replica's innovation to a shared
            latent, as `pattern="parameter_server"` needs.
        encoder: The layers of the encoder: filters, kernel size and stride of each.
        decoder: The layers of the decoder, without the output.
        slope: Of the leaky ReLU behind every layer but the output; 1 makes the model linear.
        seed: Of the initial weights.
        **kwargs: As for `keras.Model`.

    Raises:
        ValueError: If sizes are not valid.
    """

    def __init__(
        self,
        innovations: bool = False,
        encoder: Sequence[Sequence[int]] = _DEFAULT.encoder,
        decoder: Sequence[Sequence[int]] = _DEFAULT.decoder,
        slope: float = _DEFAULT.slope,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"dtype": "float32", **kwargs})
        sizes = {"encoder": encoder, "decoder": decoder, "slope": slope}
        self.architecture = Architecture.of(sizes)
        self.innovations = innovations
        self.seed = seed
        seeds = iter(range(1000 * seed, 1000 * (seed + 1)))
        layers, inner = keras.layers, self.architecture.encoder
        self.encoder = _coder("encoder", layers.Conv1D, 1, inner, slope, seeds)
        channels, outer = self.architecture.channels, self.architecture.decoder
        self.decoder = _coder("decoder", layers.Conv1DTranspose, channels, outer, slope, seeds)
        self.output_layer = keras.layers.Conv1D(
            1, 1, name="output", kernel_initializer=_initializer(seeds), **_FLOATS
        )
        self(tf.zeros((1, self.architecture.shortening, 1)))
        if innovations:  # which passes entries unchanged; from other weights, training takes long
            kernel, bias = self.output_layer.get_weights()
            kernel[:, -1] = 1
            self.output_layer.set_weights([kernel, bias])

    def call(self, vectors: Any, innovations: Any = None) -> Any:
        """Codes vectors and decodes them.

        Args:
            vectors: [rows, n, 1].
            innovations: [rows, n, 1], if the model is for them; zeros by default.
        """
        return self.decode(self.encoder(vectors), innovations)

    def decode(self, latents: Any, innovations: Any = None) -> Any:
        """The vectors, [rows, n, 1], that latents encode.

        Args:
            latents: [rows, n / 16, 4] with the default sizes; one row may be for all innovations.
            innovations: As for `call`.
        """
        expanded = self.decoder(latents)
        if not self.innovations:
            return self.output_layer(expanded)
        if innovations is None:
            innovations = tf.zeros_like(expanded[:, :, :1])
        rows = tf.zeros_like(innovations)
        return self.output_layer(tf.concat([expanded + rows, innovations], -1))

    def flat_weights(self) -> np.ndarray:
        """All kernels and biases in the order of the layers, as one float32 vector."""
        return np.concatenate([np.ravel(weights) for weights in self.get_weights()])

    def set_flat_weights(self, weights: np.ndarray) -> None:
        """Sets all kernels and biases, as `flat_weights` returns them."""
        shapes = self.architecture.shapes(self.innovations)
        ends = np.cumsum([np.prod(shape) for shape in shapes])
        parts = zip(np.split(weights, ends[:-1]), shapes, strict=True)
        self.set_weights([part.reshape(shape) for part, shape in parts])

    def description(self) -> dict[str, Any]:
        """Returns the sizes and weights for `gc.compressors.LGC`, JSON-serializable."""
        sizes = self.architecture
        return Architecture(
            sizes.encoder, sizes.decoder, sizes.slope, self.flat_weights()
        ).description()

    @classmethod
    def of(
        cls, architecture: Architecture, innovations: bool, weights: np.ndarray | None
    ) -> Autoencoder:
        """The model with given sizes and, optionally, given weights."""
        sizes = (architecture.encoder, architecture.decoder, architecture.slope)
        model = cls(innovations, *sizes)
        if weights is not None:
            model.set_flat_weights(weights)
        return model

    def get_config(self) -> dict[str, Any]:
        """The settings, JSON-serializable, as the constructor takes them."""
        sizes = self.architecture.description()
        return {
            **super().get_config(),
            **{name: sizes[name] for name in ("encoder", "decoder", "slope")},
            "innovations": self.innovations,
            "seed": self.seed,
        }


def _coder(
    name: str,
    kind: Callable[..., keras.layers.Layer],
    channels: int,
    sizes: Sequence[Convolution],
    slope: float,
    seeds: Iterator[int],
) -> keras.Sequential:
    """Convolutions of some kind, each followed by a leaky ReLU."""
    layers: list[Any] = [keras.Input((None, channels), dtype="float32")]
    for filters, kernel, stride in sizes:
        layers += [
            kind(
                filters,
                kernel,
                stride,
                padding="same",
                kernel_initializer=_initializer(seeds),
                **_FLOATS,
            ),
            keras.layers.LeakyReLU(slope, dtype="float32"),
        ]
    return keras.Sequential(layers, name=name)


def _initializer(seeds: Iterator[int]) -> keras.initializers.Initializer:
    """Uses a separate seed, which leaves Keras' generator and thus the user's model unchanged."""
    return keras.initializers.GlorotUniform(seed=next(seeds))
