"""The table of all patches of TensorFlow.

`keras/keras2/patches.py` and `keras/keras3/patches.py` apply this table together with their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tf_gradcomp import tf_private
from tf_gradcomp.strategy.coordinated import write_checkpoint
from tf_gradcomp.strategy.strategy import copied_for_strategies


class Patch(NamedTuple):
    """A part of TensorFlow or Keras that this package replaces while a program runs.

    Attributes:
        replaces: Dotted names of the functions that are replaced.
        why: The fault, or the missing feature, that makes the patch necessary.
        upstream: The upstream issue, or "none".
        test: The test that fails if the patch no longer works.
        install: Replaces the functions; called once in a process.
    """

    replaces: tuple[str, ...]
    why: str
    upstream: str
    test: str
    install: Callable[[], None]


_VARIABLE = "tensorflow.python.distribute.values.DistributedVariable"

TENSORFLOW = (
    Patch(
        tuple(f"{_VARIABLE}.{name}" for name in ("__float__", "__int__", "__complex__")),
        "Callbacks call float() for the learning rate, and variables of strategies refuse it.",
        "none",
        "test_let_variables_become_numbers",
        tf_private.let_variables_become_numbers,
    ),
    Patch(
        ("tensorflow.python.ops.script_ops.FuncRegistry.__call__",),
        "TensorFlow shares aligned NumPy memory, and layers that run in place overwrite it.",
        "none",
        "test_on_returned_by_python",
        lambda: tf_private.on_returned_by_python(copied_for_strategies),
    ),
    Patch(
        (
            "tensorflow.python.checkpoint.checkpoint.Checkpoint._write",
            "tensorflow.python.checkpoint.checkpoint_management.update_checkpoint_state_internal",
            "tensorflow.python.checkpoint.checkpoint_management._delete_file_if_exists",
        ),
        "Workers that save to one path overwrite each other's files.",
        "none",
        "test_on_checkpoint_write",
        lambda: tf_private.on_checkpoint_write(write_checkpoint),
    ),
)
