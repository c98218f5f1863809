"""The layer kind of each variable, from which compressors choose their settings."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

CONVOLUTION = "convolution"
DENSE = "dense"
RECURRENT = "recurrent"
EMBEDDING = "embedding"
VECTOR = "vector"
LAYER_KINDS = (CONVOLUTION, DENSE, RECURRENT, EMBEDDING, VECTOR)
FIRST, LAST = "first", "last"

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_ATTENTION = frozenset({"attention", "einsum", "query", "key", "value"})
_RECURRENT = frozenset({"lstm", "gru", "rnn"})


@dataclasses.dataclass(frozen=True)
class GradientSpec:
    """The facts about one gradient that a compressor gets.

    Attributes:
        path: The variable's path, such as `"sequential/conv2d/kernel"`; unique in one exchange.
        shape: Its shape, fully known.
        dtype: The gradient's dtype: `"float32"`, `"float16"` or `"bfloat16"`.
        kind: The layer kind, one of `LAYER_KINDS`.
        positions: The number of output positions in which the layer uses each entry, per sample:
            the pixels of a convolution's output. None if unknown.
        first: Whether it belongs to the model's first convolution, as far as known.
        end: `"first"` or `"last"` if it is the kernel of the model's first or last layer with a
            kernel; None if it is neither, or if this is unknown.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    positions: int | None = None
    first: bool = False
    end: str | None = None

    @property
    def elements(self) -> int:
        """The number of elements of the gradient."""
        return math.prod(self.shape)


class LayerPolicy:
    """Determines the layer kind of each variable.

    Without a model, the kind follows from the variable's shape and its path (without the model's
    name in front), by the first rule that fits. In a layer's name, whole words count, capitals or
    not: `self_attention_1`, `selfAttention` and `SelfAttention2D` have the word `attention`, and
    `keypoint` has no word `key`.

    1. rank 0 or 1: `vector` (biases, the scale and offset of normalization);
    2. the last name is `embeddings`: `embedding`;
    3. rank 2, and the last name is `recurrent_kernel`, or a layer's name has the word `lstm`,
       `gru` or `rnn`: `recurrent` (so the kernels of `ConvLSTM2D` are convolutions);
    4. rank 3 and above, unless a layer's name has the word `attention`, `einsum`, `query`,
       `key` or `value` (projections of attention layers): `convolution`;
    5. all else: `dense`.

    Args:
        kinds: Layer kinds by variable path, with precedence over the rules.
        positions: By variable path, the number of places in the layer's output, per sample, where
            the layer uses each entry. Some methods compress more if there are fewer positions.
        first: Path of the kernel of the first convolution, which some methods leave dense.
        ends: Paths of the kernels of the first and last layers that have one; some methods leave
            these dense. None if unknown.
        max_dense_elements: `tf.IndexedSlices`, the gradient of Keras' `Embedding`, are merged and
            made dense, to be compressed like any other gradient, up to this number of elements in
            the table. Slices of larger tables are sent as slices (by `Cast` in 16 bits), or as the
            whole table if that takes fewer bytes.

    Raises:
        ValueError: If a kind is not one of `LAYER_KINDS`, or `ends` are not two.
    """

    def __init__(
        self,
        kinds: Mapping[str, str] | None = None,
        *,
        positions: Mapping[str, int] | None = None,
        first: str | None = None,
        ends: Sequence[str | None] = (None, None),
        max_dense_elements: int = 2**26,
    ) -> None:
        self.kinds = dict(kinds or {})
        self.positions = dict(positions or {})
        self.first = first
        self.first_kernel, self.last_kernel = ends
        self.max_dense_elements = max_dense_elements
        for path, kind in self.kinds.items():
            if kind not in LAYER_KINDS:
                raise ValueError(
                    f"Policy: unknown layer kind {kind!r} for {path!r}; "
                    f"expected one of {', '.join(LAYER_KINDS)}."
                )

    def kind(self, path: str, shape: Iterable[int]) -> str:
        """The layer kind of the variable at `path` with `shape`."""
        return self.kinds.get(path) or kind_by_rule(path, tuple(shape))

    def spec(self, path: str, shape: Iterable[int], dtype: str) -> GradientSpec:
        """Returns the facts for compressors about the gradient of the variable at `path`."""
        shape = tuple(shape)
        return GradientSpec(
            path,
            shape,
            dtype,
            self.kind(path, shape),
            positions=self.positions.get(path),
            first=path == self.first,
            end=self._end(path),
        )

    def for_paths(self, paths: Sequence[str]) -> LayerPolicy:
        """Returns this policy for the variables at `paths`, if the model's name is another.

        For example, the paths of a `Sequential` model that is loaded from a file lack the model's
        name. If the policy has none of the paths, both are compared without the model's name.
        """
        known = self._paths()
        if known & {*paths}:
            return self
        for policy_key, local_key in ((_layers, str), (str, _layers), (_layers, _layers)):
            paths_by_layers = _unique(local_key, paths)
            names = {
                path: paths_by_layers[layers]
                for layers, path in _unique(policy_key, sorted(known)).items()
                if layers in paths_by_layers
            }
            if names:
                return LayerPolicy(
                    {names[path]: kind for path, kind in self.kinds.items() if path in names},
                    positions={
                        names[path]: count
                        for path, count in self.positions.items()
                        if path in names
                    },
                    first=names.get(self.first or ""),
                    ends=[names.get(path or "") for path in (self.first_kernel, self.last_kernel)],
                    max_dense_elements=self.max_dense_elements,
                )
        return self

    def _paths(self) -> set[str]:
        """Returns the paths of the variables that the policy describes."""
        single = (self.first, self.first_kernel, self.last_kernel)
        return {*self.kinds, *self.positions, *filter(None, single)}

    def _end(self, path: str) -> str | None:
        if path == self.first_kernel:
            return FIRST
        return LAST if path == self.last_kernel else None

    def get_config(self) -> dict[str, Any]:
        """The settings, JSON-serializable, as the constructor takes them."""
        return {
            "kinds": dict(self.kinds),
            "positions": dict(self.positions),
            "first": self.first,
            "ends": [self.first_kernel, self.last_kernel],
            "max_dense_elements": self.max_dense_elements,
        }


def _layers(path: str) -> str:
    """Returns a path without the model's name; empty if the path has only a layer's name."""
    layers = path.partition("/")[2]
    return layers if "/" in layers else ""


def _unique(shorten: Callable[[str], str], paths: Sequence[str]) -> dict[str, str]:
    """The paths by their shortened forms, if these are unique and not empty."""
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(shorten(path), []).append(path)
    return {key: alike[0] for key, alike in found.items() if key and len(alike) == 1}


def checked_policy(policy: LayerPolicy | None) -> LayerPolicy:
    """Returns the given policy, or the documented rules."""
    if policy is not None and not isinstance(policy, LayerPolicy):
        raise TypeError(f"policy: expected a gc.Policy; received {policy!r}.")
    return policy or LayerPolicy()


def kind_by_rule(path: str, shape: tuple[int, ...]) -> str:
    """The layer kind that follows from a variable's path and shape; see `LayerPolicy`."""
    *layers, name = path.split("/")
    layers = layers[1:] or layers  # without the model's own name
    words = {word.lower() for layer in layers for word in _WORD.findall(layer)}
    if len(shape) < 2:
        return VECTOR
    if name == "embeddings":
        return EMBEDDING
    if len(shape) >= 3:
        return DENSE if words & _ATTENTION else CONVOLUTION
    if name == "recurrent_kernel" or words & _RECURRENT:
        return RECURRENT
    return DENSE
