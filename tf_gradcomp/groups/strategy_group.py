"""The replicas of a strategy as a group."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_gradcomp.groups.agreement import Processes
from tf_gradcomp.groups.communicator import (
    CollectiveCommunicator,
    Communicator,
    ReplicaContextCommunicator,
)
from tf_gradcomp.groups.group import Group, Result
from tf_gradcomp.private import tensorflow as tf_private

_WITHOUT_REDUCTION = (
    tf.distribute.ParameterServerStrategy,
    tf.distribute.experimental.ParameterServerStrategy,
    tf.distribute.TPUStrategy,
)


class StrategyGroup(Group):
    """The replicas of a `tf.distribute.Strategy` that reduces gradients among them."""

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

    def create(self, make: Callable[[], Result]) -> Result:
        """Returns the result of `make`, whose variables cost no collectives.

        Our strategy does not compare these variables again.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                getattr(self.strategy, "agreed_variables", contextlib.nullcontext)()
            )
            if self.is_collective:
                stack.enter_context(tf_private.broadcasting_no_variables(self.strategy))
            return make()

    def check_current(self) -> None:
        if tf.distribute.get_strategy() is not self.strategy:
            raise ValueError(
                "The exchange of gradients was built outside the scope of the strategy that runs "
                "it; build the optimizer inside `with strategy.scope():`."
            )

    def communicator(self, label: str = "") -> Communicator:
        context = tf.distribute.get_replica_context()
        # In eager execution the replicas of a process run one after another.
        in_step = self.local_size == 1 or not tf.executing_eagerly()
        if not (self.is_collective and in_step):
            return ReplicaContextCommunicator(context)
        local_replica = tf_private.local_replica_id(context)
        launcher = tf_private.launcher(self.strategy, local_replica)
        rank = context.replica_id_in_sync_group
        communicator = CollectiveCommunicator(launcher, self.size, rank, local_replica)
        if local_replica == 0:
            communicator.on_event = self._counter_of_events()
        return communicator

    def _counter_of_events(self) -> Callable[[Sequence[tf.Tensor]], None] | None:
        """Returns the counter of this worker's collectives; None if the strategy has none."""
        progress = getattr(self.strategy, "progress", None)
        return progress.count_event if progress else None

    def communicators(self) -> list[Communicator]:
        if not self.is_collective:
            raise ValueError(
                f"Under {type(self.strategy).__name__} there is no network whose collectives could "
                "be timed to choose a compressor; use gc.MultiWorkerMirroredStrategy, or name a "
                "compressor."
            )
        return [
            CollectiveCommunicator(
                tf_private.launcher(self.strategy, i),
                self.size,
                tf_private.rank(self.strategy, i),
                i,
            )
            for i in range(self.local_size)
        ]

    def local(self, variable: tf.Variable, local_replica: int | None = None) -> tf.Variable:
        if local_replica is None:
            local_replica = tf_private.local_replica_id(tf.distribute.get_replica_context())
        return self.strategy.experimental_local_results(variable)[local_replica]

    @functools.cached_property
    def processes(self) -> Processes:  # type: ignore[override]
        """The workers, which gather in a separate group, apart from the collectives of steps."""
        spans = self.is_collective and tf_private.in_multi_worker_mode(self.strategy)
        size = self.size // self.local_size if spans else 1
        is_first = size == 1 or tf_private.rank(self.strategy, 0) == 0
        return Processes(
            size, is_first, functools.partial(tf_private.host_all_gather, self.strategy)
        )

    @property
    def is_collective(self) -> bool:
        return tf_private.is_collective(self.strategy)

    @property
    def devices(self) -> Sequence[str]:
        return self.strategy.extended.worker_devices
