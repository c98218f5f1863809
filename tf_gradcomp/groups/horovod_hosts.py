"""The hosts of a Horovod job as a group of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.groups.communicator import Communicator
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.horovod_group import HorovodCommunicator, HorovodGroup
from tf_gradcomp.groups.slices import sum_of_concatenated

# Horovod refuses a second set of the same ranks.
_sets: dict[tuple[int, ...], Any] = {}


class _BetweenHosts(HorovodCommunicator):
    """Horovod's operations between the leaders of hosts, which forward results to their hosts.

    Args:
        hvd: The module `horovod.tensorflow`.
        leaders: The first rank of each host.
        local: All ranks of this host.
        host: The number of this host.
        label: Distinguishes these operations from others.
    """

    def __init__(self, hvd: Any, leaders: Any, local: Any, host: int, label: str) -> None:
        Communicator.__init__(self, len(leaders.ranks), host)
        self.label = label
        self._hvd = hvd
        self._process_set, self._local = leaders, local
        self._collectives = 0

    def _sum(self, values: tf.Tensor) -> tf.Tensor:
        between, local = self._named(self._process_set), self._named(self._local)
        if self._process_set.included():
            values = self._hvd.allreduce(values, op=self._hvd.Sum, **between)
        return self._hvd.broadcast(values, self._local.ranks[0], **local)

    def _gather(self, values: tf.Tensor) -> tf.Tensor:
        between, local = self._named(self._process_set), self._named(self._local)
        leads = self._process_set.included()
        rows = self._hvd.allgather(values, **between) if leads else values[:0]
        return self._hvd.allgather(rows, **local)

    def sums_of_replica(
        self, gradients: Sequence[tf.Tensor | tf.IndexedSlices]
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Returns sums over the ranks of this host."""
        if len(self._local.ranks) == 1:
            return list(gradients)
        return [self._sum_of_host(gradient) for gradient in gradients]

    def _sum_of_host(self, gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
        if not isinstance(gradient, tf.IndexedSlices):
            wide, named = tf.cast(gradient, tf.float32), self._named(self._local)
            return tf.cast(self._hvd.allreduce(wide, op=self._hvd.Sum, **named), gradient.dtype)
        values, indices = (
            self._hvd.allgather(part, **self._named(self._local))
            for part in (tf.cast(gradient.values, tf.float32), gradient.indices)
        )
        values = tf.cast(values, gradient.values.dtype)
        slices = tf.IndexedSlices(values, indices, gradient.dense_shape)
        return sum_of_concatenated(slices, len(self._local.ranks), gradient)


class HorovodHosts(HorovodGroup):
    """The hosts of a Horovod job, as one replica each, for `CompressedOptimizer(group=...)`.

    The ranks of a host sum their gradients first, and the hosts exchange these sums. Each host
    sends the bytes of one rank. All ranks of a host compress the same sum, and keep the same state.
    The job needs several hosts with equal numbers of ranks, and `hvd.init(process_sets="dynamic")`.

    Raises:
        ImportError: If Horovod is not there; says how to build it.
        ValueError: If Horovod is not initialized like that, or is elastic, or the hosts have
            different numbers of ranks, or all ranks are on one.
        WorkersDisagreeError: If other ranks do something else, such as exchanging by another group.
    """

    kind = "host"

    def __init__(self) -> None:
        super().__init__()
        hvd = self._hvd
        self._ranks = HorovodGroup()
        self.size, self._host = hvd.cross_size(), hvd.cross_rank()
        if not hvd.is_homogeneous():
            raise ValueError(
                "gc.HorovodHosts() needs the same number of ranks on each host; start the job with "
                'equal numbers, or use group="horovod", with which each rank exchanges with all '
                "other ranks."
            )
        if self.size == 1:
            raise ValueError(
                "gc.HorovodHosts(): all ranks are on one host, so nothing would be compressed; "
                'use group="horovod".'
            )
        # If a rank exchanged by another group, the other ranks would wait forever.
        self.processes.agree({"next action": "dividing the job into hosts by gc.HorovodHosts()"})
        place = tf.constant([[hvd.local_rank(), hvd.cross_rank()]])
        places = [tuple(row) for row in self.processes.gather(place).numpy().tolist()]
        ranks = sorted(range(len(places)), key=lambda rank: places[rank][::-1])
        on_each = [[r for r in ranks if places[r][1] == host] for host in range(self.size)]
        sets = [_process_set(hvd, of_one) for of_one in on_each]
        self._local = sets[self._host]
        self._leaders = _process_set(hvd, [of_one[0] for of_one in on_each])

    @property
    def all_replicas(self) -> Group:
        return self._ranks

    def communicators(self) -> list[Communicator]:
        return [self.communicator()]

    def communicator(self, label: str = "") -> Communicator:
        return _BetweenHosts(self._hvd, self._leaders, self._local, self._host, label)


def _process_set(hvd: Any, ranks: list[int]) -> Any:
    """Returns the process set of some ranks; all ranks must call it in the same order."""
    if len(ranks) == hvd.size():
        return hvd.global_process_set
    if tuple(ranks) not in _sets:
        try:
            _sets[tuple(ranks)] = hvd.add_process_set(ranks)
        except ValueError as error:
            raise ValueError(
                "gc.HorovodHosts() adds process sets, one for the ranks of each host and one for "
                "the leaders of all hosts, but Horovod does not allow it: call "
                f'hvd.init(process_sets="dynamic"). Horovod says: {error}'
            ) from error
    return _sets[tuple(ranks)]
