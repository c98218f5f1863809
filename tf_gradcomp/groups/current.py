"""The group of the calling replica: of a strategy, of Horovod, or of one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import tensorflow as tf

from tf_gradcomp import horovod_here
from tf_gradcomp.chief import is_chief
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.host_group import HostGroup
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.private import tensorflow as tf_private
from tf_gradcomp.tf_config import read_tf_config

_USE_STRATEGY = (
    "create the model and its optimizer inside `with gc.MultiWorkerMirroredStrategy().scope():`"
)
_ON_PURPOSE = "To train alone on purpose, unset %s."
_USE_LAUNCHER = "start the program by `gradcomp run --horovod` or `horovodrun --gloo`"
_trained_with_others = threading.Event()  # in this process, at some time


def check_not_single_by_mistake(group: Group) -> None:
    """Refuses to train alone in a process that is one of several.

    Each process would train alone, and nobody would notice. Evaluators and parameter servers run
    alone by design. A chief that has already trained with other workers may also train alone. In
    TensorFlow's tutorial, for example, the chief loads the job's model and continues training.
    """
    if group.processes.size > 1:
        _trained_with_others.set()
        return
    if tf.distribute.has_strategy() or (_trained_with_others.is_set() and is_chief()):
        return
    by_horovod = not isinstance(group, StrategyGroup)
    if by_horovod and horovod_here.size()[1] > 1:  # through a process set that the program passed
        return
    config = read_tf_config()
    if config is not None and config.rank is not None and config.num_workers > 1:
        why = "Horovod knows of one process" if by_horovod else "there is no strategy here"
        raise ValueError(
            f"CompressedOptimizer: TF_CONFIG names {config.num_workers} workers, but {why}, and "
            f"each of them would train alone: {_USE_LAUNCHER if by_horovod else _USE_STRATEGY}. "
            f"{_ON_PURPOSE % 'TF_CONFIG'}"
        )
    name, size = horovod_here.mpirun_world_size_mismatch()
    if size > 1:
        raise ValueError(
            f"CompressedOptimizer: {name} says that this is one of {size} processes, but Horovod "
            f"was built without MPI and knows of one: {_USE_LAUNCHER}, or build it with "
            f"HOROVOD_WITH_MPI=1. {_ON_PURPOSE % name}"
        )
    if not by_horovod:
        check_not_of_horovod()


def check_not_of_horovod() -> None:
    """Refuses to train alone in a process that is one of several Horovod ranks."""
    name, size = horovod_here.size()
    if size > 1:
        raise ValueError(
            f"{name} says that this is one of {size} processes, and each of "
            "them would train alone: exchange gradients by Horovod, with hvd.init() and "
            'gc.CompressedOptimizer(..., group="horovod"); or start the program by `gradcomp run` '
            f"or with TF_CONFIG, and {_USE_STRATEGY}."
            + (f" {_ON_PURPOSE % name}" if name in os.environ else "")
        )


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
