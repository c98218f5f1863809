"""The group of replicas that a user asks for."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tf_gradcomp import horovod_here
from tf_gradcomp.distribute.group import Group, current_group

HOROVOD = "horovod"


def group_finder(group: str | Group | None) -> Callable[[], Group]:
    """Returns what finds the group, each time that it is asked for.

    Args:
        group: `"horovod"`; a group; or None for that of the strategy in scope.

    Raises:
        ImportError: If Horovod is asked for, and is not there.
        ValueError: If it is none of these, or Horovod cannot be used.
    """
    if group is None:
        return current_group
    if group == HOROVOD:
        from tf_gradcomp.distribute.horovod_group import HorovodGroup

        group = HorovodGroup()
    if not isinstance(group, Group):
        raise ValueError(
            f'group: expected "{HOROVOD}", gc.HorovodGroup(...), or None for the strategy in '
            f"scope; received {group!r}."
        )
    group.check_current()
    return lambda: group


def group_here() -> str | None:
    """What a program means that cannot say it, such as by loading a saved optimizer.

    Horovod, if the program has initialized it for several processes and is under no strategy.
    """
    if tf.distribute.has_strategy() or horovod_here.in_use() is None:
        return None
    return HOROVOD if horovod_here.size()[1] > 1 else None
