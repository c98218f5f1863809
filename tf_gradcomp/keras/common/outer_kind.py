"""The class of the outer optimizer in a checkpoint, whose state only this class can use."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.chief import is_chief
from tf_gradcomp.exchange.gradients import native
from tf_gradcomp.exchange.state import shared_variable
from tf_gradcomp.groups.group import Group
from tf_gradcomp.private import tensorflow as tf_private

NAME = "outer_optimizer_class"  # in Keras' files

_LOG = tf.get_logger()
_DROPPED = (
    "The checkpoint holds the state of an outer optimizer of local steps, and this job has no "
    "outer optimizer. The state is not loaded: a later job that resumes from this job begins with "
    "a new outer optimizer. To keep the state, continue with the outer optimizer that wrote the "
    "checkpoint."
)


class OuterKind(tf.Module):
    """Records the class of the outer optimizer, and refuses the state of another class.

    Keras restores an optimizer's variables by their order, so another optimizer would take momentum
    for squares of gradients, for example.

    Attributes:
        number: Identifies the class; 0 without an outer optimizer.

    Args:
        group: The replicas.
        outer: The outer optimizer, if any.
    """

    def __init__(self, group: Group, outer: Any) -> None:
        super().__init__(name="outer_kind")
        self._class = type(outer).__name__
        self.number = 0 if outer is None else zlib.crc32(self._class.encode())
        self._saved = group.create(lambda: shared_variable(self.number, tf.int64, NAME))
        own = tf.constant(self.number, tf.int64)
        tf_private.save_as(native(self._saved), lambda: own, self.check)

    def check(self, saved: Any) -> None:
        """Refuses the number in a checkpoint if it belongs to another class.

        A job without an outer optimizer refuses nothing, and tells of state that it drops.

        Raises:
            ValueError: With the way out.
        """
        number = int(np.asarray(saved))
        if number and not self.number and is_chief():
            _LOG.warning(_DROPPED)
        if number and self.number and number != self.number:
            raise ValueError(
                "The checkpoint holds the state of an outer optimizer of another class than "
                f"{self._class}, which cannot use it. Continue with the outer optimizer that wrote "
                "the checkpoint, or restore only the model's weights."
            )
