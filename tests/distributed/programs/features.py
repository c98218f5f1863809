"""Trains with features of an optimizer, every gradient sent whole: WAY FEATURE/..."""

import keras
import numpy as np
from common import (
    WHOLE,
    Setup,
    digits,
    linear_model,
    scalar,
    state_digest,
)

import tf_gradcomp as gc
from tests.ranks import argument, exchange_of, inner_of, report

BATCH, STEPS = 32, 6
EPSILON = 0.05  # of Adam, for `tests.bounds.training`
TABLE = 40
setup = Setup(argument(1), WHOLE)


def train(inner, build=linear_model, inputs=None, wrap=setup.wrap, compile_args=None, **fit_args):
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

if __name__ == "__main__":
    report({name: CHECKS[name]() for name in argument(2).split("/")})
