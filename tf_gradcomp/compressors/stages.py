"""Methods that alternate: warm-ups, and methods that consist of stages."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Generator, Iterator
from typing import ClassVar, TypeVar

import tensorflow as tf

from tf_gradcomp.compressors.base import Compressor, JobState, Reduced, StepInputs
from tf_gradcomp.compressors.requests import Request

Result = TypeVar("Result")


class Staged(Compressor):
    """A method that consists of other methods, one of which reduces in each step.

    Attributes:
        stages: These methods.
        main_stage: The index in `stages` of the method that a long job mostly uses.
    """

    stages: tuple[Compressor, ...]
    main_stage: ClassVar[int] = -1

    @abc.abstractmethod
    def stage(self, step: tf.Tensor, job_state: JobState) -> tf.Tensor:
        """Returns the index of the current stage in `stages`: int32 scalar, equal on all replicas.

        Args:
            step: int64 scalar, equal on all replicas.
            job_state: As `StepInputs` has it.
        """

    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Refuses, because the stages reduce."""
        raise TypeError(f"{type(self).__name__} consists of stages, which reduce in its place.")


def has_stages(compressor: Compressor) -> bool:
    """True if other methods are used in some steps: a warm-up or stages."""
    return compressor.warmup is not None or isinstance(compressor, Staged)


def all_stages(compressor: Compressor) -> Iterator[Compressor]:
    """Yields a method, its warm-up and its stages, recursively."""
    yield compressor
    stages = compressor.stages if isinstance(compressor, Staged) else ()
    for stage in (compressor.warmup, *stages):
        if stage:
            yield from all_stages(stage)


def leaf_stages(compressor: Compressor) -> Iterator[Compressor]:
    """Yields the methods that reduce: warm-ups and stages, or the method itself."""
    return (stage for stage in all_stages(compressor) if not isinstance(stage, Staged))


def run_stage(
    compressor: Compressor, inputs: StepInputs, run: Callable[[Compressor], Result]
) -> Result:
    """Runs the method of this step: a warm-up, a stage, or the compressor itself."""

    def after_warmup() -> Result:
        if not isinstance(compressor, Staged):
            return run(compressor)
        branches = [functools.partial(run_stage, stage, inputs, run) for stage in compressor.stages]
        index = compressor.stage(inputs.step, inputs.job_state)
        # Without the check, an index that is too large would select the last branch.
        with tf.control_dependencies([tf.debugging.assert_less(index, len(branches))]):
            return tf.switch_case(tf.identity(index), branches)

    warmup = compressor.warmup
    if warmup is None:
        return after_warmup()
    is_warmup = inputs.step < compressor.warmup_steps
    return tf.cond(is_warmup, lambda: run_stage(warmup, inputs, run), after_warmup)
