"""Messages that tell users about an exchange when it is built."""

from __future__ import annotations

from collections.abc import Iterable

from tf_gradcomp.exchange.setup import Setup
from tf_gradcomp.groups.notices import tell_user
from tf_gradcomp.ops import gpu

_WHY_LOCAL = "what is compressed is divided by its root (precondition=None leaves it to Adam)"
_COPIED = "Gradients are copied from the GPU to the host for compression"


def announce_one_replica() -> None:
    """Tells that a job of one replica exchanges nothing, in its first step and not before.

    Programs also build an optimizer to load a model that they only evaluate.
    """
    tell_user("One replica: gradients are not exchanged.")


def announce(parts: Setup, notices: Iterable[str]) -> None:
    """Tells what differs from what a reader of the program would expect."""
    if parts.group.size == 1:
        return
    kind = parts.group.kind
    if parts.group.all_replicas is not parts.group:
        tell_user(f"The replicas of each {kind} sum their gradients before these are exchanged.")
    if parts.preconditioner:
        tell_user(f"Each {kind} keeps Adam's second moment of its own gradients: {_WHY_LOCAL}.")
    gpus = [device for device in parts.group.devices if "GPU" in device]
    if gpus and parts.on_gpu != parts.variables.state.keys():
        tell_user(f"{_COPIED}.")
    elif problem := next(filter(None, map(gpu.problem, gpus)), None):
        tell_user(f"{_COPIED}: {problem}.")
    for notice in notices:
        tell_user(notice)
