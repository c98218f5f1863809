"""Metrics and predictions of Keras 2 equal those of one process."""

from pathlib import Path

import pytest
import tensorflow as tf

from tests.bounds import training
from tests.keras2.common import ALONE, compiled, fit, keras, new_strategy, words_model
from tests.keras2.jobs import (
    SUMS,
    by_strategy,
    largest_difference,
)
from tests.ranks import SIZE, compressed, data, report
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
FEW = ["accuracy"]


class Counted(keras.metrics.Metric):
    """Counts rows and steps, in variables of several kinds."""

    def __init__(self):
        super().__init__(name="counted")
        self.rows = self.add_weight(name="rows", initializer="zeros")
        self.whole = self.add_weight(name="whole", initializer="zeros", dtype=tf.int32)
        arguments = {"initializer": "zeros", "aggregation": tf.VariableAggregation.MEAN}
        self.steps = self.add_weight(name="steps", **arguments)

    def update_state(self, y_true, y_pred, sample_weight=None):
        for variable in (self.rows, self.whole):
            variable.assign_add(tf.cast(tf.shape(y_true)[0], variable.dtype))
        self.steps.assign_add(1.0)

    def result(self):
        return {"rows": self.rows, "whole": self.whole, "steps": self.steps}


class Own(keras.Sequential):
    """With a `train_step` as Keras' guide has it, and a loss that no metric has counted."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        for metric in self.metrics:
            if metric.name != "loss":
                metric.update_state(y, self(x))
        return {"raw": loss, **{metric.name: metric.result() for metric in self.metrics}}


def collectives(function):
    """Counts the sums in its graph."""
    graph = function._list_all_concrete_functions_for_serialization()[0].graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return sum(node.op.startswith("CollectiveReduce") for node in nodes)


def measured(strategy, metrics=(), build=words_model, **kwargs):
    model = compiled(lambda: compressed("sgd", "no_compression"), strategy, build=build)
    with strategy.scope():
        created = [one() if isinstance(one, type) else one for one in [*FEW, *metrics]]
        model.compile(model.optimizer, model.loss, metrics=created, **kwargs)
    batches = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: batches.append(logs))
    history = fit(model, *data(3), epochs=2, callbacks=[watch]).history
    rows = tf.data.Dataset.from_tensor_slices(data(2, seed=2)).batch(24)
    return {
        "batches": [{**logs} for logs in batches],
        "fit": {name: values[-1] for name, values in history.items()},
        "evaluate": model.evaluate(rows, verbose=0, return_dict=True),
        "predict": model.predict(rows, verbose=0).tolist(),
        "collectives": 0 if kwargs else collectives(model.train_function),
    }


# Outputs after six steps of SGD(0.01) are sums over 16 units.
MEASURED = 16 * training(gain=0.01, terms=SUMS, steps=6)


@pytest.fixture(scope="module")
def metrics():
    """By two workers, and by one process on whole batches."""
    first, second = by_strategy(PROGRAM)
    assert first == second
    (single,) = results(run_workers(PROGRAM, 1))
    return first, single


@pytest.mark.parametrize("model", ["few", "many", "own", "eager"])
def test_metrics_and_predictions_equal_one_process(metrics, model):
    seen, single = (logged[model] for logged in metrics)
    assert largest_difference(seen["predict"], single["predict"]) <= MEASURED
    logs = [[*logged["batches"], logged["fit"], logged["evaluate"]] for logged in (seen, single)]
    assert len(logs[0]) == 2 * 3 + 2
    for ours, expected in zip(*logs, strict=True):
        assert ours == pytest.approx(expected, rel=MEASURED)


def test_one_collective_of_a_step_sums_all_metrics(metrics):
    assert metrics[0]["many"]["collectives"] == metrics[0]["few"]["collectives"]


if __name__ == "__main__":
    strategy = new_strategy() if SIZE > 1 else ALONE
    many = [keras.metrics.SparseTopKCategoricalAccuracy, Counted]
    report(
        {
            "few": measured(strategy),
            "many": measured(strategy, many),
            "own": measured(strategy, build=lambda: Own(words_model().layers)),
            "eager": measured(strategy, many, run_eagerly=True),
        }
    )
