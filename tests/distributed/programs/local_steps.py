"""Local steps in training loops, on gradients that make all arithmetic exact: FOLDER."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from common import scalar
from local_training import RATE, WARM_UPS, Trained, gradients

import tf_gradcomp as gc
from tests.ranks import RANK, argument, digest, report

METHODS = ["no_compression", "adacomp", "scalecom", "top_k(density=0.1)"]
ROUNDED = ["cast", "power_sgd", "qsgd"]
RESUMED = ["top_k(density=0.1)", "no_compression"]


def as_data_parallel(method):
    """Rounds of one step, and no local steps at all."""
    steps = gradients(4)
    rounds = lambda: gc.LocalSteps(1, outer=keras.optimizers.SGD(1.0))  # noqa: E731
    return {
        "rounds": Trained(method, rounds).on(steps).seen(),
        "gradients": Trained(method, lambda: None).on(steps).seen(),
    }


def nesterov():
    return keras.optimizers.SGD(0.5, momentum=0.75, nesterov=True)


def adam():
    return keras.optimizers.Adam(2.0**-6, epsilon=1.0)


def averages():
    """Two whole rounds, and one that ends early."""
    trained = Trained("no_compression", lambda: 3).on(gradients(7))
    separate = trained.seen()
    trained.optimizer.synchronize()
    trained.optimizer.synchronize()  # does nothing
    return {"separate": separate, "averaged": trained.seen()}


def with_momentum():
    trained = Trained("no_compression", lambda: gc.LocalSteps(3, outer=nesterov()), adam)
    return trained.on(gradients(6)).seen()


def warm_up():
    """Synchronous steps leave a residual of gradients, and rounds one of weights."""
    return {case: _warm_up(steps) for case, steps in WARM_UPS.items()}


def _warm_up(steps):
    settings = gc.LocalSteps(3, warmup_steps=2)
    trained = Trained("top_k(density=0.1)", lambda: settings)
    seen = [trained.on(steps[:2]).seen(), trained.on(steps[2:]).seen()]
    return {"warm": seen[0], "end": seen[1]}


def momentum(folder):
    """Takes synchronous steps, which leave a velocity of gradients, and then rounds, also in a new
    job."""
    seen = {}
    for case, density in (("warm-up", None), ("resumed", 0.1)):
        method = f"top_k(density={density}, momentum=0.5)"
        if case == "warm-up":
            warm = trained = Trained(method, lambda: gc.LocalSteps(3, warmup_steps=2))
            warm.on(gradients(8)[:2])
        else:
            warm = Trained(method, lambda: None).on(gradients(8)[:2])
            trained = Trained(method, lambda: 3)
            path = f"{folder}/worker_{RANK}/synchronous"
            trained.checkpoint().read(warm.checkpoint().write(path))
        seen[case] = [trained.seen()]
        for begin in (2, 5):
            seen[case].append(trained.on(gradients(8)[begin : begin + 3]).seen())
    return seen


def decays():
    settings = gc.LocalSteps(2, residual_decay=0.5)
    trained = Trained("top_k(density=0.1)", lambda: settings)
    steps = gradients(6)
    return [trained.on(steps[i : i + 2]).seen() for i in (0, 2, 4)]


def not_finite():
    """Worker 1 has a NaN in the second step of the first round, and overflows in the second one."""
    steps = gradients(6)
    steps[1][1][0][0, 0] = np.nan
    steps[4][1][1][0] = 1e38
    trained = Trained("no_compression", lambda: 3, lambda: keras.optimizers.SGD(4.0))
    return [trained.on(steps[:3]).seen(), trained.on(steps[3:]).seen()]


def accumulates():
    trained = Trained(
        "no_compression",
        lambda: 2,
        lambda: keras.optimizers.SGD(RATE, gradient_accumulation_steps=2),
    )
    return trained.on(gradients(8)).seen()


def scaled():
    """A loss scaler inside: worker 1 overflows once, and its own scale is halved."""
    steps = gradients(4)
    steps[3][1][0][0, 0] = np.inf
    trained = Trained(
        "no_compression",
        lambda: 2,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), 8.0),
    )
    seen = trained.on(steps).seen()
    return {**seen, "scale": scalar(trained.optimizer.inner_optimizer.dynamic_scale)}


def chosen():
    """By a method that the network decides on."""
    return Trained("auto", lambda: 2).on(gradients(4)).seen()


def chief_saves_alone():
    """In the middle of a round, a checkpoint of one worker has the common weights."""
    trained = Trained("top_k(density=0.1)", lambda: 3).on(gradients(3))
    common = digest(trained.variables)
    trained.on(gradients(1, seed=4))
    saving = trained.optimizer.exchange.saving
    with saving.hooks.rolled_back():
        saved = digest(trained.variables)
    return {"common": common, "saved": saved, "own": digest(trained.variables)}


def checkpoints(folder, method):
    """Saves and restores within a round on all workers, and continues like an uninterrupted job."""
    make = lambda: gc.LocalSteps(3, outer=nesterov())  # noqa: E731
    trained = Trained(method, make).on(gradients(4))
    path = trained.checkpoint().write(f"{folder}/worker_{RANK}/{method}")
    saved = trained.seen()
    other = Trained(method, make).on(gradients(2, seed=9))  # amid a round
    other.checkpoint().read(path)
    try:
        Trained(method, lambda: None).checkpoint().read(path)
        refused = None
    except ValueError as error:
        refused = str(error)
    steps = gradients(6, seed=5)
    return {
        "refused": refused,
        "saved": saved,
        "restored": other.seen(),
        "continued": trained.on(steps).seen(),
        "resumed": other.on(steps).seen(),
    }


def fragments():
    """Two cycles of three steps, each fragment with a variable, and rounds that end early."""
    seen = []
    for outer in (lambda: None, nesterov, lambda: keras.optimizers.Adam(0.5)):
        make = lambda outer=outer: gc.LocalSteps(3, outer(), fragments=5)  # noqa: E731
        trained = Trained("no_compression", make).on(gradients(7))
        seen.append([trained.seen()])
        with trained.optimizer.exchange.hooks.rolled_back():
            seen[-1].append(trained.seen())
        trained.optimizer.synchronize()
        seen[-1].append(trained.seen())
    return seen


def decaying_fragments():
    """Each variable's residual and sent values, after each exchange of a fragment."""
    settings = gc.LocalSteps(2, residual_decay=0.5, fragments=2)
    trained = Trained("top_k(density=0.1)", lambda: settings)
    return [trained.on([step]).seen() for step in gradients(6)]


def overflowing_fragment():
    """The second variable of worker 1 overflows in the second step, after which it is exchanged."""
    steps = gradients(4)
    steps[1][1][1][0] = 1e38
    settings = gc.LocalSteps(2, fragments=2)
    trained = Trained("no_compression", lambda: settings, lambda: keras.optimizers.SGD(4.0))
    trained.on(steps).optimizer.synchronize()
    return trained.seen()


def outside_of_the_scope():
    settings = gc.LocalSteps(2, keras.optimizers.SGD())
    try:
        Trained("no_compression", lambda: settings)
    except ValueError as error:
        return str(error)
    return None


def other_number():
    """Workers with rounds of different lengths, and with other fragments."""
    seen = []
    for settings in ({"steps": 2 + RANK}, {"steps": 2, "fragments": 1 + RANK}):
        try:
            Trained("no_compression", lambda settings=settings: gc.LocalSteps(**settings))
        except gc.WorkersDisagreeError as error:
            seen.append(str(error))
    return seen


report(
    {
        "alike": {method: as_data_parallel(method) for method in METHODS + ROUNDED},
        **{
            check.__name__: check()
            for check in (
                averages,
                with_momentum,
                warm_up,
                decays,
                not_finite,
                accumulates,
                scaled,
                chosen,
                chief_saves_alone,
                fragments,
                decaying_fragments,
                overflowing_fragment,
            )
        },
        "momentum": momentum(argument(1)),
        "checkpoints": {method: checkpoints(argument(1), method) for method in RESUMED},
        "other_number": other_number(),
        "outside": outside_of_the_scope(),
    }
)
