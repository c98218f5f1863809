"""The hosts of a strategy as a group, if each host has several replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.groups.communicator import CollectiveCommunicator, Communicator
from tf_gradcomp.groups.group import Group, Result, outside_scope
from tf_gradcomp.groups.slices import sum_of_slices
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.private import tensorflow as tf_private


class HostGroup(StrategyGroup):
    """The hosts of a strategy with several replicas in each process, as one replica each.

    The replicas of a host sum their gradients before the exchange. The first replica of a host
    represents the host in the exchange, which runs across replicas, once in each process. The state
    of an exchange exists once on each host, on the device of the first replica.
    """

    kind = "host"

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        self._replicas = StrategyGroup(strategy)
        self.size = self._replicas.processes.size
        self.local_size = 1

    @property
    def all_replicas(self) -> Group:
        return self._replicas

    def create(self, make: Callable[[], Result]) -> Result:
        """Returns the result of `make`, whose variables exist once on each host."""

        def create_on_host() -> Result:
            with tf.device(self.devices[0]):
                return make()

        return outside_scope(create_on_host)

    @property
    def each_replica(self) -> Callable[..., Any]:
        """Returns the function that runs an exchange with the sums of the replicas' gradients."""

        def on_host(reduce: Callable[[list[Any]], Result], args: tuple[Sequence[Any]]) -> Result:
            with tf.device(self.devices[0]):
                return reduce([self._sum(gradient) for gradient in args[0]])

        return on_host

    def _sum(self, gradient: Any) -> tf.Tensor | tf.IndexedSlices:
        replicas = self._replicas.local_size
        parts = self.strategy.experimental_local_results(gradient)
        # A tensor that is equal on all replicas comes once.
        return _total(parts if len(parts) == replicas else parts * replicas)

    def communicator(self, label: str = "") -> Communicator:
        """Returns the host's communicator; raises RuntimeError if a single replica calls alone."""
        if tf.distribute.in_cross_replica_context():
            (communicator,) = self.communicators()
            communicator.on_event = self._counter_of_events()
            return communicator
        raise RuntimeError(
            "The replicas of a host exchange gradients together, across replicas: call the "
            "exchange by Group.each_replica in a merge_call."
        )

    def communicators(self) -> list[Communicator]:
        launcher = tf_private.launcher_of_workers(self.strategy)
        worker = tf_private.rank(self.strategy, 0) // self._replicas.local_size
        return [CollectiveCommunicator(launcher, self.size, worker)]

    def local(self, variable: tf.Variable, local_replica: int | None = None) -> tf.Variable:
        """Returns the variable itself; an assignment changes the copies of all replicas."""
        return variable

    @property
    def devices(self) -> Sequence[str]:
        return self._replicas.devices[:1]


def _total(parts: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor | tf.IndexedSlices:
    """The sum of gradients of one form and dtype."""
    if not isinstance(parts[0], tf.IndexedSlices):
        wide = tf.add_n([tf.cast(part, tf.float32) for part in parts])
        return tf.cast(wide, parts[0].dtype)
    return sum_of_slices(parts, parts[0])
