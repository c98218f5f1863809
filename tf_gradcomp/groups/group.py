"""The replicas of a job: their number, and how they communicate."""

from __future__ import annotations

import abc
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tf_gradcomp.groups.agreement import Processes
from tf_gradcomp.groups.communicator import Communicator

Result = TypeVar("Result")


class Group(abc.ABC):
    """The replicas of a job, as one of its processes sees them.

    Attributes:
        size: The number of replicas of the job.
        local_size: The number of replicas in this process.
        processes: The processes of the job, which also communicate between steps.
        kind: The word for a replica in messages.
        by_strategy: Whether a strategy runs the replicas. A strategy creates variables with equal
            values on all replicas, and all processes save and restore together. A program divides
            its loss by the number of replicas; otherwise the gradients are divided.
    """

    size: int
    local_size: int
    processes: Processes
    kind = "replica"
    by_strategy = True

    @abc.abstractmethod
    def check_current(self) -> None:
        """Raises an error if the running code is not executed by this group's replicas."""

    @abc.abstractmethod
    def communicator(self, label: str = "") -> Communicator:
        """Returns the communicator of the calling replica, for one step.

        `label` distinguishes its collectives from others, if collectives have names.
        """

    @abc.abstractmethod
    def communicators(self) -> list[Communicator]:
        """The communicators of this process's replicas, for use outside a step."""

    @abc.abstractmethod
    def local(self, variable: tf.Variable, local_replica: int | None = None) -> tf.Variable:
        """Returns the component of a variable of one of this process's replicas.

        By default, that is the calling replica.
        """

    @property
    @abc.abstractmethod
    def is_collective(self) -> bool:
        """Whether replicas communicate by collectives that a common branch may contain."""

    @property
    @abc.abstractmethod
    def devices(self) -> Sequence[str]:
        """The devices of this process's replicas."""

    @property
    def all_replicas(self) -> Group:
        """The group of all replicas that compute gradients, each replica by itself."""
        return self

    def create(self, make: Callable[[], Result]) -> Result:
        """Calls `make` so that each replica has its own copy of the variables that `make` creates.

        What `make` creates depends only on facts equal on all processes.
        """
        return make()

    @property
    def each_replica(self) -> Callable[..., Any]:
        """Returns the function that runs an exchange on each replica of this process.

        A cross-replica context calls `each_replica(reduce, args=(gradients,))` with the gradients
        that a merge call received. `reduce` takes the gradients of one replica.
        """
        return tf.distribute.get_strategy().extended.call_for_each_replica

    def label(self, paths: Sequence[str]) -> str:
        """Returns a label that distinguishes this exchange's collectives from other exchanges'.

        The label is needed only if collectives are matched by name. The label is equal on all
        processes, because all processes build their exchanges in the same order.
        """
        return ""


def outside_scope(make: Callable[[], Result]) -> Result:
    """Calls `make` outside the current strategy's scope and returns its result.

    Within the scope, TensorFlow replicates each variable, which synchronizes the workers. A scope
    belongs to one thread, so a new thread is outside every scope.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
