"""Ops that sum entries at positions that a leader has chosen for all replicas; used by LGC.

For each tensor, either the entries of largest magnitude are chosen, or the tensor is sent whole.
With m the residual and g the gradient of a variable, and I the chosen places, or all places of a
tensor that is sent whole:

    y = m + g
    given: y at I
    m <- y            elsewhere
    m <- the rest at I: the part of y that was not sent

All arithmetic is float32. Results don't depend on the number of threads.

Source: Abrahamyan et al., "Learned Gradient Compression for Distributed Deep Learning", IEEE TNNLS
33(12), https://arxiv.org/abs/2103.08870. `tests.reference.lgc` chooses the same in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp.ops import library
from tf_gradcomp.ops.coding import Settings, handles_of, tensor_of


class LeaderSelection(NamedTuple):
    """The arguments that these ops share, for one replica.

    Attributes:
        residuals: float32 variables or their resource handles.
        gradients: One per residual, of the same shape; float32, float16 or bfloat16.
        entries: The number of chosen entries of each tensor, up to its size, which must then be
            below 2^31; 0: the tensor is sent whole.
    """

    residuals: Sequence[tf.Tensor | tf.Variable]
    gradients: Sequence[tf.Tensor]
    entries: Settings

    def arguments(self) -> dict[str, Any]:
        """The arguments as the ops take them."""
        return {
            "residuals": handles_of(self.residuals),
            "gradients": list(self.gradients),
            "entries": tensor_of(self.entries),
        }


def leader_place_words(elements: int, entries: int) -> int:
    """Returns the number of int32 words for the positions of some entries of a tensor.

    The positions are packed, the lowest bits first, each with the bits that the last position of
    the tensor needs.

    Args:
        elements: Of the tensor.
        entries: The number of chosen entries.
    """
    return -(-entries * max(1, (elements - 1).bit_length()) // 32)


def leader_select(
    selection: LeaderSelection, lead: tf.Tensor | bool, *, order: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Chooses the entries of largest magnitude of each tensor, the first of equal entries.

    Args:
        selection: The tensors; nothing is changed.
        lead: bool scalar. If false, nothing is chosen, and places are zeros.
        order: Of the entries of a tensor: `"value"`, ascending; `"index"`, ascending; or
            `"magnitude"`, descending. Equal values keep their order.

    Returns:
        places, int32 [words], tensor by tensor (see `leader_place_words`), all zeros if y is not
        finite; and finite, bool scalar: whether all of y is.
    """
    return library.load().leader_select(lead=lead, order=order, **selection.arguments())


def leader_take(
    selection: LeaderSelection, places: tf.Tensor, finite: tf.Tensor | bool
) -> tf.Tensor:
    """Returns a replica's values: y at the positions, and all of y for tensors that are sent whole.

    Args:
        selection: The tensors; nothing is changed.
        places: int32 [words], as `leader_select` made them on one replica.
        finite: bool scalar, whether this replica's y is. If not, zeros are returned.

    Returns:
        float32 [values], tensor by tensor.
    """
    return library.load().leader_take(places=places, finite=finite, **selection.arguments())


def leader_apply(
    selection: LeaderSelection,
    places: tf.Tensor,
    totals: tf.Tensor,
    rests: tf.Tensor,
    own_finite: tf.Tensor | bool,
    finite: tf.Tensor | bool,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Ends a step: spreads the totals over dense tensors, and keeps unsent values.

    If the step is skipped, a replica with finite gradients keeps its whole gradient.

    Args:
        selection: Its residuals are updated in place.
        places: int32 [words], as `leader_select` made them on one replica.
        totals: float32 [values], the sum of what all replicas sent, in the order of `leader_take`.
        rests: float32 [at most values], the unsent parts of the first values that `leader_take`
            returned. The other values were sent unchanged.
        own_finite: bool scalar, whether this replica's y is finite.
        finite: bool scalar; if false, the step is skipped.

    Returns:
        reduced, one float32 tensor per gradient, zeros on a skipped step; and all_finite, bool
        scalar: whether the step is taken.
    """
    return library.load().leader_apply(
        places=places,
        totals=totals,
        rests=rests,
        own_finite=own_finite,
        finite=finite,
        **selection.arguments(),
    )
