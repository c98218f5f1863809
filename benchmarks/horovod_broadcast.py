"""Three ways to broadcast by Horovod from a rank that changes from step to step.

gradcomp run --horovod -n 2 --output chief benchmarks/horovod_broadcast.py

Horovod's own broadcast has one root for all steps. Prints the median milliseconds of each way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import horovod.tensorflow as hvd
import tensorflow as tf

WORDS = (100, 10_000, 1_000_000)
STEPS = 30
Way = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def by_branch(payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
    """Has a broadcast for each root, in separate branches."""
    branches = [lambda rank=rank: hvd.broadcast(payload, rank) for rank in range(hvd.size())]
    return tf.switch_case(root, branches)


def by_gather(payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
    """All ranks except the root gather nothing."""
    return hvd.allgather(payload[: tf.where(tf.equal(root, hvd.rank()), tf.size(payload), 0)])


def by_sum(payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
    """All ranks except the root sum zeros."""
    given = tf.where(tf.equal(root, hvd.rank()), payload, tf.zeros_like(payload))
    return hvd.allreduce(given, op=hvd.Sum)


def milliseconds(way: Way, words: int) -> float:
    """Returns the median time of some steps, after each rank has been the root."""
    broadcast = tf.function(way, autograph=False)
    payload = tf.fill([words], hvd.rank())
    taken = []
    for step in range(hvd.size() + STEPS):
        root = tf.constant(step % hvd.size())
        hvd.allreduce(tf.zeros([1]))  # all are ready
        started = time.perf_counter()
        received = broadcast(payload, root).numpy()
        taken.append(time.perf_counter() - started)
        assert received.tolist() == [int(root)] * words
    return 1e3 * statistics.median(taken[hvd.size() :])


def main() -> None:
    """Prints a line for each length."""
    hvd.init()
    for words in WORDS:
        ways = [
            f"{way.__name__} {milliseconds(way, words):.2f}"
            for way in (by_branch, by_gather, by_sum)
        ]
        if hvd.rank() == 0:
            print(f"{words:9,} words: {', '.join(ways)} ms")


if __name__ == "__main__":
    main()
