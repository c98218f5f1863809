"""Gathering vectors whose lengths differ, mostly by one collective."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

_MOST_AHEAD = 4096  # words; where more are sent, zeros behind them cost more than they save


class WordsAhead:
    """Number of payload words that each replica sends along with its length.

    A plain object, so that checkpoints do not hold it.

    Attributes:
        words: int64, for each local replica; equal on all replicas.
    """

    def __init__(self) -> None:
        self.words = tf.Variable(
            tf.constant(0, tf.int64),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )


def gather_padded(
    payload: tf.Tensor,
    gather: Callable[[tf.Tensor], tf.Tensor],
    ahead: tf.Variable | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Gathers a row from each replica, padded with zeros to the length of the longest.

    With the lengths travel as many words as were enough in the steps before. If they are enough
    again, no second collective is needed: its latency is what a small model waits for most.

    Args:
        payload: int32 [words] of this replica.
        gather: Gathers vectors of one length into the rows of a matrix, by one collective.
        ahead: The replica's variable of `WordsAhead`; it is set for the next step. With None, the
            lengths are sent alone, and nothing here branches: where a process has several replicas,
            these would wait for each other in their branches.

    Returns:
        int32 [replicas, longest], and how many words each replica gave to be gathered.
    """
    words = tf.size(payload)
    if ahead is None:
        longest = tf.reduce_max(gather(words[tf.newaxis]))
        return gather(_padded(payload, longest)), longest + 1
    room = tf.cast(ahead.read_value(), tf.int32)
    first = gather(tf.concat([words[tf.newaxis], _padded(payload[:room], room)], 0))
    longest = tf.reduce_max(first[:, 0])
    # Lengths vary, and what does not fit is sent again: so zeros are cheaper.
    enough = tf.maximum(longest + longest // 8, room - room // 16)
    ahead.assign(tf.cast(tf.where(enough > _MOST_AHEAD, 0, enough), tf.int64))
    rows, more = tf.cond(
        longest <= room,
        lambda: (first[:, 1 : longest + 1], 0),
        lambda: (gather(_padded(payload, longest)), longest),
    )
    return rows, 1 + room + more


def _padded(payload: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
    return tf.pad(payload, [[0, words - tf.size(payload)]])
