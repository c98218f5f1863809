"""Methods with a main setting that may differ from variable to variable and from step to step."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp.compressors.base import Compressor, ExchangeInputs
from tf_gradcomp.policy import GradientSpec


class HasSettings(Compressor):
    """A method with a main setting for each variable.

    Attributes:
        delays_unless: For a method that leaves most entries in the residual until they are sent:
            the setting with which it sends a variable whole. None for other methods.
    """

    delays_unless: int | None = None

    @abc.abstractmethod
    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        """Returns its own setting for each variable.

        Args:
            specs: What is known of each variable's gradient.

        Returns:
            Numbers as the ops take them: bits of QSGD, entries of TopK, ranks of PowerSGD, elements
            in a bin of AdaComp, or in a chunk of ScaleCom and RandomK. A step may bring other ones:
            see `ExchangeInputs.settings`.
        """

    def settings_in_force(self, inputs: ExchangeInputs) -> tf.Tensor:
        """Returns the settings of this step: those that it brings, or else the method's own."""
        own = self.settings(inputs.specs)
        return tf.convert_to_tensor(own if inputs.settings is None else inputs.settings, tf.int64)
