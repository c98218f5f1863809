"""Choice of the group of replicas for a program."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tf_gradcomp import horovod_here
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.host_group import HostGroup
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.private import tensorflow as tf_private

HOROVOD = "horovod"


def group_finder(group: str | Group | None) -> Callable[[], Group]:
    """Returns a function that finds the group at each call.

    A group is `"horovod"`, an object, or None for the group of the strategy in scope.
    """
    if group is None:
        return current_group
    if group == HOROVOD:
        from tf_gradcomp.groups.horovod_group import HorovodGroup

        group = HorovodGroup()
    if not isinstance(group, Group):
        raise ValueError(
            f'group: expected "{HOROVOD}", gc.HorovodGroup(...), or None for the strategy in '
            f"scope; received {group!r}."
        )
    group.check_current()
    return lambda: group


def group_here() -> str | None:
    """Infers the group when the caller cannot pass one, as when Keras loads a saved optimizer.

    The group is Horovod's if the program has initialized Horovod for several processes and is
    under no strategy. Otherwise it is None.
    """
    if tf.distribute.has_strategy() or horovod_here.in_use() is None:
        return None
    return HOROVOD if horovod_here.size()[1] > 1 else None


def current_group() -> StrategyGroup:
    """Returns the group of the strategy in scope, or of one replica without a strategy.

    If several processes have several replicas each, the group consists of their hosts, unless
    the strategy says `two_level=False`.
    """
    strategy = tf.distribute.get_strategy()
    group = StrategyGroup(strategy)
    two_level = group.local_size > 1 and group.processes.size > 1
    return HostGroup(strategy) if two_level and getattr(strategy, "two_level", True) else group


def check_group(group: Group) -> None:
    """Refuses groups whose replicas do not run here, or already exchange their gradients."""
    group.check_current()
    ops = tf_private.installed_ops(tf.distribute.get_strategy())
    if isinstance(group, StrategyGroup) and isinstance(ops, tf_private.ForwardingOps):
        raise ValueError(
            "A compressor is set on both the strategy and the optimizer, so gradients would be "
            "compressed twice; set it on only one of them: "
            "MultiWorkerMirroredStrategy(compressor=None), MirroredStrategy() without "
            "gc.CompressedAllReduce, or the optimizer without CompressedOptimizer."
        )


def checked_replica_context() -> tf.distribute.ReplicaContext:
    """The context of the calling replica; refuses a call from anywhere else."""
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError("apply() must be called in a replica context, inside strategy.run.")
    return context
