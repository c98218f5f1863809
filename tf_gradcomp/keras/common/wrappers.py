"""Finds the wrappers in the optimizers of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tf_gradcomp.keras_version import keras

if TYPE_CHECKING:
    from tf_gradcomp.keras.common.compressed import Compressed


def is_wrapper(optimizer: Any) -> bool:
    """True for a `CompressedOptimizer`; its class is not imported, because it uses this module."""
    return hasattr(optimizer, "trained_variables")


def compressed_in(optimizer: Any) -> Iterator[Compressed]:
    """The wrappers in an optimizer: itself, in a loss scaler, or in a Keras `MultiOptimizer`."""
    if is_wrapper(optimizer):
        yield optimizer
        return
    inside = getattr(optimizer, "inner_optimizer", None)
    for inner in [inside] if inside is not None else getattr(optimizer, "optimizers", ()):
        yield from compressed_in(inner)


def optimizers_of(model: keras.Model) -> Iterator[Any]:
    """The compiled optimizer of a model, then its other optimizers, as in a GAN."""
    first = getattr(model, "optimizer", None)  # a saved layer has none
    if first is not None:
        yield first
    for value in vars(model).values():
        if hasattr(value, "apply_gradients") and value is not first:
            yield value


def wrappers_of(model: keras.Model) -> Iterator[Compressed]:
    """The wrappers in all optimizers of a model."""
    for optimizer in optimizers_of(model):
        yield from compressed_in(optimizer)


def built_wrappers(optimizer: Any) -> Iterator[Compressed]:
    """Returns the wrappers in an optimizer that have a built exchange.

    A wrapper without variables, as in a `MultiOptimizer`, never builds its exchange.
    """
    return (wrapper for wrapper in compressed_in(optimizer) if wrapper.exchange.built)


def is_per_process(variable: Any, optimizer: Any) -> bool:
    """Whether a wrapper in an optimizer keeps `variable` separately on each replica."""
    return any(
        wrapper.exchange.saving.is_per_process(variable) for wrapper in built_wrappers(optimizer)
    )


def compressed_optimizer(model: keras.Model) -> Any:
    """The `CompressedOptimizer` of a compiled model, which may be in a loss scaler; or None."""
    optimizer = model.optimizer
    while optimizer is not None and not is_wrapper(optimizer):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizer
