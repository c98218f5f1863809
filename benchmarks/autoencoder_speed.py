"""Times LGC's convolutions in one step of one replica, on one core, the least of some runs.

The vectors are as long as those of a ResNet-50 at densities of 0.0001 and 0.001.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import rich
import tensorflow as tf
from machine import processor
from rich.table import Table

from tf_gradcomp.compressors.autoencoder import Architecture, Network

LENGTHS = (2_352, 23_488)


def seconds(work, repeats):
    """The least time of some runs, after one that traces."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


@click.command(help=__doc__)
@click.option("--repeats", default=20, show_default=True)
def main(repeats):
    tf.config.threading.set_intra_op_parallelism_threads(1)
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
        times = [1000 * seconds(work, repeats) for work in works]
        rows.add_row(f"{length:,}", *(f"{milliseconds:.1f}" for milliseconds in times))
    rich.print(f"{processor()}, one core, TensorFlow {tf.__version__}")
    rich.print(rows)


if __name__ == "__main__":
    main()
