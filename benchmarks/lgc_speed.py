"""Times LGC's computation in a step of one replica, on one core; prints the least of some runs.

The first table times the convolutions, on vectors as long as a ResNet-50's at densities of 0.0001
and 0.001. The second table compares the rest of a step, which is the same in all phases, with
`residual += gradient`. In a step, the leader chooses the largest entries, and other replicas check
that all sums are finite; then all replicas take the values at the leader's places, and apply the
sums. The tensors are 25 of a million elements.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import rich
import tensorflow as tf
from machine import processor
from rich.table import Table

from tf_gradcomp import ops
from tf_gradcomp.compressors.lgc.autoencoder import Architecture, Network

LENGTHS = (2_352, 23_488)
TENSORS, ELEMENTS, ENTRIES = 25, 1_000_000, 1_000


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """Returns the least time of some runs, after a run that traces."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def convolutions(repeats: int) -> Table:
    """Times the encoder and the decoder."""
    paper = Architecture()
    weights = tf.random.stateless_normal([paper.parameters(False)], [0, 0]) / 20
    network = Network(paper, weights, False)
    encode = tf.function(network.encode)
    decode = tf.function(lambda latents: network.output(network.expand(latents, frozen=True)))
    rows = Table("entries", "encoder, ms", "decoder, ms", "decoder with two latents, ms")
    for length in LENGTHS:
        vector = tf.random.stateless_normal([1, length], [1, 1])
        latent = encode(vector)
        both = tf.concat([latent, latent], 0)
        works = (lambda v=vector: encode(v), lambda z=latent: decode(z), lambda z=both: decode(z))
        times = [milliseconds(work, repeats) for work in works]
        rows.add_row(f"{length:,}", *(f"{time:.1f}" for time in times))
    return rows


def others(repeats: int) -> Table:
    """Times the operations on whole tensors."""
    drawn = tf.random.stateless_normal([2, TENSORS, ELEMENTS], [2, 2])
    residuals = [tf.Variable(values) for values in tf.unstack(drawn[0])]
    gradients = tf.unstack(drawn[1])
    led = ops.LeaderSelection(residuals, gradients, [ENTRIES] * TENSORS)

    @tf.function
    def add() -> None:
        for residual, gradient in zip(residuals, gradients, strict=True):
            residual.assign_add(gradient)

    select = tf.function(lambda lead: ops.leader_select(led, lead, order="value"))

    @tf.function
    def end(places: tf.Tensor) -> tf.Tensor:
        given = ops.leader_take(led, places, True)
        return ops.leader_apply(led, places, given, tf.zeros([0]), True, True)

    lead, follow = tf.constant(True), tf.constant(False)
    places, _ = select(lead)
    works = {
        "r += g": add,
        "the leader chooses": lambda: select(lead),
        "another looks": lambda: select(follow),
        "each takes and applies": lambda: end(places),
    }
    times = {name: milliseconds(work, repeats) for name, work in works.items()}
    rows = Table("", "ms", "relative to r += g")
    for name, time_of_one in times.items():
        rows.add_row(name, f"{time_of_one:.0f}", f"{time_of_one / times['r += g']:.1f}")
    return rows


@click.command(help=__doc__)
@click.option("--repeats", default=20, show_default=True)
def main(repeats: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    rich.print(f"{processor()}, one core, TensorFlow {tf.__version__}")
    rich.print(convolutions(repeats))
    rich.print(others(repeats))


if __name__ == "__main__":
    main()
