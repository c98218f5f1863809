"""Settings of the inner optimizer, and faults, in local steps."""

import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from common import Setup, scalar
from local_training import RATE, Trained, gradients, strategy

import tf_gradcomp as gc
from tests.ranks import RANK, exchange_of, report, values

CLIPS = {"clipvalue": 4.0, "clipnorm": 40.0, "global_clipnorm": 60.0}


def clipped():
    """Each worker clips its own gradients."""

    def trained(name):
        inner = functools.partial(keras.optimizers.SGD, RATE, **{name: CLIPS[name]})
        return Trained("no_compression", lambda: 3, inner).on(gradients(6))

    return {name: trained(name).seen() for name in CLIPS}


def scaled():
    """A loss scaler around: in the first round, worker 1 skips a step and halves its own scale."""
    steps = gradients(6)
    steps[1][1][0][0, 0] = np.inf
    trained = Trained(
        "no_compression",
        lambda: 3,
        scaler=lambda inner: keras.optimizers.LossScaleOptimizer(
            inner, 8.0, dynamic_growth_steps=2
        ),
    )
    seen = trained.on(steps).seen()
    return {**seen, "scale": scalar(trained.applies.dynamic_scale)}


def accumulates():
    """Worker 1 skips its second update, of which the first batch was not finite."""
    steps = gradients(8)
    steps[2][1][1][0] = np.nan
    trained = Trained(
        "no_compression",
        lambda: 2,
        lambda: keras.optimizers.Adam(2.0**-6, epsilon=1.0, gradient_accumulation_steps=2),
        keras.optimizers.LossScaleOptimizer,
    )
    return trained.on(steps).seen()


def overflows():
    """Worker 1's momentum overflows in the first round."""
    steps = gradients(6)
    steps[1][1][1][0] = 1e38
    trained = Trained("no_compression", lambda: 3, lambda: keras.optimizers.SGD(4.0, momentum=0.5))
    return [trained.on(steps[:3]).seen(), trained.on(steps[3:]).seen()]


def rising(step):
    return 2 if step < 4 else 3


def scheduled():
    """Rounds of 1, 1, 3 and 3 steps; and after two synchronous steps, of 2 and 3."""
    seen = []
    for settings in (gc.LocalSteps([(0, 1), (2, 3)]), gc.LocalSteps(rising, warmup_steps=2)):
        trained = Trained("no_compression", lambda settings=settings: settings)
        trained.on(gradients(8)).optimizer.synchronize()
        seen.append({**trained.seen(), "traces": trained.step.experimental_get_tracing_count()})
    return seen


def unlike():
    """The error of workers whose functions have one name, and differ from step 1,000 on."""

    def later(step):
        return 2 if step < 1000 + 100 * RANK else 3

    try:
        Trained("no_compression", lambda: gc.LocalSteps(later))
    except gc.WorkersDisagreeError as error:
        return str(error)
    return None


def nesterov():
    return keras.optimizers.SGD(0.5, momentum=0.75, nesterov=True)


def created():
    """The elements of all variables that an optimizer creates, in copies of the weights."""

    def copies(settings):
        elements = 0

        def counting(create, **arguments):
            nonlocal elements
            variable = create(**arguments)
            elements += int(np.prod(variable.shape))
            return variable

        with strategy.scope(), tf.variable_creator_scope(counting):
            weights = keras.Variable(np.zeros((100, 100), "float32"), aggregation="mean")
            inner = keras.optimizers.SGD(RATE)
            gc.CompressedOptimizer(inner, "adacomp", local_steps=settings()).build([weights])
        return elements / 100**2

    outer = functools.partial(keras.optimizers.SGD, 0.7, momentum=0.9)
    return [copies(s) for s in (lambda: None, lambda: 4, lambda: gc.LocalSteps(4, outer()))]


def statistics():
    """Two of the statistics of worker 1, of eight on each, have become infinite and NaN."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    for index, variable in enumerate(model.non_trainable_variables):
        variable.assign(np.arange(4) + 4 * index + 2.0 * RANK)
    if RANK == 1:
        model.non_trainable_variables[0].assign([np.inf, 3.0, np.nan, 5.0])
    trained = Trained("no_compression", lambda: 3)
    trained.optimizer.synchronize(model)
    return values(model.non_trainable_variables)


def in_float16():
    """`fit` with a loss scaler that Keras makes; worker 1 has one batch that overflows."""
    x, y = float16_data()
    setup = Setup("optimizer", "no_compression")
    model = setup.model(
        lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)]),
        lambda: setup.wrap(keras.optimizers.SGD(0.25), local_steps=3),
        policy="mixed_float16",
        loss="mse",
    )
    before = values(model.trainable_variables)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return {
        "before": before,
        "values": values(model.trainable_variables),
        "scale": scalar(model.optimizer.dynamic_scale),
        "skipped": scalar(exchange_of(model).skipped_steps),
    }


def float16_data():
    rng = np.random.default_rng(5)
    x = rng.integers(-8, 9, (48, 4)).astype("float32") / 8
    y = rng.integers(-8, 9, (48, 1)).astype("float32") / 8
    x[8 + 4] = 1e6  # worker 1's first row of the second batch
    return x, y


if __name__ == "__main__":
    checks = (
        *(clipped, scaled, accumulates, overflows, scheduled, unlike),
        *(created, statistics, in_float16),
    )
    report({check.__name__: check() for check in checks})
