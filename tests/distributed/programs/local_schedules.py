"""Jobs with local steps that resume from a save within a round, or of another schedule: FOLDER."""

import functools

import keras
from local_training import Trained, gradients, strategy

import tf_gradcomp as gc
from tests.ranks import argument, report

FOLDER = argument(1)
TOP_K = "top_k(density=0.1)"
AFTER = gradients(6, seed=5)

nesterov = functools.partial(keras.optimizers.SGD, 0.5, momentum=0.5, nesterov=True)
OUTERS = {
    "none": None,
    "plain": functools.partial(keras.optimizers.SGD, 0.5),
    "less momentum": functools.partial(keras.optimizers.SGD, 0.5, momentum=0.25, nesterov=True),
    "adagrad": functools.partial(keras.optimizers.Adagrad, 0.5),
    "adam": functools.partial(keras.optimizers.Adam, 0.5, epsilon=1.0),
}
LATER = {
    "longer": lambda: gc.LocalSteps(5),
    "warm-up": lambda: gc.LocalSteps(3, warmup_steps=100),
    "auto": lambda: gc.LocalSteps("auto", at_most=4),
}


def rounds(steps, outer=None):
    return lambda: gc.LocalSteps(steps, outer and outer())


def saved(name, method, settings):
    """Returns a checkpoint after four steps, which ends a round, and the values in it."""
    trained = Trained(method, settings).on(gradients(4))
    return trained.checkpoint().write(f"{FOLDER}/{name}"), trained.seen()


def resumed(path, method, settings):
    """Six steps from a checkpoint."""
    trained = Trained(method, settings)
    trained.checkpoint().read(path)
    trained.on(AFTER).optimizer.synchronize()
    return trained.seen()


def by_schedule():
    """From a save within a round, and of a synchronous job; by other schedules."""
    path, of_rounds = saved("rounds", TOP_K, rounds(3))
    after = {name: resumed(path, TOP_K, settings) for name, settings in LATER.items()}
    path, synchronous = saved("synchronous", TOP_K, lambda: None)
    settings = {"rounds": rounds(3), "warm-up": lambda: gc.LocalSteps(3, warmup_steps=6)}
    later = {name: resumed(path, TOP_K, make) for name, make in settings.items()}
    return {
        "rounds": of_rounds,
        "of rounds": after,
        "synchronous": synchronous,
        "of synchronous": later,
    }


def by_outer():
    """From a save within a round of an outer optimizer; by other outer optimizers."""
    path, of_rounds = saved("outer", "no_compression", rounds(3, nesterov))
    seen = {}
    for name, outer in OUTERS.items():
        try:
            seen[name] = resumed(path, "no_compression", rounds(3, outer))
        except ValueError as error:
            seen[name] = str(error)
    return {"saved": of_rounds, "resumed": seen, "by_keras": by_keras()}


def by_keras():
    """The error of a Keras file that was saved with another outer optimizer."""
    models = []
    for outer in (nesterov, OUTERS["adagrad"]):
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            model.compile(gc.CompressedOptimizer("sgd", local_steps=rounds(3, outer)()), "mse")
            model.optimizer.build(model.trainable_variables)
        models.append(model)
    models[0].save_weights(f"{FOLDER}/of.weights.h5")
    models[0].load_weights(f"{FOLDER}/of.weights.h5")
    try:
        models[1].load_weights(f"{FOLDER}/of.weights.h5")
    except ValueError as error:
        return str(error)
    return None


report({"by_schedule": by_schedule(), "by_outer": by_outer()})
