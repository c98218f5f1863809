"""`gc.Policy`: the layer kinds of a Keras model's variables."""

from __future__ import annotations

import math

from tf_gradcomp.exchange.gradients import path_of
from tf_gradcomp.keras_version import keras, keras_private
from tf_gradcomp.policy import (
    CONVOLUTION,
    DENSE,
    EMBEDDING,
    RECURRENT,
    VECTOR,
    LayerPolicy,
    kind_by_rule,
)


class Policy(LayerPolicy):
    """Determines the layer kind of each variable; `from_model` reads kinds from a Keras model.

    Arguments, rules and errors are as for `tf_gradcomp.policy.LayerPolicy`: by default a kind
    follows from the variable's path and shape.
    """

    @classmethod
    def from_model(cls, model: keras.Model, *, max_dense_elements: int = 2**26) -> Policy:
        """Reads layer kinds, output sizes of convolutions and both ends from a built Keras model.

        Args:
            model: A built Keras model. Sizes are known for layers of functional and sequential
                models.
            max_dense_elements: As for `LayerPolicy`.

        Raises:
            ValueError: If the model has no variables yet.
        """
        if not model.trainable_variables:
            raise ValueError(
                f"Policy.from_model: {model.name!r} has no trainable variables; build the model "
                "first, with an Input layer, model.build(input_shape), or a call on a batch."
            )
        kinds: dict[str, str] = {}
        positions: dict[str, int] = {}
        for layer in reversed(keras_private.layers_of(model)):  # the parts of a layer come first
            for variable in layer.trainable_variables:
                kind = _kind_in_layer(layer, variable)
                if kind and path_of(variable) not in kinds:
                    kinds[path_of(variable)] = kind
                    if kind == CONVOLUTION:
                        positions |= _positions(layer, variable)
        known = [path for path in map(path_of, model.trainable_variables) if path in kinds]
        kernels = [path for path in known if kinds[path] != VECTOR]
        first = next((path for path in known if kinds[path] == CONVOLUTION), None)
        for variable in model.trainable_variables:
            kinds.setdefault(
                path_of(variable), kind_by_rule(path_of(variable), tuple(variable.shape))
            )
        ends = (kernels[0], kernels[-1]) if kernels else (None, None)
        return cls(
            kinds,
            positions=positions,
            first=first,
            ends=ends,
            max_dense_elements=max_dense_elements,
        )


def _positions(layer: keras.layers.Layer, variable: keras.Variable) -> dict[str, int]:
    try:
        shape = layer.output.shape
    except (AttributeError, ValueError):  # not called in a graph of layers, or called twice
        return {}
    channels_last = getattr(layer, "data_format", "channels_last") == "channels_last"
    pixels = shape[1:-1] if channels_last else shape[2:]
    return {} if None in pixels else {path_of(variable): math.prod(pixels)}


def _kind_in_layer(layer: keras.layers.Layer, variable: keras.Variable) -> str | None:
    if len(variable.shape) < 2:
        return VECTOR
    if isinstance(layer, keras.layers.Embedding):
        return EMBEDDING
    if isinstance(layer, _CONVOLUTIONS):  # before RNN, because ConvLSTM2D is also an RNN
        return CONVOLUTION
    if isinstance(layer, _RECURRENT_CELLS):
        return RECURRENT
    if isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense)):
        return DENSE
    return None


_RECURRENT_CELLS = (
    keras.layers.LSTMCell,
    keras.layers.GRUCell,
    keras.layers.SimpleRNNCell,
    keras.layers.RNN,
)
_CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
    keras.layers.ConvLSTM1D,
    keras.layers.ConvLSTM2D,
    keras.layers.ConvLSTM3D,
)
