"""Four ranks on two hosts exchange the sums of their hosts, and as many learners do the same."""

from functools import partial

import keras
import numpy as np
from common import compiled, told, words_model

import tf_gradcomp as gc
from tests.ranks import BATCH, RANK, SIZE, data, digest, hvd, own_rows, report, values
from tf_gradcomp.groups.own_values import reading_own

STEPS, BAD_STEP = 6, 4
EPSILON = 0.05  # of Adam, for `tests.bounds.training`
HOSTS, HOST = hvd.cross_size(), hvd.cross_rank()
METHODS = {
    "adacomp": gc.compressors.AdaComp(bin_sizes=20),
    "warmed up": gc.compressors.ScaleCom(8, beta=0.5, value_bits=4, warmup_steps=3),
}
group = gc.HorovodHosts()


def adam():
    return keras.optimizers.Adam(0.01, epsilon=EPSILON)


def numbers_model():
    """Trains without an embedding, whose squares belong to single rows."""
    layers = [keras.layers.Rescaling(0.1), keras.layers.Dense(64, activation="tanh")]
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3)])


def model_with(optimizer, method):
    dense = method == "no_compression"
    return compiled(lambda: optimizer, build=words_model if dense else numbers_model)


def by_ranks(method, rows):
    """Trains a rank on its rows of each batch, and returns its state."""
    optimizer = gc.CompressedOptimizer(
        keras.optimizers.Adam(0.01, epsilon=EPSILON), method, group=group
    )
    model = model_with(optimizer, method)
    x, y = data(STEPS)
    own_x, own_y = rows(x), rows(y)
    model.fit(own_x, own_y, batch_size=len(own_x) // STEPS, shuffle=False, verbose=0)
    exchange = optimizer.exchange

    def saved():
        return [np.asarray(exchange.saving.read(r)) for r in exchange.residuals]

    moments = exchange.state.get("second_moment", [])
    own_moments = values(moments)
    with reading_own(exchange.saving):  # as rank 0 does when it saves alone
        saved_alone = [exchange.saving.read(moment) for moment in moments]
    for moment, value in zip(moments, saved_alone, strict=True):
        exchange.saving.assign(moment, value)

    with exchange.saving.saving_on_all():
        waits = saved()
    residuals = digest(exchange.residuals)
    optimizer.collect_state()
    of_first = saved() if RANK == 0 else waits  # which saves alone
    for residual, wait in zip(exchange.residuals, waits, strict=True):
        exchange.saving.assign(residual, wait)
    with exchange.saving.saving_on_all():
        resumed = saved()
    return {
        "values": values(model.trainable_variables),
        "weights": digest(model.trainable_variables),
        "residuals": residuals,
        "waits": values(waits),
        "saved by the first": values(of_first),
        "resumed": values(resumed),
        "moments": own_moments,
        "resumed moments": values(moments),
        "sent": exchange.traffic().sent_bytes,
    }


def by_learners(method):
    """Trains as many learners as hosts by the same steps, and returns their state."""
    model = model_with(adam(), method)
    learners = gc.simulation.Learners(model, HOSTS, method)
    x, y = data(STEPS)
    for begin in range(0, len(x), BATCH):
        learners.train_on_batch(x[begin : begin + BATCH], y[begin : begin + BATCH])
    kept = zip(*learners.residuals, strict=True)
    waits = [np.sum([np.asarray(one) for one in of_all], 0) for of_all in kept]
    return {"values": values(model.trainable_variables), "waits": values(waits)}


def rows_of_host(array):
    """Both ranks of a host have its whole part of each batch, so that their sum is exact."""
    parts = array.reshape(-1, HOSTS, BATCH // HOSTS, *array.shape[1:])[:, HOST]
    return parts.reshape(-1, *array.shape[1:])


def skipped():
    """A gradient of the last rank is not finite in one step."""
    variable = keras.Variable(np.zeros(3, "float32"), name="kernel")
    optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0), "adacomp", group=group)
    for step in range(STEPS):
        bad = step == BAD_STEP and RANK == SIZE - 1
        optimizer.apply([np.full(3, np.nan if bad else RANK, "float32")], [variable])
    return {
        "weights": digest([variable]),
        "skipped": int(optimizer.exchange.skipped_steps.numpy()),
    }


def saved_amid_a_round():
    """Saves and resumes a job amid a round of accumulation, and returns its state."""
    variable = keras.Variable(np.zeros(3, "float32"), name="kernel")
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = gc.CompressedOptimizer(inner, "no_compression", group=group)
    own = np.full(3, 10.0**RANK, "float32")
    optimizer.apply([own], [variable])
    store = {}
    with optimizer.exchange.saving.saving_on_all():
        optimizer.save_own_variables(store)
    (name,) = [name for name in store if name.startswith("accumulator_")]
    optimizer.load_own_variables(store)
    optimizer.apply([own], [variable])
    return {"held": store[name].tolist(), "weights": values([variable])}


def builds_with(find_group):
    """Ranks of the last host exchange by another group than the others."""
    chosen = "horovod" if HOST == HOSTS - 1 else find_group()
    optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0), group=chosen)
    optimizer.build([keras.Variable(np.zeros(3, "float32"), name="kernel")])


if __name__ == "__main__":
    seen = {
        "told": [told(partial(builds_with, find)) for find in (lambda: group, gc.HorovodHosts)],
        "host": [HOST, hvd.local_rank()],
        "dense": by_ranks("no_compression", own_rows),
        "methods": {name: by_ranks(one, rows_of_host) for name, one in METHODS.items()},
        "skipped": skipped(),
        "saved amid a round": saved_amid_a_round(),
    }
    hvd.shutdown()
    if RANK == 0:
        seen["dense of learners"] = by_learners("no_compression")
        seen["learners"] = {name: by_learners(one) for name, one in METHODS.items()}
    report(seen)
