"""Measures the time of the first step of training, and the parts of this time.

    python benchmarks/first_step.py
    python benchmarks/first_step.py --model transformer -c adacomp -c cast --repeats 5

Two workers train with Adam. The time begins when the model exists: it covers the optimizer's
variables, the tracing of the step and the step's first call. "Dense" is the optimizer alone, under
`gc.MultiWorkerMirroredStrategy`. Counts come from a separate job without timing, and are the same
on any machine.
"""

from __future__ import annotations

import collections
import contextlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator

import click
from machine import processor
from output import print_table
from reports import means, reports_of
from rich.progress import track
from rich.table import Table

DENSE = "dense"
METHODS = ("adacomp", "cast", "top_k", "power_sgd")
MODELS = ("resnet50", "transformer")
BLOCKS = 25  # of 16 variables each, in the Transformer
WORKERS, BATCH, TOKENS, WIDTH = 2, 4, 16, 32
PHASES = ("variables", "tracing", "first call")


def work(name: str, method: str, counts: bool) -> None:
    """Takes the first step on one worker; prints its times, or its counts, as JSON."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_gradcomp as gc

    strategy = gc.MultiWorkerMirroredStrategy()
    random = np.random.default_rng(strategy.cluster_resolver.task_id)
    with strategy.scope():
        if name == "transformer":
            model, inputs = _transformer(), random.integers(0, 64, (BATCH, TOKENS))
        else:
            model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)
            inputs = random.random((BATCH, 32, 32, 3), "float32")
    variables = model.trainable_variables
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(autograph=False)
    def train(inputs: tf.Tensor, labels: tf.Tensor) -> None:
        def step() -> None:
            with tf.GradientTape() as tape:
                value = loss(labels, model(inputs, training=True)) / WORKERS
            optimizer.apply(tape.gradient(value, variables), variables)

        strategy.run(step)

    batch = tf.constant(inputs), tf.constant(np.arange(BATCH))
    found: collections.Counter[str] = collections.Counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(strategy.scope())
        if counts:
            stack.enter_context(_counting(found))
        times = [(time.perf_counter(), _cpu_seconds())]
        optimizer = keras.optimizers.Adam()
        if method != DENSE:
            optimizer = gc.CompressedOptimizer(optimizer, method, gc.Policy.from_model(model))
        optimizer.build(variables)
        times.append((time.perf_counter(), _cpu_seconds()))
    with _counting(found) if counts else contextlib.nullcontext():
        graph = train.get_concrete_function(*batch).graph
        times.append((time.perf_counter(), _cpu_seconds()))
        train(*batch)
        times.append((time.perf_counter(), _cpu_seconds()))
    if counts:
        definition = graph.as_graph_def()
        bodies = [definition.node, *(body.node_def for body in definition.library.function)]
        found["trained"], found["nodes"] = len(variables), sum(map(len, bodies))
        print(json.dumps(found))
        return
    pairs = zip(PHASES, times, times[1:], strict=False)
    seconds = {phase: after[0] - before[0] for phase, before, after in pairs}
    print(json.dumps({**seconds, "CPU": times[-1][1] - times[0][1]}))


def _transformer():
    from keras import Input, Model, layers

    tokens = Input((TOKENS,), dtype="int32")
    x = layers.Embedding(64, WIDTH)(tokens)
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, WIDTH // 2)(y, y)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(WIDTH)(layers.Dense(2 * WIDTH, activation="relu")(y))
    return Model(tokens, layers.Dense(10)(x[:, 0]))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def _counting(found: collections.Counter[str]) -> Iterator[None]:
    """Counts new variables, and ops that Python runs outside graphs, within this context."""
    import tensorflow as tf
    from tensorflow.python.framework import op_callbacks  # no public API sees each op

    def op(type_, _inputs, _attributes, _outputs, op_name=None, graph=None) -> None:
        if graph is None:
            found["ops"] += 1
            found["collectives"] += "Collective" in str(type_)  # bytes or a string

    def creator(next_creator, **arguments):
        found["variables"] += 1
        return next_creator(**arguments)

    op_callbacks.add_op_callback(op)
    try:
        with tf.variable_creator_scope(creator):
            yield
    finally:
        op_callbacks.remove_op_callback(op)


def measured(name: str, method: str, counts: bool) -> dict[str, float]:
    """Runs a job once; returns the means over its workers."""
    args = ["worker", name, method, str(int(counts))]
    return means(reports_of(__file__, *args, workers=WORKERS))


@click.command(help=__doc__)
@click.option("--model", "models", type=click.Choice(MODELS), multiple=True, default=MODELS)
@click.option("-c", "--compressor", "methods", multiple=True, default=METHODS)
@click.option("--repeats", default=3, show_default=True, help="0 prints the counts alone.")
def main(models: tuple[str, ...], methods: tuple[str, ...], repeats: int) -> None:
    """Prints the tables of counts and of times."""
    cells = [(model, method) for model in models for method in (DENSE, *methods)]
    counted = {cell: measured(*cell, True) for cell in track(cells, "counting")}
    table = Table(title=f"Until the end of the first step, on each of {WORKERS} workers")
    names = ("variables", "ops", "collectives", "nodes")
    for name in ("model", "method", *names):
        table.add_column(name, justify="left" if name in ("model", "method") else "right")
    for (model, method), of_cell in counted.items():
        table.add_row(_with_size(model, of_cell), method, *(f"{of_cell[n]:.0f}" for n in names))
    print_table(table)
    if not repeats:
        return
    runs = [cell for _ in range(repeats) for cell in cells]
    timed: dict[tuple[str, str], list[dict[str, float]]] = {}
    for cell in track(runs, "measuring"):
        timed.setdefault(cell, []).append(measured(*cell, False))
    table = Table(title=f"Seconds on {processor()}; medians of {repeats} runs")
    for name in ("model", "method", *PHASES, "in all", "to dense", "CPU", "to dense"):
        table.add_column(name, justify="left" if name in ("model", "method") else "right")
    for model, method in cells:
        row = [_median(timed[model, method], *names) for names in (*zip(PHASES), PHASES, ("CPU",))]
        dense = [_median(timed[model, DENSE], *names) for names in (PHASES, ("CPU",))]
        ratios = [f"{own / base:.2f}" for own, base in zip(row[-2:], dense, strict=True)]
        seconds = [f"{value:.1f}" for value in row]
        cells_of_row = [*seconds[:-1], ratios[0], seconds[-1], ratios[1]]
        table.add_row(_with_size(model, counted[model, method]), method, *cells_of_row)
    print_table(table)


def _with_size(model: str, of_cell: dict[str, float]) -> str:
    return f"{model}, {of_cell['trained']:.0f}"


def _median(runs: list[dict[str, float]], *names: str) -> float:
    return statistics.median(sum(run[name] for name in names) for run in runs)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "worker":
        work(sys.argv[2], sys.argv[3], sys.argv[4] == "1")
    else:
        main()
