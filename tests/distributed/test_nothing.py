"""Tests that jobs with nothing to train or to exchange continue without a crash."""

import functools

import pytest

from tests.bounds import assert_close
from tests.workers import results, run_workers

# Trains and exchanges where there is nothing to train or to exchange: WAY.
PROGRAM = '''
    import keras
    import numpy as np
    import tensorflow as tf
    from tests.distributed.common import Setup, dense_model, digits

    from tests.ranks import argument, report
    from tf_gradcomp.exchange.exchange import residual_norm

    BATCH = 16
    setup = Setup(argument(1), "adacomp")
    x, y = digits(4 * BATCH)


    def frozen_model():
        model = dense_model()
        model.trainable = False
        return model


    def frozen():
        """A model without trainable variables: its losses, and numbers that callbacks ask for."""
        model = setup.model(frozen_model, lambda: setup.wrap(keras.optimizers.Adam(0.25)))
        before = [np.asarray(weight).tolist() for weight in model.weights]
        evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        fitted = model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False).history["loss"][0]
        return {
            "losses": [evaluated, fitted],
            "unchanged": before == [np.asarray(weight).tolist() for weight in model.weights],
        }


    def numbers():
        """Returns the numbers that a callback reads in training."""
        model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.Adam(0.25)))
        seen = []
        callback = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(
                [float(model.optimizer.learning_rate), int(model.optimizer.iterations.numpy())]
            )
        )
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[callback])
        return seen


    def empty_tensors():
        """A variable without elements from NumPy, which trains too; sums and gathers of nothing."""
        strategy = setup.strategy
        nothing = np.zeros((0, 3), np.float32)
        with strategy.scope():
            variable = tf.Variable(nothing)
            optimizer = setup.wrap(keras.optimizers.SGD(1.0))
            optimizer.build([])
        created = {"built": optimizer.built, "shape": list(variable.shape)}
        if setup.way == "alone":
            return created
        gathered = strategy.gather(strategy.run(tf.function(lambda: tf.identity(nothing))), axis=0)
        total = strategy.reduce("SUM", tf.constant(nothing), axis=None)
        created |= {"gathered": list(gathered.shape), "summed": list(total.shape)}
        if setup.way == "strategy":
            exchange = strategy.gradient_exchange([])
            reduce = tf.function(lambda: strategy.reduce_gradients([], []))
            created["reduced"] = strategy.run(reduce)
        else:
            exchange = optimizer.exchange
        return {**created, "exchange": exchange.built, "residuals": residual_norm(exchange)}


    report({check.__name__: check() for check in (frozen, numbers, empty_tensors)})
'''
BATCHES = 4


@functools.cache
def seen(way):
    return results(run_workers(PROGRAM, 1 if way == "alone" else 2, [way]))


@pytest.fixture(params=["optimizer", "strategy"])
def workers(request):
    return seen(request.param)


def test_a_model_without_trainable_variables_has_the_losses_of_one_process(workers):
    (single,) = seen("alone")
    for worker in workers:
        # A loss is a mean over 64 rows of sums over at most 32 inputs.
        assert_close(worker["frozen"]["losses"], single["frozen"]["losses"], terms=64 + 2 * 32)
        assert worker["frozen"]["unchanged"]


def test_callbacks_read_learning_rate_and_iterations_as_numbers(workers):
    for worker in workers:
        assert worker["numbers"] == [[0.25, 1 + batch] for batch in range(BATCHES)]


def test_tensors_without_elements(workers):
    for worker in workers:
        created = worker["empty_tensors"]
        assert created.pop("reduced", []) == []
        assert created == {
            "built": True,
            "shape": [0, 3],
            "gathered": [0, 3],
            "summed": [0, 3],
            "exchange": True,
            "residuals": 0.0,
        }
