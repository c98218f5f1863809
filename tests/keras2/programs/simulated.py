"""The weights after training as a job, and on the first worker also by as many learners in it.

simulated.py OPTIMIZER:METHOD,...
"""

from common import ALONE, compiled, fit, new_strategy
from optimizers import OPTIMIZERS

import tf_gradcomp as gc
from tests.ranks import BATCH, RANK, SIZE, argument, compressed, data, report, values

STEPS = 6


def real(name, method, strategy):
    model = compiled(lambda: compressed(OPTIMIZERS[name](), method), strategy)
    fit(model, *data(STEPS))
    return values(model.trainable_variables)


def simulated(name, method):
    model = compiled(OPTIMIZERS[name], ALONE)
    x, y = (part.reshape(STEPS, BATCH, *part.shape[1:]) for part in data(STEPS))
    gc.simulation.Learners(model, SIZE, method).fit(list(zip(x, y, strict=True)))
    return values(model.trainable_variables)


if __name__ == "__main__":
    strategy = new_strategy()
    cases = [case.split(":") for case in argument(1).split(",")]
    seen = {"real": {":".join(case): real(*case, strategy) for case in cases}}
    if RANK == 0:
        seen["simulated"] = {":".join(case): simulated(*case) for case in cases}
    report(seen)
