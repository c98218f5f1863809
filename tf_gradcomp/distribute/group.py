"""The replicas of a job: how many there are, how one reaches the others, and what they agree on."""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tf_gradcomp.distribute import handshake, tf_private
from tf_gradcomp.distribute.communicator import (
    CollectiveCommunicator,
    Communicator,
    ReplicaContextCommunicator,
)
from tf_gradcomp.distribute.gradients import total
from tf_gradcomp.distribute.out_of_scope import out_of_scope

Result = TypeVar("Result")

_WITHOUT_REDUCTION = (
    tf.distribute.ParameterServerStrategy,
    tf.distribute.experimental.ParameterServerStrategy,
    tf.distribute.TPUStrategy,
)


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
    """

    size: int
    local_size: int
    kind = "replica"
    loss_is_divided = True
    by_strategy = True

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What connects the replicas, for messages."""

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
        """Which of this process's replicas calls."""

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
        """Whether the job's first replica is in this process."""

    def first_path(self, path: str) -> str:
        """Where the first replica's process saves what all save by `gc.worker_path(path)`."""
        return path

    @property
    @abc.abstractmethod
    def is_collective(self) -> bool:
        """Whether replicas talk by collectives, which may be in a branch that all of them take."""

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
        """Whether a bool scalar is true on all replicas; each calls it, in its own context.

        Args:
            flag: That of the replica that calls.
            label: Tells this collective from others, where they have names.
        """

    def create(self, make: Callable[[], Result]) -> Result:
        """What `make` returns; of the variables that it creates, each replica has its own.

        Args:
            make: Creates variables that follow from what all processes have agreed on.
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
        """What a replica has of gradients, where several processes are one: their sums.

        Args:
            gradients: Those of this process.
            names: Of their collectives, each another one; equal on all processes.
        """
        return list(gradients)

    def label(self, paths: Sequence[str]) -> str:
        """What tells the collectives of an exchange of these variables from those of others.

        Only needed where collectives are matched by their names. Equal on all processes, which
        build their exchanges in the same order.
        """
        return ""

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


def _ends_within(seconds: float | None, exchange: Callable[[], None]) -> bool:
    """Whether `exchange` ends in time, whose error is raised; without seconds there is time.

    Horovod waits without an end, and TensorFlow's own limit ends all collectives of the process,
    which sometimes crashes in doing so.
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
    try:
        done.result(seconds)
    except concurrent.futures.TimeoutError:
        return False
    return True


class StrategyGroup(Group):
    """The replicas of a `tf.distribute.Strategy`.

    Raises:
        ValueError: If they do not reduce gradients among themselves.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        if isinstance(strategy, _WITHOUT_REDUCTION):
            raise ValueError(
                f"Gradient compression does not work under {type(strategy).__name__}, whose "
                "replicas do not exchange gradients with each other over a network; use "
                "gc.MultiWorkerMirroredStrategy, or the optimizer without compression."
            )
        self.strategy = strategy
        self.size = strategy.num_replicas_in_sync
        self.local_size = len(strategy.extended.worker_devices) if self.size > 1 else 1

    @property
    def name(self) -> str:
        """The strategy's type."""
        return type(self.strategy).__name__

    def take_from_first(self, variables: Sequence[tf.Variable]) -> None:
        """Does nothing: strategies create variables with equal values."""

    def create(self, make: Callable[[], Result]) -> Result:
        """What `make` returns; our strategy does not compare its variables once more."""
        with getattr(self.strategy, "agreed_variables", contextlib.nullcontext)():
            return make()

    def check_current(self) -> None:
        """Refuses to run under another strategy than that of the group."""
        if tf.distribute.get_strategy() is not self.strategy:
            raise ValueError(
                "The exchange of gradients was built outside of the scope of the strategy that "
                "runs it; build the optimizer inside `with strategy.scope():`."
            )

    def true_on_all(self, flag: tf.Tensor, label: str) -> tf.Tensor:
        """Whether a bool scalar is true on all replicas; each calls it, in its own context."""
        if self.size == 1:
            return flag
        context = tf.distribute.get_replica_context()
        false = tf.cast(tf.logical_not(flag), tf.int32)
        return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, false), 0)

    def member(self) -> Member:
        """The replica in whose context this is called."""
        context = tf.distribute.get_replica_context()
        local_replica = self.local_replica()
        # In eager execution the replicas of a process run one after another.
        in_step = self.local_size == 1 or not tf.executing_eagerly()
        communicator: Communicator
        if self.is_collective and in_step:
            launcher = tf_private.launcher(self.strategy, local_replica)
            rank = context.replica_id_in_sync_group
            communicator = CollectiveCommunicator(launcher, self.size, rank)
        else:
            communicator = ReplicaContextCommunicator(context)
        return Member(communicator, local_replica)

    def local_replica(self) -> int:
        """Which of this process's replicas calls."""
        return tf_private.local_replica_id(tf.distribute.get_replica_context())

    def communicators(self) -> list[Communicator]:
        """The communicators of this process's replicas, for use outside of `strategy.run`."""
        if not self.is_collective:
            raise ValueError(
                f"Under {self.name} there is no network whose collectives could "
                "be timed to choose a compressor; use gc.MultiWorkerMirroredStrategy, or name a "
                "compressor."
            )
        return [
            CollectiveCommunicator(
                tf_private.launcher(self.strategy, i), self.size, tf_private.rank(self.strategy, i)
            )
            for i in range(self.local_size)
        ]

    def local(self, variable: tf.Variable, local_replica: int) -> tf.Variable:
        """The replica's component of a distributed variable."""
        return self.strategy.experimental_local_results(variable)[local_replica]

    def all_gather_on_host(self, value: tf.Tensor) -> tf.Tensor:
        """Gathers in a group of its own, apart from the collectives of steps."""
        return tf_private.host_all_gather(self.strategy, value)

    @property
    def processes(self) -> int:
        """The number of workers."""
        spans = self.is_collective and tf_private.in_multi_worker_mode(self.strategy)
        return self.size // self.local_size if spans else 1

    @property
    def is_first(self) -> bool:
        """Whether the replica with rank 0 is in this worker."""
        return self.processes == 1 or tf_private.rank(self.strategy, 0) == 0

    @property
    def is_collective(self) -> bool:
        """Whether the strategy uses TensorFlow's collectives."""
        return tf_private.is_collective(self.strategy)

    @property
    def devices(self) -> Sequence[str]:
        """The devices of this worker's replicas."""
        return self.strategy.extended.worker_devices


class HostGroup(StrategyGroup):
    """The hosts of a strategy with several replicas in each process, as one replica each.

    What the replicas of a host have is summed there, before it is exchanged. Its first replica
    stands for all of them in the exchange, which runs across replicas, once in each process. What
    an exchange keeps exists once on each host, on the device of that replica.
    """

    kind = "host"

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        self._replicas = StrategyGroup(strategy)
        self.size = self._replicas.processes
        self.local_size = 1

    @property
    def all_replicas(self) -> Group:
        """The group of all replicas of all hosts."""
        return self._replicas

    def create(self, make: Callable[[], Result]) -> Result:
        """What `make` returns; the variables that it creates exist once on each host."""

        def there() -> Result:
            with tf.device(self.devices[0]):
                return make()

        return out_of_scope(there)

    def on_each(self, reduce: Callable[[list[Any]], Result], gradients: Sequence[Any]) -> Result:
        """Runs the host's side of an exchange, with the sums of its replicas' gradients."""
        with tf.device(self.devices[0]):
            return reduce([self._sum(gradient) for gradient in gradients])

    def _sum(self, gradient: Any) -> tf.Tensor | tf.IndexedSlices:
        replicas = self._replicas.local_size
        parts = self.strategy.experimental_local_results(gradient)
        # A tensor that all replicas have alike comes once.
        return total(parts if len(parts) == replicas else parts * replicas)

    def member(self) -> Member:
        """The host.

        Raises:
            RuntimeError: If one of its replicas calls, and not all of them together.
        """
        if tf.distribute.in_cross_replica_context():
            return Member(self.communicators()[0], 0)
        raise RuntimeError(
            "The replicas of a host exchange gradients together, across replicas: call the "
            "exchange by Group.on_each in a merge_call."
        )

    def local_replica(self) -> int:
        """The only one."""
        return 0

    def communicators(self) -> list[Communicator]:
        """The communicator of this host."""
        launcher = tf_private.launcher_of_workers(self.strategy)
        worker = tf_private.rank(self.strategy, 0) // self._replicas.local_size
        return [CollectiveCommunicator(launcher, self.size, worker)]

    def local(self, variable: tf.Variable, local_replica: int) -> tf.Variable:
        """The variable itself; one that the replicas have copies of is assigned on all of them."""
        return variable

    @property
    def processes(self) -> int:
        """The number of hosts."""
        return self.size

    @property
    def devices(self) -> Sequence[str]:
        """The device on which the host encodes and decodes."""
        return self._replicas.devices[:1]


def current_group() -> StrategyGroup:
    """The group of the strategy in scope, or of one replica where there is none.

    Where several processes have several replicas each, it is that of their hosts, unless the
    strategy says `two_level=False`.
    """
    strategy = tf.distribute.get_strategy()
    group = StrategyGroup(strategy)
    two_level = group.local_size > 1 and group.processes > 1
    return HostGroup(strategy) if two_level and getattr(strategy, "two_level", True) else group
