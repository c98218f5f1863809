"""Methods that alternate: phases and warm-ups."""

from __future__ import annotations

import abc
from collections.abc import Generator, Iterator, Mapping
from typing import ClassVar

import tensorflow as tf

from tf_gradcomp.compressors.base import Compressor, Exchanged, ExchangeInputs
from tf_gradcomp.compressors.requests import Request


class Phased(Compressor):
    """A method that consists of other methods, which take turns.

    Attributes:
        phases: These methods.
        settles_in: The place in `phases` of the method that a long job mostly uses.
    """

    phases: tuple[Compressor, ...]
    settles_in: ClassVar[int] = -1

    @abc.abstractmethod
    def phase(self, step: tf.Tensor, job_state: Mapping[str, tf.Variable]) -> tf.Tensor:
        """Returns the index of the current phase in `phases`: int32 scalar, equal on all replicas.

        Args:
            step: int64 scalar, equal on all replicas.
            job_state: As `ExchangeInputs` has it.
        """

    def exchange(self, inputs: ExchangeInputs) -> Generator[Request, tf.Tensor, Exchanged]:
        """Refuses, because the phases exchange."""
        raise TypeError(f"{type(self).__name__} consists of phases, which exchange in its place.")


def takes_turns(compressor: Compressor) -> bool:
    """Returns whether other methods are used in some steps: a warm-up or phases."""
    return compressor.warmup is not None or isinstance(compressor, Phased)


def stages(compressor: Compressor) -> Iterator[Compressor]:
    """Yields a method, its warm-up and its phases, recursively."""
    yield compressor
    phases = compressor.phases if isinstance(compressor, Phased) else ()
    for other in (compressor.warmup, *phases):
        if other:
            yield from stages(other)


def in_turn(compressor: Compressor) -> Iterator[Compressor]:
    """Yields the methods that a job uses in turn: warm-ups and phases, or the method itself."""
    return (stage for stage in stages(compressor) if not isinstance(stage, Phased))
