"""Checks that the replicas can do what a method needs."""

from __future__ import annotations

from collections.abc import Sequence

from tf_gradcomp import tf_private
from tf_gradcomp.compressors.base import Compressor
from tf_gradcomp.compressors.phased import takes_turns
from tf_gradcomp.groups.group import Group


def check_warmup(compressors: Sequence[Compressor], group: Group) -> None:
    """Refuses a warm-up if replicas cannot end one."""
    in_turn = any(map(takes_turns, compressors))
    if in_turn and group.size > 1 and not group.is_collective:
        raise ValueError(
            "A warm-up, or another method in turn, needs collectives in a branch, which "
            f"{group.name} does not allow; use gc.MultiWorkerMirroredStrategy, or warmup_steps=0."
        )


def check_not_in_xla() -> None:
    """Refuses to exchange gradients in code that XLA compiles."""
    if tf_private.in_xla():
        raise ValueError(
            "Compressed gradients cannot be exchanged in code that XLA compiles; use "
            "jit_compile=False in model.compile or tf.function."
        )
