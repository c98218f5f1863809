"""The processes of a job, and their communication between steps."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.groups import agreement
from tf_gradcomp.private import tensorflow as tf_private


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a job, as seen from one process.

    Attributes:
        size: The number of processes.
        is_first: Whether the job's first replica is in this process.
        gather: Gathers one small tensor of each process along axis 0, eagerly and not in a graph.
        first_rank: The number, in the whole job, of the process with the first replica.
    """

    size: int
    is_first: bool
    gather: Callable[[tf.Tensor], tf.Tensor]
    first_rank: int = 0

    @tf.autograph.experimental.do_not_convert  # the reader warns of values that it cannot parse
    def agree(self, facts: Mapping[str, Any], seconds: float | None = None) -> None:
        """Compares `facts` over all processes; returns if all are equal.

        If they are equal, this takes one small collective. All processes must call it in the same
        order.

        Args:
            facts: JSON-serializable values by name.
            seconds: How long to wait for the other processes; by default forever.

        Raises:
            WorkersDisagreeError: On every process, naming the differing facts and processes; or
                only on this process, if the other processes do not come to compare.
        """
        if self.size == 1:
            return
        if not _ends_within(seconds, lambda: agreement.compare(facts, self.gather)):
            raise agreement.WorkersDisagreeError(
                f"This worker has waited {seconds} seconds for the other workers to compare "
                f"{dict(facts)}, but they took another path through the program. All workers must "
                "run the same program, and their own data must not determine which variables they "
                "train."
            )

    def facts_if_different(self, facts: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Returns the facts of all processes, which wait for each other; None if all are equal."""
        return None if self.size == 1 else agreement.facts_if_different(facts, self.gather)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The maximum of each number over all processes, which wait for each other here."""
        if self.size == 1:
            return list(values)
        with tf.device("CPU:0"):
            rows = self.gather(tf.constant([list(values)], tf.float64))
            return np.max(rows.numpy(), 0).tolist()

    def broadcast_values(self, values: np.ndarray) -> np.ndarray:
        """Returns, on all processes, the numbers of the process that has the first replica."""
        if self.size == 1:
            return values
        contribution = values if self.is_first else np.zeros_like(values)
        with tf.device("CPU:0"):
            return np.sum(self.gather(tf.constant(contribution[np.newaxis])).numpy(), 0)

    def broadcast_bytes(self, local_data: bytes) -> bytes:
        """The first process's bytes, on all processes, which wait for each other here."""
        if self.size == 1:
            return local_data
        with tf.device("CPU:0"):
            return agreement.gather_bytes(local_data, self.gather)[0]


def sums_over_workers(
    strategy: tf.distribute.Strategy, arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns the sums of arrays over the workers, by one collective for each dtype."""
    sums = list(arrays)
    for dtype in sorted({array.dtype.name for array in arrays}):
        indices = [i for i, array in enumerate(arrays) if array.dtype.name == dtype]
        flat = np.concatenate([arrays[i].ravel() for i in indices])
        with tf.device("CPU:0"):
            total = tf_private.sum_over_workers(strategy, tf.constant(flat)).numpy()
        ends = np.cumsum([arrays[i].size for i in indices])[:-1]
        for i, part in zip(indices, np.split(total, ends), strict=True):
            sums[i] = part.reshape(arrays[i].shape)
    return sums


def _ends_within(seconds: float | None, exchange: Callable[[], None]) -> bool:
    """Returns whether `exchange` ends in time; `seconds=None` sets no limit.

    An error of `exchange` is raised. Horovod itself has no time limit. TensorFlow's limit aborts
    all collectives of the process, which sometimes crashes the process.
    """
    if seconds is None:
        exchange()
        return True
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def settle() -> None:
        try:
            exchange()
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)

    # A daemon thread does not keep the process from ending.
    threading.Thread(target=settle, daemon=True).start()
    if not concurrent.futures.wait([done], seconds).done:
        return False
    done.result()  # raises the error of `exchange`, which may itself be a TimeoutError
    return True
