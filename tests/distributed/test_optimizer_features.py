"""Settings of the inner optimizer act as in one process with the whole batch.

The oracle is the bare Keras optimizer in one process. With every gradient sent whole, as float32,
two workers must train as it does.
"""

from pathlib import Path

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.bounds import training
from tests.distributed.common import (
    WHOLE,
    Setup,
    digits,
    linear_model,
    scalar,
    state_digest,
)
from tests.ranks import argument, exchange_of, inner_of, report
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
BATCH, STEPS = 32, 6

EPSILON = 0.05  # of Adam, for `tests.bounds.training`
TABLE = 40


def train(inner, build=linear_model, inputs=None, wrap=None, compile_args=None, **fit_args):
    wrap = wrap or setup.wrap
    x, y = digits(BATCH * STEPS)
    x = x if inputs is None else inputs
    model = setup.model(build, lambda: wrap(inner()), **(compile_args or {}))
    if setup.way == "alone":  # Keras would create the slots in a step, which is then traced twice
        model.optimizer.build(model.trainable_variables)
    history = model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, shuffle=False, **fit_args)
    seen = {
        **state_digest(model),
        "loss": history.history["loss"],
        "values": [np.asarray(variable) for variable in model.trainable_variables],
        "averages": [
            np.asarray(variable)
            for variable in getattr(
                inner_of(model.optimizer), "_model_variables_moving_average", []
            )
        ],
        "iterations": scalar(model.optimizer.iterations),
        "learning rate": scalar(model.optimizer.learning_rate),
    }
    if setup.way != "alone":
        exchange = exchange_of(model)
        seen["exchanges"] = exchange.traffic().exchanges
        seen["skipped"] = scalar(exchange.skipped_steps)
    if isinstance(scaler_of(model.optimizer), keras.optimizers.LossScaleOptimizer):
        seen["scale"] = scalar(scaler_of(model.optimizer).dynamic_scale)
    return seen


def scaler_of(optimizer):
    if isinstance(optimizer, gc.CompressedOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def loss_scaled():
    scaler = keras.optimizers.LossScaleOptimizer
    return scaler(
        keras.optimizers.Adam(1e-2, epsilon=EPSILON), initial_scale=8.0, dynamic_growth_steps=2
    )


def loss_scaler_around():
    def wrap(scaler):
        if setup.way == "alone":
            return scaler
        compressed = setup.wrap(scaler.inner_optimizer)
        return keras.optimizers.LossScaleOptimizer(
            compressed, initial_scale=8.0, dynamic_growth_steps=2
        )

    return train(loss_scaled, wrap=wrap)


def embedding(**policy):
    words = np.random.default_rng(3).integers(0, TABLE, size=(BATCH * STEPS, 5))

    def build():
        return keras.Sequential(
            [
                keras.layers.Input((5,), dtype="int32"),
                keras.layers.Embedding(TABLE, 6),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )

    def wrap(optimizer):
        if setup.way == "alone":
            return optimizer
        return setup.wrap(optimizer, policy=gc.Policy(**policy))

    return train(lambda: keras.optimizers.SGD(0.05, momentum=0.9), build, words, wrap)


def means(inner):
    """A loss of one number, the mean over the worker's part of the batch, as in PyTorch."""
    losses = keras.losses.sparse_categorical_crossentropy

    def loss(y, predicted):
        return keras.ops.mean(losses(y, predicted, from_logits=True))

    def wrap(optimizer):
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and setup.way != "alone":
            optimizer.inner_optimizer = wrap(optimizer.inner_optimizer)
            return optimizer
        return setup.wrap(optimizer, reduction="mean")

    seen = train(inner, wrap=wrap, compile_args={"loss": loss})
    # Keras multiplies the loss that it shows, as if it had divided that of the gradients.
    shown = seen["loss"]
    return {**seen, "loss": [loss / setup.strategy.num_replicas_in_sync for loss in shown]}


class WithUnused(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.unused = self.add_weight(shape=(7, 7), name="unused")

    def call(self, inputs):
        return inputs @ self.kernel


def partly_trained():
    """Builds the optimizer for fewer variables than the model has: a layer is frozen."""

    def build():
        frozen = keras.layers.Dense(8, activation="relu", trainable=False)
        return keras.Sequential([keras.layers.Input((8,)), frozen, WithUnused()])

    return train(lambda: keras.optimizers.Adam(1e-2, epsilon=EPSILON), build)


optimizers = keras.optimizers
decay = optimizers.schedules.ExponentialDecay(0.05, decay_steps=2, decay_rate=0.5)
weights = np.random.default_rng(4).uniform(0.1, 2, BATCH * STEPS)
CHECKS = {
    "momentum, schedule and class_weight": lambda: train(
        lambda: optimizers.SGD(decay, momentum=0.9, nesterov=True),
        class_weight={0: 0.2, 1: 1.0, 2: 3.0},
    ),
    "AdamW and sample_weight": lambda: train(
        lambda: optimizers.AdamW(1e-2, epsilon=EPSILON, weight_decay=0.1), sample_weight=weights
    ),
    "not clipped": lambda: train(lambda: optimizers.SGD(0.5)),
    "clipnorm": lambda: train(lambda: optimizers.SGD(0.5, clipnorm=0.05)),
    "EMA": lambda: train(
        lambda: optimizers.SGD(
            0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=4, weight_decay=0.01
        )
    ),
    "accumulation": lambda: train(
        lambda: optimizers.Adam(1e-2, epsilon=EPSILON, gradient_accumulation_steps=3)
    ),
    "accumulation and clipping": lambda: train(
        lambda: optimizers.SGD(0.5, gradient_accumulation_steps=2, global_clipnorm=0.05)
    ),
    "loss scaler inside": lambda: train(loss_scaled),
    "loss scaler around": loss_scaler_around,
    "Embedding made dense": embedding,
    "Embedding left sparse": lambda: embedding(max_dense_elements=TABLE * 6 - 1),
    "means and accumulation": lambda: means(
        lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05, gradient_accumulation_steps=3)
    ),
    "means and loss scaler around": lambda: means(loss_scaled),
    "frozen layer and variable without gradient": partly_trained,
}


FEATURES = [feature for feature in CHECKS if feature != "not clipped"]
# No optimizer moves a weight by more than half of its gradient's size: rates go up to 0.5, with
# momentum up to 0.05 / (1 - 0.9), and Adam has an epsilon of 0.05. Sums are over up to 32 rows, 40
# words, 30 inputs of a layer and 3 classes.
TRAINED = training(gain=0.5, terms=32 + 40 + 30 + 3, steps=STEPS)
EXCHANGES = {
    "accumulation": STEPS // 3,
    "means and accumulation": STEPS // 3,
    "accumulation and clipping": STEPS // 2,
}


@pytest.fixture(scope="module")
def workers():
    return reports(2, "optimizer", FEATURES)


@pytest.fixture(scope="module")
def alone():
    return reports(1, "alone", [*FEATURES, "not clipped"])[0]


@pytest.mark.parametrize("feature", FEATURES)
def test_two_workers_train_as_one_process_with(workers, alone, feature):
    for worker in workers:
        assert_close(worker[feature]["values"], alone[feature]["values"])
        assert_close(worker[feature]["averages"], alone[feature]["averages"])
        assert worker[feature]["loss"] == pytest.approx(alone[feature]["loss"], abs=TRAINED)
        assert worker[feature]["iterations"] == alone[feature]["iterations"]
        assert worker[feature]["learning rate"] == alone[feature]["learning rate"]


@pytest.mark.parametrize("feature", FEATURES)
def test_weights_and_slots_are_bit_equal_with(workers, feature):
    first, second = (worker[feature] for worker in workers)
    assert first["weights"] == second["weights"]
    assert first["slots"] == second["slots"]


@pytest.mark.parametrize("feature", FEATURES)
def test_exchanges_on_update_steps_only(workers, feature):
    expected = EXCHANGES.get(feature, STEPS)
    assert [worker[feature]["exchanges"] for worker in workers] == [expected] * 2
    assert [worker[feature]["skipped"] for worker in workers] == [0, 0]


@pytest.mark.parametrize("feature", ["loss scaler inside", "loss scaler around"])
def test_loss_scale_grows_as_in_one_process(workers, alone, feature):
    assert alone[feature]["scale"] > 8
    assert [worker[feature]["scale"] for worker in workers] == [alone[feature]["scale"]] * 2


def test_loss_scaler_inside_and_around_are_bit_equal(workers):
    inside, around = (workers[0][f"loss scaler {index}"] for index in ("inside", "around"))
    assert inside["weights"] == around["weights"]
    assert inside["slots"] == around["slots"]


@pytest.mark.parametrize("feature", ["clipnorm", "accumulation and clipping"])
def test_clipping_clips(alone, feature):
    # else the comparisons above would say nothing about it
    assert distance(alone[feature], alone["not clipped"]) > 1e-2


def reports(n, way, features):
    return results(run_workers(PROGRAM, n, [way, "/".join(features)]))


def assert_close(values, expected):
    assert len(values) == len(expected)
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=TRAINED)


def distance(seen, other):
    return max(
        np.abs(np.subtract(a, b)).max()
        for a, b in zip(seen["values"], other["values"], strict=True)
    )


if __name__ == "__main__":
    setup = Setup(argument(1), WHOLE)
    report({name: CHECKS[name]() for name in argument(2).split("/")})
