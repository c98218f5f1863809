"""Protocols that only some methods implement, and the answers for methods that do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Protocol, runtime_checkable

import tensorflow as tf

from tf_gradcomp.compressors.base import Compressor, Exchanged, ExchangeInputs, JobStateSpec
from tf_gradcomp.compressors.contract import checked
from tf_gradcomp.compressors.requests import Request
from tf_gradcomp.compressors.settings import HasSettings
from tf_gradcomp.policy import GradientSpec


@runtime_checkable
class KeepsJobState(Protocol):
    """A method that keeps variables for the whole job."""

    def job_state(self, specs: Sequence[GradientSpec]) -> dict[str, JobStateSpec]:
        """Returns the variables by name."""


@runtime_checkable
class GathersSlices(Protocol):
    """A method that gathers `tf.IndexedSlices` uncompressed, with values as `slices_dtype`."""

    slices_dtype: tf.DType


@runtime_checkable
class Preconditions(Protocol):
    """A method whose `exchange` itself divides gradients by the roots of second moments.

    The bits equal `ExchangeInputs.preconditioned`. AMSGrad's second moments are an
    exception: `conversation` divides by their roots for all methods.
    """

    preconditions: bool


@runtime_checkable
class ScalesResidual(Protocol):
    """A method whose residual, divided by `residual_scale`, is in units of the gradients."""

    residual_scale: float


@runtime_checkable
class Delays(Protocol):
    """A method without settings that delays most entries in the residual."""

    def delayed(self, specs: Sequence[GradientSpec]) -> Sequence[bool]:
        """Returns which gradients are mostly delayed.

        A variable of one element is never delayed, so return False for it.
        """


@runtime_checkable
class KnowsPayload(Protocol):
    """A method that sends the same bytes in each step, determined by the gradients' shapes."""

    def payload_bytes(self, specs: Sequence[GradientSpec]) -> int | None:
        """Returns the bytes that a replica sends in a step; None if shapes do not determine it."""


def job_state(compressor: Compressor, specs: Sequence[GradientSpec]) -> dict[str, JobStateSpec]:
    """Returns the variables that a method keeps for the whole job, by name."""
    return compressor.job_state(specs) if isinstance(compressor, KeepsJobState) else {}


def slices_dtype(compressor: Compressor) -> tf.DType:
    """Returns the dtype in which slices are gathered, with any method if the table is large."""
    return compressor.slices_dtype if isinstance(compressor, GathersSlices) else tf.float32


def residual_scale(compressor: Compressor) -> float:
    """Returns the scale of a residual: residual over the sum of the delayed gradients."""
    return compressor.residual_scale if isinstance(compressor, ScalesResidual) else 1.0


def payload_bytes(compressor: Compressor, specs: Sequence[GradientSpec]) -> int | None:
    """Returns the bytes that a replica sends in a step; None if shapes do not determine it.

    Advice measures gradients with other shapes than the model's gradients. For None, advice assumes
    bytes proportional to the number of elements.
    """
    return compressor.payload_bytes(specs) if isinstance(compressor, KnowsPayload) else None


def settings_in_force(compressor: Compressor, inputs: ExchangeInputs) -> tf.Tensor | None:
    """Returns the main settings of this step, int64 [tensors]; None for a method without any."""
    if isinstance(compressor, HasSettings):
        return compressor.settings_in_force(inputs)
    if inputs.settings is not None:
        raise ValueError(f"{compressor!r} has no setting that differs by variable.")
    return None


def delayed(compressor: Compressor, inputs: ExchangeInputs) -> tf.Tensor:
    """Returns which gradients are mostly delayed in the residual: bool [tensors]."""
    if isinstance(compressor, Delays):
        return tf.constant(compressor.delayed(inputs.specs), tf.bool, [len(inputs.specs)])
    if not isinstance(compressor, HasSettings) or compressor.delays_unless is None:
        return tf.zeros([len(inputs.specs)], tf.bool)
    settings = compressor.settings_in_force(inputs)[: len(inputs.specs)]
    delays = tf.not_equal(settings, compressor.delays_unless)
    return tf.logical_and(delays, [spec.elements > 1 for spec in inputs.specs])


def conversation(
    compressor: Compressor, inputs: ExchangeInputs
) -> Generator[Request, tf.Tensor, Exchanged]:
    """Runs a method's `exchange`, on divided gradients if there are second moments.

    Raises:
        TypeError, ValueError: When the step is traced, if a request or the result is malformed.
    """
    if inputs.settings is not None:
        settings = settings_in_force(compressor, inputs)
        inputs = dataclasses.replace(inputs, settings=settings)
    amsgrad = inputs.second_moments and inputs.second_moments.largest
    divides = isinstance(compressor, Preconditions) and not amsgrad
    talk = compressor.exchange(inputs if divides else inputs.preconditioned())
    return checked(compressor.name, talk, inputs.specs)
