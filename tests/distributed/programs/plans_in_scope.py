"""Trains by L-GreCo within the strategy's scope, where creating a variable synchronizes the
workers."""

import keras
from common import Setup, digits

import tf_gradcomp as gc
from tests.ranks import exchange_of, report


def layers():
    hidden = [keras.layers.Dense(width, activation="tanh") for width in (128, 32)]
    return keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(3)])


def plan_within(method):
    setup = Setup("optimizer", f"lgreco(method='{method}')")
    model = setup.model(layers, lambda: setup.wrap(keras.optimizers.SGD(0.1)))
    plans = gc.callbacks.LayerwisePlan(3, table=False)
    with setup.strategy.scope():
        model.fit(*digits(), batch_size=32, epochs=1, verbose=0, shuffle=False, callbacks=[plans])
    return exchange_of(model).hooks.plan_in_force()


report({method: plan_within(method) for method in ("adacomp(bin_sizes=50)", "scalecom(rates=20)")})
