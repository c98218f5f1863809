"""Times L-GreCo's planning on one core; prints the least processor time of some runs.

The plan uses random sizes and errors. The tables are made for Keras' ResNet-50, with random
gradients and each method's own choices.
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read where NumPy is loaded

import click
import keras
import numpy as np
import rich
import tensorflow as tf
from machine import processor
from rich.table import Table

from tf_gradcomp import Policy, compressors
from tf_gradcomp.compressors.plans import knapsack, table

METHODS = ("top_k", "power_sgd", "qsgd", "adacomp", "scalecom")


def seconds(work, repeats):
    """Returns the least processor time of some runs, and the result of the work."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        result = work()
        times.append(time.process_time() - start)
    return min(times), result


def time_plan(layers, choices, repeats, rows):
    random = np.random.default_rng(0)
    sizes = random.integers(1, 10**6, (layers, choices)).astype(np.float64)
    errors = random.uniform(0, 1, (layers, choices))
    default = [choices // 2] * layers
    took, _ = seconds(lambda: knapsack(sizes, errors, default), repeats)
    rows.add_row(f"plan of {layers} layers, {choices} choices each", f"{took:.3f}")


def time_tables(name, specs, gradients, repeats, rows):
    compressor = compressors.get(name)
    choices = [compressor.choices(spec) or () for spec in specs]
    defaults = compressor.settings(specs)

    def tables():
        return [
            table(compressor, *of_one)
            for of_one in zip(specs, gradients, choices, defaults, strict=True)
        ]

    took, _ = seconds(tables, repeats)
    settings = max(len(of_one) for of_one in choices)
    rows.add_row(f"tables of a ResNet-50, {name}, up to {settings} choices", f"{took:.2f}")


@click.command(help=__doc__)
@click.option("--layers", default=160, show_default=True)
@click.option("--choices", default=100, show_default=True)
@click.option("--methods", default=",".join(METHODS), show_default=True)
@click.option("--repeats", default=3, show_default=True)
def main(layers, choices, methods, repeats):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    rows = Table("", "s")
    time_plan(layers, choices, repeats, rows)
    policy = Policy()
    variables = keras.applications.ResNet50(weights=None).trainable_variables
    specs = [policy.spec(v.path, v.shape, "float32") for v in variables]
    random = np.random.default_rng(0)
    gradients = [random.standard_normal(spec.shape, np.float32) for spec in specs]
    for name in methods.split(","):
        time_tables(name, specs, gradients, repeats, rows)
    rich.print(f"{processor()}, one core, NumPy {np.__version__}, TensorFlow {tf.__version__}")
    rich.print(rows)


if __name__ == "__main__":
    main()
