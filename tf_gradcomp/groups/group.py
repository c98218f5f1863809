"""The replicas of a job: how many there are, how one reaches the others, and what they agree on."""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tf_gradcomp.groups import handshake
from tf_gradcomp.groups.communicator import (
    Communicator,
)

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Member:
    """One replica in one step.

    Attributes:
        communicator: Reaches the other replicas; made anew for each step.
        local_replica: Which of this process's replicas it is.
    """

    communicator: Communicator
    local_replica: int


class Group(abc.ABC):
    """The replicas of a job, as one of its processes sees them.

    Attributes:
        size: The number of replicas of the job.
        local_size: How many of them are in this process.
        kind: What one of them is called, in messages.
        loss_is_divided: Whether the program divides its loss by the number of replicas, so that
            their gradients add up to that of the whole batch. If not, the gradients are divided.
        by_strategy: Whether a strategy runs them: it creates variables with equal values on all,
            and all processes save and restore together.
        tells_users: Whether users are told how their job exchanges gradients.
    """

    size: int
    local_size: int
    kind = "replica"
    loss_is_divided = True
    by_strategy = True
    tells_users = True

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name of the layer that connects the replicas, for messages."""

    @abc.abstractmethod
    def check_current(self) -> None:
        """Refuses to go on if the code that runs now is not run by this group's replicas.

        Raises:
            ValueError: With the reason and the way out.
        """

    @abc.abstractmethod
    def member(self) -> Member:
        """The replica that calls."""

    @abc.abstractmethod
    def local_replica(self) -> int:
        """Returns the number of the calling replica among this process's replicas."""

    @abc.abstractmethod
    def communicators(self) -> list[Communicator]:
        """The communicators of this process's replicas, for use outside of a step.

        Raises:
            ValueError: If there is no network between the replicas.
        """

    @abc.abstractmethod
    def local(self, variable: tf.Variable, local_replica: int) -> tf.Variable:
        """The component of a variable that belongs to one of this process's replicas."""

    @abc.abstractmethod
    def all_gather_on_host(self, value: tf.Tensor) -> tf.Tensor:
        """Gathers one small tensor of each process along axis 0, at once and not in a graph."""

    @property
    @abc.abstractmethod
    def processes(self) -> int:
        """The number of processes of the job."""

    @property
    @abc.abstractmethod
    def is_first(self) -> bool:
        """Returns whether the job's first replica is in this process."""

    def first_path(self, path: str) -> str:
        """Returns the `gc.worker_path(path)` of the process of the job's first replica."""
        return path

    @property
    @abc.abstractmethod
    def is_collective(self) -> bool:
        """Returns whether replicas use collectives, which a branch that all take may contain."""

    @property
    @abc.abstractmethod
    def devices(self) -> Sequence[str]:
        """The devices of this process's replicas."""

    @abc.abstractmethod
    def take_from_first(self, variables: Sequence[tf.Variable]) -> None:
        """Gives variables the values of the first replica, where nothing else makes them equal."""

    @property
    def all_replicas(self) -> Group:
        """The group of all replicas that compute gradients, each for itself."""
        return self

    @abc.abstractmethod
    def true_on_all(self, flag: tf.Tensor, label: str) -> tf.Tensor:
        """Returns whether a bool scalar is true on all replicas.

        Each replica calls it, in its own context.

        Args:
            flag: The calling replica's scalar.
            label: Distinguishes this collective from others, if collectives have names.
        """

    def create(self, make: Callable[[], Result]) -> Result:
        """Calls `make` so that each replica has its own copy of the variables that `make` creates.

        Args:
            make: Creates variables that depend only on facts equal on all processes.

        Returns:
            The result of `make`.
        """
        return make()

    def on_each(self, reduce: Callable[[list[Any]], Result], gradients: Sequence[Any]) -> Result:
        """Runs one replica's side of an exchange on each of this process's; called across replicas.

        Args:
            reduce: Takes the gradients of one replica.
            gradients: Those of all replicas of the process, as a merge call gives them.
        """
        each_replica = tf.distribute.get_strategy().extended.call_for_each_replica
        return each_replica(reduce, args=(list(gradients),))

    def sums_of_processes(
        self, gradients: Sequence[tf.Tensor | tf.IndexedSlices], names: Sequence[str]
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Returns the sums of gradients over the processes that form one replica.

        Args:
            gradients: The gradients of this process.
            names: Distinct names for the collectives of the gradients; equal on all processes.
        """
        return list(gradients)

    def label(self, paths: Sequence[str]) -> str:
        """Returns a label that distinguishes this exchange's collectives from other exchanges'.

        The label is needed only if collectives are matched by name. It is equal on all processes,
        because they build their exchanges in the same order.
        """
        return ""

    @tf.autograph.experimental.do_not_convert  # which warns of what it cannot read
    def agree(self, facts: Mapping[str, Any], seconds: float | None = None) -> None:
        """Compares `facts` over all processes, and returns where all are equal.

        One small collective where they agree, which all processes must call in the same order.

        Args:
            facts: JSON-serializable values by name.
            seconds: How long to wait for the others; by default without an end.

        Raises:
            WorkersDisagreeError: On every process, naming which differ and in what; or on this one,
                if the others do not come to compare.
        """
        if self.processes == 1:
            return
        if not _ends_within(seconds, lambda: handshake.compare(facts, self.all_gather_on_host)):
            raise handshake.WorkersDisagreeError(
                f"This worker has waited {seconds} seconds for the others to compare "
                f"{dict(facts)}: they do something else. All workers must run the same program, "
                "and must not decide by their own data what they train."
            )

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest of each number over all processes, which wait for each other here."""
        if self.processes == 1:
            return list(numbers)
        with tf.device("CPU:0"):
            rows = self.all_gather_on_host(tf.constant([list(numbers)], tf.float64))
            return np.max(rows.numpy(), 0).tolist()

    def from_first(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers of the process that has the first replica, on all processes.

        Args:
            numbers: float64 [n], as many on all; those of the others do not count.
        """
        if self.processes == 1:
            return numbers
        given = numbers if self.is_first else np.zeros_like(numbers)
        with tf.device("CPU:0"):
            return np.sum(self.all_gather_on_host(tf.constant(given[np.newaxis])).numpy(), 0)

    def bytes_of_first(self, own: bytes) -> bytes:
        """The bytes of the first process, on all processes, which wait for each other here."""
        if self.processes == 1:
            return own
        with tf.device("CPU:0"):
            return handshake.gather_bytes(own, self.all_gather_on_host)[0]


def _ends_within(seconds: float | None, exchange: Callable[[], None]) -> bool:
    """Returns whether `exchange` ends in time; `seconds=None` sets no limit.

    An error of `exchange` is raised. Horovod has no time limit of its own. TensorFlow's limit
    aborts all collectives of the process, which sometimes crashes the process.
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

    # A daemon does not keep the process from ending.
    threading.Thread(target=settle, daemon=True).start()
    if not concurrent.futures.wait([done], seconds).done:
        return False
    done.result()  # raises what `exchange` raised, which may be a TimeoutError of its own
    return True
