"""A custom loss that is a mean over the rows of a worker, and that nothing divides."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.replicas import collective
from tf_gradcomp.groups import notices

TEXT = "as large as in one process. Divide such a loss by strategy.num_replicas_in_sync"
ROWS = 8  # of all replicas
N = 2


def mean(x, y):
    return tf.reduce_mean((x - y) ** 2)


def of_rows(x, y):
    return tf.reduce_sum((x - y) ** 2, 1)


def through_keras(reduction="sum_over_batch_size"):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    return lambda x, y: loss(y, x)


mse, binary = through_keras(), keras.losses.BinaryCrossentropy(from_logits=True)
WRONG = {
    "mean": mean,
    "of Keras' operations": lambda x, y: keras.ops.mean(keras.ops.sum((x - y) ** 2, -1)),
    "two terms (VAE)": lambda x, y: mean(x, y) - 0.05 * tf.reduce_mean(of_rows(x, 0.0)),
    "difference (WGAN)": lambda x, y: tf.reduce_mean(x) - tf.reduce_mean(y * x) + 10.0 * mean(x, y),
    "a part is by Keras": lambda x, y: mse(x, y) + mean(x, 0.0),
    "weighted by a tensor": lambda x, y: mean(x, y) * tf.reduce_max(y),
    "cast": lambda x, y: tf.cast(mean(x, y), tf.float64),
    "sum by own rows": lambda x, y: (
        tf.reduce_sum(of_rows(x, y)) / tf.cast(tf.shape(x)[0], tf.float32)
    ),
    "one number for Keras": lambda x, y: mse(x, y) + tf.reduce_mean([mean(x, y), mean(x, 0.0)]),
}
RIGHT = {
    "Keras' loss": mse,
    "Keras' losses (GAN)": lambda x, y: 0.3 * binary(y > 0, x) + 100.0 * mse(x, y),
    "mean divided": lambda x, y: mean(x, y) / N,
    "mean times the inverse": lambda x, y: (mean(x, y) + 0.1 * mean(x, 0.0)) * (1 / N),
    "divided by a tensor": lambda x, y: mean(x, y) / tf.cast(N, tf.float32),
    "terms divided before": lambda x, y: mean(x, y) / N + 0.1 / N * mean(x, 0.0),
    "compute_average_loss": lambda x, y: tf.nn.compute_average_loss(of_rows(x, y)),
    "with a batch size": lambda x, y: tf.nn.compute_average_loss(
        of_rows(x, y), global_batch_size=ROWS
    ),
    "regularization": lambda x, y: mse(x, y) + tf.nn.scale_regularization_loss(mean(x, 0.0)),
    "sum by all rows": lambda x, y: tf.reduce_sum(of_rows(x, y)) * (1.0 / ROWS),
    "sum": lambda x, y: tf.reduce_sum(of_rows(x, y)),
    "a value for each row": of_rows,
    "sum of Keras": through_keras("sum"),
}


class Model(keras.Model):
    def __init__(self, loss):
        super().__init__()
        self.dense, self.own_loss = keras.layers.Dense(2), loss
        self.dense.build((None, 2))
        self.built = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.own_loss(self.dense(x), y)
        variables = self.dense.trainable_variables
        gradients = tape.gradient(loss, variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"accuracy": tf.reduce_mean(tf.cast(loss, tf.float32))}  # a mean beside the loss


def said(loss, way, caplog):
    """Returns whether a program with a loss gets the warning; all are traced, as in `fit`."""
    notices.forget()
    strategy = collective()
    rows = np.random.RandomState(0).normal(size=(ROWS, 2)).astype("float32")
    reduction = {"reduction": "mean"} if way == "means" else {}
    with strategy.scope():
        model = Model(loss)
        optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(0.1), "no_compression", **reduction)
        model.compile(keras.optimizers.SGD(0.1) if way == "bare" else optimizer)
    if way == "loop":
        data = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensors((rows, rows)).repeat(2).unbatch().batch(ROWS)
        )
        step = tf.function(lambda batch: strategy.run(model.train_step, (batch,)) and None)
        for batch in data:
            step(batch)
    else:
        data = tf.data.Dataset.from_tensor_slices((rows, rows)).repeat(2).batch(ROWS)
        model.fit(data, verbose=0)
    return caplog.text.count(TEXT)


@pytest.mark.parametrize("name", WRONG)
def test_a_mean_that_nothing_divides_is_reported_once(name, caplog):
    assert said(WRONG[name], "fit", caplog) == 1


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_not_reported(name, caplog):
    assert said(RIGHT[name], "fit", caplog) == 0


def test_means_of_gradients_need_no_division(caplog):
    assert said(mean, "means", caplog) == 0


@pytest.mark.parametrize("way", ["loop", "bare"])
def test_loops_and_optimizers_that_are_not_wrapped_are_told_too(way, caplog):
    assert said(mean, way, caplog) == 1
    caplog.clear()
    assert said(mse, way, caplog) == 0
