"""What every compression method provides."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

from tf_gradcomp.distribute.communicator import Wish
from tf_gradcomp.policy import GradientSpec


@dataclasses.dataclass(frozen=True)
class ExchangeInputs:
    """One replica's side of one step.

    Attributes:
        specs: What is known of each gradient.
        gradients: Dense tensors, in the shapes and dtypes of `specs`.
        residuals: Resource handles of this replica's float32 residuals, in the same shapes; empty
            for a method that keeps none.
        step: int64 scalar, equal on all replicas.
        finite: bool scalar, equal on all replicas; where it is false, the step is to be skipped
            whatever the gradients are.
        size: The number of replicas.
    """

    specs: Sequence[GradientSpec]
    gradients: Sequence[tf.Tensor]
    residuals: Sequence[tf.Tensor]
    step: tf.Tensor
    finite: tf.Tensor
    size: int


class Exchanged(NamedTuple):
    """What an exchange gives each replica.

    Attributes:
        reduced: Dense float32 gradients, summed over the replicas; zeros where a gradient was not
            finite. To be used only where `finite`.
        finite: bool scalar, equal on all replicas; where it is false, nothing was exchanged: what
            finite replicas had packed is back in their residuals, if the method keeps any.
        tensor_bytes: int64 [tensors], the bytes that each tensor takes in this replica's payload.
    """

    reduced: list[tf.Tensor]
    finite: tf.Tensor
    tensor_bytes: tf.Tensor


class Compressor(abc.ABC):
    """A method with its settings. It knows no strategy and no Keras; it holds no state.

    Attributes:
        name: By which `gc.compressors.get` knows it.
        keeps_residuals: Whether what it does not send stays in a residual for the next step.
    """

    name: ClassVar[str]
    keeps_residuals: ClassVar[bool] = True

    @abc.abstractmethod
    def exchange(self, inputs: ExchangeInputs) -> Generator[Wish, tf.Tensor, Exchanged]:
        """One replica's side of a step: yields what to communicate and is sent the answer."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """The settings, JSON-serializable, as the constructor takes them."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Compressor:
        """The compressor with the settings that `get_config` returned."""
        return cls(**config)

    def fingerprint(self, specs: Sequence[GradientSpec]) -> int:
        """A signed 64-bit number that differs where replicas differ in tensors or settings."""
        facts = [self.name, self.get_config(), [dataclasses.astuple(spec) for spec in specs]]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({settings})"
