"""Runs metrics of all kinds in `fit` and `evaluate`, and counts their collectives in a step."""

import tensorflow as tf
from common import ALONE, compiled, fit, keras, new_strategy, words_model

from tests.ranks import SIZE, compressed, data, report

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
