"""Methods with a main setting that may differ from variable to variable and from step to step."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from tf_gradcomp.compressors.base import Compressor, ExchangeInputs
from tf_gradcomp.policy import GradientSpec


class HasSettings(Compressor):
    """A method with a main setting for each variable.

    Attributes:
        delays_unless: For a method that leaves most entries in the residual until they are sent:
            the setting with which it sends a variable whole. None for other methods.
    """

    delays_unless: ClassVar[int | None] = None

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

    def payload_bytes(self, specs: Sequence[GradientSpec]) -> int | None:
        """Returns the bytes that a replica sends in a step, if the gradients' shapes decide them.

        Advice asks; it tries gradients of other shapes than the model's.

        Args:
            specs: What is known of each variable's gradient.

        Returns:
            None if bytes grow with the number of elements, whatever the shapes, or depend on the
            values of gradients.
        """
        return None

    def settings_in_force(self, inputs: ExchangeInputs) -> tf.Tensor:
        """Returns the settings of this step: those that it brings, or else the method's own."""
        own = self.settings(inputs.specs)
        return tf.convert_to_tensor(own if inputs.settings is None else inputs.settings, tf.int64)

    def delayed(self, inputs: ExchangeInputs) -> tf.Tensor:
        """Returns which gradients are mostly delayed, by the setting of each."""
        never = super().delayed(inputs)
        if self.delays_unless is None:
            return never
        delays = tf.not_equal(
            self.settings_in_force(inputs)[: len(inputs.specs)], self.delays_unless
        )
        return tf.logical_and(delays, [spec.elements > 1 for spec in inputs.specs])
