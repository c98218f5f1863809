"""A training loop without `fit`: gradcomp run -n 2 custom_training_loop.py."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_gradcomp as gc

BATCH = 64  # rows of a batch over all workers

strategy = gc.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
train = tf.data.Dataset.from_tensor_slices((x[360:], y[360:])).shuffle(len(x), seed=0)
train = strategy.experimental_distribute_dataset(train.batch(BATCH, drop_remainder=True))
test = tf.data.Dataset.from_tensor_slices((x[:360], y[:360]))
test = strategy.experimental_distribute_dataset(test.batch(BATCH))

with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu")])
    model.add(keras.layers.Dense(10))
    optimizer = gc.CompressedOptimizer(keras.optimizers.Adam())
    optimizer.build(model.trainable_variables)  # a step cannot create variables
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    accuracy = keras.metrics.SparseCategoricalAccuracy()


@tf.function
def train_step(batch):
    def on_worker(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            # Gradients are summed over the workers, so the loss is divided by the whole batch.
            loss = tf.reduce_sum(losses(labels, logits)) / BATCH
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)  # exchanges the gradients
        return loss

    return strategy.reduce("SUM", strategy.run(on_worker, args=batch), axis=None)


@tf.function
def test_step(batch):
    def on_worker(images, labels):
        accuracy.update_state(labels, model(images, training=False))

    strategy.run(on_worker, args=batch)


for epoch in range(1, 11):
    loss = tf.reduce_mean([train_step(batch) for batch in train])
    accuracy.reset_state()
    for batch in test:
        test_step(batch)
    result = float(accuracy.result())  # of all workers, so all of them ask for it
    if gc.is_chief(strategy):
        print(f"Epoch {epoch}: loss {loss:.4f}, test accuracy {result:.4f}")
