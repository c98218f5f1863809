"""Jobs with local steps that resume from a save within a round, or of another schedule: FOLDER."""

import functools

import keras
import tensorflow as tf
from local_training import RATE, Trained, gradients, strategy

import tf_gradcomp as gc
from tests.ranks import RANK, argument, exchange_of, report, values

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
    path, saved_rounds = saved("rounds", TOP_K, rounds(3))
    after = {name: resumed(path, TOP_K, settings) for name, settings in LATER.items()}
    path, synchronous = saved("synchronous", TOP_K, lambda: None)
    settings = {"rounds": rounds(3), "warm-up": lambda: gc.LocalSteps(3, warmup_steps=6)}
    later = {name: resumed(path, TOP_K, make) for name, make in settings.items()}
    return {
        "rounds": saved_rounds,
        "of rounds": after,
        "synchronous": synchronous,
        "of synchronous": later,
    }


def by_outer():
    """From a save within a round of an outer optimizer; by other outer optimizers."""
    path, saved_rounds = saved("outer", "no_compression", rounds(3, nesterov))
    seen = {}
    for name, outer in OUTERS.items():
        try:
            seen[name] = resumed(path, "no_compression", rounds(3, outer))
        except ValueError as error:
            seen[name] = str(error)
    return {"saved": saved_rounds, "resumed": seen, "by_keras": by_keras()}


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


def dense_model(local_steps):
    """Returns a model whose weights have the shapes of the gradients, and a function of steps."""
    with strategy.scope():
        layer = keras.layers.Dense(8, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((40,)), layer])
        inner = keras.optimizers.SGD(RATE)
        created = gc.CompressedOptimizer(inner, "no_compression", local_steps=local_steps())
        model.compile(created, "mse")
        created.build(model.trainable_variables)

    @tf.function
    def step(grads):
        strategy.run(lambda: created.apply(grads, model.trainable_variables))

    def take(steps):
        for step_gradients in steps:
            step([tf.constant(gradient) for gradient in step_gradients[RANK]])

    return model, take


def synchronous_between():
    """Jobs with, without and with local steps, each from the Keras file of the job before."""
    later = lambda: gc.LocalSteps([(0, 1), (6, 3)], nesterov(), warmup_steps=6)  # noqa: E731
    parts = [(rounds(3, nesterov), gradients(4)), (lambda: None, AFTER[:2]), (later, AFTER[2:])]
    path, seen = f"{FOLDER}/between_{RANK}.weights.h5", []
    for index, (settings, steps) in enumerate(parts):
        model, take = dense_model(settings)
        if index:
            model.load_weights(path)
        take(steps)
        model.save_weights(path)
        exchanges = exchange_of(model).exchanges
        seen.append({"values": values(model.trainable_variables), "exchanges": exchanges})
    return seen


report(
    {
        "by_schedule": by_schedule(),
        "by_outer": by_outer(),
        "synchronous_between": synchronous_between(),
    }
)
