"""Measuring mode: times the computing of a program's first steps, then ends it with advice."""

from __future__ import annotations

import _thread
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.advice import STEPS, STEPS_BEFORE, VARIABLE
from tf_gradcomp.advice.cost_model import Advice, advice_for_one_replica, advice_on
from tf_gradcomp.advice.probe import THOROUGH, probe
from tf_gradcomp.chief import is_chief
from tf_gradcomp.compressors.auto import BASELINE
from tf_gradcomp.exchange.gradients import Gradients
from tf_gradcomp.exchange.setup import Candidate, Setup
from tf_gradcomp.exchange.step import StepResult
from tf_gradcomp.groups.communicator import Communicator
from tf_gradcomp.groups.group import Group
from tf_gradcomp.policy import GradientSpec

_SIGNAL = signal.SIGUSR1


def is_on() -> bool:
    """Whether measuring mode is on for this program."""
    return VARIABLE in os.environ


class Measuring:
    """Times the program's computation between two exchanges; these exchanges are dense.

    Raises:
        SystemExit: If there is only one replica, so that there is nothing to measure.
    """

    def __init__(
        self, group: Group, specs: Sequence[GradientSpec], candidates: Sequence[Candidate]
    ) -> None:
        self._group = group
        self._ended_at: float | None = None
        self._seconds: list[float] = []
        self._writes = is_chief()
        if group.size == 1:
            self._write(advice_for_one_replica(BASELINE))
            raise SystemExit
        self._probed = probe(group, specs, candidates, THOROUGH)
        signal.signal(_SIGNAL, _end)

    def timing(self, take_step: Callable[..., StepResult]) -> Callable[..., StepResult]:
        """Returns `take_step` of an exchange, with the time between two steps measured."""

        def timed(
            setup: Setup,
            communicators: Sequence[Communicator],
            indices: Sequence[int],
            gradients: Sequence[Gradients],
            updates: tf.Tensor | None,
        ) -> StepResult:
            local, seconds = self._before(gradients[0])
            result = take_step(setup, communicators, indices, [local], updates)
            summed = self._after(result.gradients, seconds)
            return StepResult(summed, result.finite, result.sent)

        return timed

    def _before(self, gradients: Sequence[Any]) -> tuple[list[Any], tf.Tensor]:
        """Records that a replica has its gradients; returns them and the seconds of computing."""
        with tf.control_dependencies(tf.nest.flatten(gradients, expand_composites=True)):
            seconds = tf.numpy_function(self._begin, [], tf.float32)
        with tf.control_dependencies([seconds]):
            same = tf.nest.map_structure(tf.identity, list(gradients), expand_composites=True)
        return same, tf.ensure_shape(seconds, [])

    def _after(self, reduced: Sequence[Any], seconds: tf.Tensor) -> list[Any]:
        """Records that gradients are exchanged; the slowest replica's computing time counts."""
        bits = tf.bitcast(seconds[tf.newaxis, tf.newaxis], tf.int32)
        communicator = self._group.communicator()
        with tf.control_dependencies(tf.nest.flatten(reduced, expand_composites=True)):
            all_seconds = tf.bitcast(communicator.all_gather(bits), tf.float32)
            if communicator.local_replica:  # the first counts the steps of this process
                return list(reduced)
            count = tf.numpy_function(self._end_step, [tf.reduce_max(all_seconds)], tf.int64)
        with tf.control_dependencies([count]):
            return tf.nest.map_structure(tf.identity, list(reduced), expand_composites=True)

    def _begin(self) -> np.float32:
        return np.float32(time.perf_counter() - self._ended_at if self._ended_at else 0.0)

    def _end_step(self, seconds: np.float32) -> int:
        self._seconds.append(float(seconds))
        if len(self._seconds) == STEPS_BEFORE + STEPS:
            compute = statistics.median(self._seconds[STEPS_BEFORE:])
            self._write(advice_on(self._probed, compute))
            _thread.interrupt_main(_SIGNAL)  # this thread belongs to TensorFlow
        self._ended_at = time.perf_counter()
        return len(self._seconds)

    def _write(self, advice: Advice) -> None:
        if self._writes:
            path = Path(os.environ[VARIABLE])
            as_json = path.suffix == ".json"
            text = f"{advice}\n\n{advice.details}"
            path.write_text(f"{json.dumps(advice.as_dict(), indent=1) if as_json else text}\n")


def _end(_signum: int, _frame: FrameType | None) -> None:
    raise SystemExit
