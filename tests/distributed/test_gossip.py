"""Gossip of four real workers, compared with NumPy.

Gradients are small integers, and other numbers are powers of two. Float32 therefore holds all
results exactly if differences are sent uncompressed; such results are compared for equality.
"""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import rounding
from tests.distributed.common import Setup, classification_loss, scalar
from tests.distributed.local_learners import RATE, SHAPES, gradients
from tests.distributed.local_training import Trained
from tests.gossiping import fresh
from tests.ranks import RANK, argument, digest, exchange_of, report, values
from tests.reference.gossip import PowerGossip, ring
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
WORKERS = 4
ZEROS = [[np.zeros(shape) for shape in SHAPES] for _ in range(WORKERS)]


def steps_of(number, seed=3):
    return gradients(number, seed, WORKERS)


def trained(settings, *args, **kwargs):
    make = settings if callable(settings) else lambda: settings
    return Trained("adacomp", make, *args, **kwargs)


def on_a_ring():
    job = trained(gc.Gossip("ring", rank=1))
    seen = [job.on([step]).seen()["values"] for step in steps_of(5)]
    traffic = job.optimizer.exchange.traffic()
    job.optimizer.synchronize()
    equal = job.seen()
    job.on(steps_of(1, seed=9))
    unequal = job.seen()["values"]
    job.optimizer.synchronize()
    return {
        "seen": seen,
        "payload bytes": traffic.payload_bytes,
        "exchanges": traffic.exchanges,
        "equal": equal,
        "unequal": unequal,
        "end": job.seen(),
    }


def whole(**kwargs):
    """Gossip of whole weights, in which a worker's mean has halves and quarters."""
    return gc.Gossip("ring", rank=None, diffusion=0.75, **kwargs)


def with_outer():
    """Takes rounds of two steps with outer momentum; worker 1 has a NaN in round 2."""
    outer = lambda: keras.optimizers.SGD(0.5, momentum=0.5)  # noqa: E731
    job = trained(lambda: whole(steps=2, outer=outer()))
    steps = steps_of(6)
    steps[3][1][0][0, 0] = np.nan
    return job.on(steps).seen()


def overflows():
    """Has the weights and the momentum of worker 1 overflow in the second of two rounds."""
    steps = steps_of(2)
    steps[1][1][1][0] = 1e38
    inner = lambda: keras.optimizers.SGD(4.0, momentum=0.5)  # noqa: E731
    return trained(whole(), inner).on(steps).seen()


def accumulates():
    inner = lambda: keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)  # noqa: E731
    return trained(whole(), inner).on(steps_of(4)).seen()


def scaled():
    """Trains inside a loss scaler: worker 1 overflows once, and halves its own scale."""
    steps = steps_of(2)
    steps[1][1][0][0, 0] = np.inf
    around = lambda inner: keras.optimizers.LossScaleOptimizer(inner, 8.0)  # noqa: E731
    job = trained(whole(), scaler=around).on(steps)
    return {**job.seen(), "scale": scalar(job.applies.dynamic_scale)}


def warms_up():
    """Takes two steps by a method with residuals, and then one step of gossip."""
    settings = whole(warmup_steps=2)
    job = Trained("top_k(density=0.1)", lambda: settings)
    warm = job.on(steps_of(3)[:2]).seen()
    return {"warm": warm, "end": job.on(steps_of(3)[2:]).seen()}


def saves():
    """Saves on all workers while their weights differ; the job continues like a restored job."""
    make = lambda: whole()  # noqa: E731
    job = trained(make()).on(steps_of(3))
    unequal = job.seen()["values"]
    path = job.checkpoint().write(f"{FOLDER}/worker_{RANK}/gossip")
    second = trained(make()).on(steps_of(2, seed=9))
    second.checkpoint().read(path)
    synchronous = Trained("top_k", lambda: None)
    synchronous.checkpoint().read(path)
    rounds = Trained("top_k", lambda: 2).on(steps_of(2))
    path = rounds.checkpoint().write(f"{FOLDER}/worker_{RANK}/rounds")
    try:
        second.checkpoint().read(path)
        refused = None
    except ValueError as error:
        refused = str(error)
    jobs = {"saved": job, "restored": second, "synchronous": synchronous}
    seen = {name: first.seen()["values"] for name, first in jobs.items()}
    return {"unequal": unequal, "refused": refused, **seen}


def disagree():
    try:
        trained(gc.Gossip("ring", rank=1 + (RANK == 1)))
    except gc.WorkersDisagreeError as error:
        return str(error)
    return None


class Seen(keras.callbacks.Callback):
    """Digests of the weights after each step, and of all variables at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.steps, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(digest(self.model.trainable_variables))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(digest(self.model.variables))


def in_fit():
    setup = Setup("optimizer", "adacomp")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 8)).astype("float32")
    y = (x @ rng.normal(size=(8, 3))).argmax(1).astype("int32")
    layers = lambda: [  # noqa: E731
        keras.layers.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(momentum=0.5),
        keras.layers.Dense(3),
    ]
    model = setup.model(
        lambda: keras.Sequential(layers()),
        lambda: setup.wrap(keras.optimizers.SGD(0.3), local_steps=gc.Gossip("ring")),
        loss=classification_loss(),
        metrics=["accuracy"],
    )
    seen = Seen()
    monitor = gc.callbacks.CompressionMonitor(table=False)
    settings = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0}
    logs = model.fit(x, y, callbacks=[monitor, seen], validation_data=(x, y), **settings)
    return {
        "steps": seen.steps,
        "epochs": seen.epochs,
        "logs": logs.history,
        "values": values(model.trainable_variables),
        "evaluated": model.evaluate(x, y, batch_size=32, verbose=0),
        "exchanges": exchange_of(model).exchanges,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gossip")


@pytest.fixture(scope="module")
def workers(folder):
    return run_workers(PROGRAM, WORKERS, [folder])


@pytest.fixture(scope="module")
def jobs(workers):
    return results(workers)


def test_the_chief_tells_of_gossip_and_of_no_method_that_it_does_not_use(workers):
    said = workers[0].stderr
    assert "4 workers gossip: graph 'ring', rank 1. Gradients are not exchanged." in said
    whole = "4 workers gossip: graph 'ring', whole weights. Gradients are"
    assert f"{whole} exchanged in the first 2 steps only." in said
    assert "NoCompression" not in said


def stepped(workers, worker_gradients, rate=RATE):
    """Returns the weights after a step of each worker on its share of the gradient."""
    return [
        [value - rate * WORKERS * share for value, share in zip(worker, shares, strict=True)]
        for worker, shares in zip(workers, worker_gradients, strict=True)
    ]


def mixed(workers):
    """Returns the weights of workers on a ring: half their own, and a quarter of each neighbour."""
    return [
        [local / 2 + (before + after) / 4 for local, before, after in zip(*near, strict=True)]
        for near in (
            (workers[i], workers[i - 1], workers[(i + 1) % WORKERS]) for i in range(WORKERS)
        )
    ]


def assert_values(jobs, expected, bound=0.0):
    for job, worker_values in zip(jobs, expected, strict=True):
        for value, other in zip(job, worker_values, strict=True):
            np.testing.assert_allclose(value, other, rtol=0, atol=bound)


def test_neighbours_on_a_ring_move_by_their_low_rank_difference(jobs):
    oracle = PowerGossip(ring(WORKERS), 1, 1 / 3, fresh(WORKERS))
    workers = ZEROS
    # Each basis is the product of the round before, and a product has at most 40 terms.
    bound = rounding(WORKERS, terms=40, steps=2**5)
    for index, worker_gradients in enumerate(steps_of(5)):
        workers = oracle.round(stepped(workers, worker_gradients))
        assert_values([job["on_a_ring"]["seen"][index] for job in jobs], workers, bound)
    total = [
        sum(s[i] for worker_gradients in steps_of(5) for s in worker_gradients) for i in range(2)
    ]
    mean = [np.mean([worker[i] for worker in workers], 0) for i in range(2)]
    assert_values([mean], [[-RATE * one for one in total]], bound=1e-12)  # in float64
    # Odd rounds send rows, and even rounds columns, to both neighbours, with the bias and the rank.
    pair_bytes = [4 * (1 + length + 8) for length in (40, 8, 40, 8, 40)]
    for job in jobs:
        assert job["on_a_ring"]["payload bytes"] == 2 * sum(pair_bytes)
        assert job["on_a_ring"]["exchanges"] == 5


def test_synchronizing_gives_all_workers_the_mean(jobs):
    seen = [job["on_a_ring"] for job in jobs]
    for before, after in (([one["seen"][-1] for one in seen], "equal"),
                          ([one["unequal"] for one in seen], "end")):  # fmt: skip
        assert before[0] != before[1]
        for one in seen:
            assert one[after]["values"] == seen[0][after]["values"]
            assert one[after]["drift"] == seen[0][after]["drift"] > 0
        for i, value in enumerate(seen[0][after]["values"]):
            local = np.float64([values[i] for values in before])
            bound = rounding(np.abs(local).max(), terms=WORKERS)
            np.testing.assert_allclose(value, local.mean(0), rtol=0, atol=bound)


def test_an_outer_optimizer_gets_the_change_by_local_steps_and_neighbours(jobs):
    steps = steps_of(6)
    steps[3][1] = [np.zeros(shape) for shape in SHAPES]  # the step that worker 1 skips
    slow = fast = ZEROS
    velocity = ZEROS
    for index, step_gradients in enumerate(steps):
        fast = stepped(fast, step_gradients)
        if index % 2:
            near = mixed(fast)
            velocity = [
                [0.5 * v + 0.5 * (after - before) for v, before, after in zip(*each, strict=True)]
                for each in zip(velocity, slow, near, strict=True)
            ]
            slow = [
                [value + v for value, v in zip(*each, strict=True)]
                for each in zip(slow, velocity, strict=True)
            ]
            fast = slow
    assert_values([job["with_outer"]["values"] for job in jobs], slow)
    assert [job["with_outer"]["skipped"] for job in jobs] == [0, 1, 0, 0]


def test_a_worker_whose_weights_overflow_restarts_its_round_and_continues(jobs):
    first, second = steps_of(2)
    rate, momentum = 4.0 * WORKERS, 0.5
    velocity = [[-rate * share for share in shares] for shares in first]
    start = mixed(velocity)
    moved = [
        [value + momentum * v - rate * share for value, v, share in zip(*each, strict=True)]
        for each in zip(start, velocity, second, strict=True)
    ]
    moved[1] = start[1]
    assert_values([job["overflows"]["values"] for job in jobs], mixed(moved))
    assert [job["overflows"]["skipped"] for job in jobs] == [0, 1, 0, 0]


def test_rounds_count_updates_where_gradients_are_accumulated(jobs):
    steps, workers = steps_of(4), ZEROS
    for step in range(2):
        pairs = zip(*steps[2 * step : 2 * step + 2], strict=True)
        means = [[(a + b) / 2 for a, b in zip(*shares, strict=True)] for shares in pairs]
        workers = mixed(stepped(workers, means))
    assert_values([job["accumulates"]["values"] for job in jobs], workers)
    assert {job["accumulates"]["exchanges"] for job in jobs} == {2}


def test_each_worker_has_its_own_loss_scale(jobs):
    steps, workers = steps_of(2), ZEROS
    steps[1][1] = [np.zeros(shape) for shape in SHAPES]
    for step_gradients in steps:
        workers = mixed(stepped(workers, step_gradients))
    assert_values([job["scaled"]["values"] for job in jobs], workers)
    assert [job["scaled"]["scale"] for job in jobs] == [8.0, 4.0, 8.0, 8.0]


def test_nothing_is_lost_after_a_warm_up(jobs):
    for job in jobs:
        assert job["warms_up"]["warm"]["values"] == jobs[0]["warms_up"]["warm"]["values"]
        assert np.any(job["warms_up"]["warm"]["residuals"][0])
        assert not np.any(job["warms_up"]["end"]["residuals"][0])
    for i in range(2):
        total = sum(shares[i] for worker_gradients in steps_of(3) for shares in worker_gradients)
        mean = np.mean([job["warms_up"]["end"]["values"][i] for job in jobs], 0)
        np.testing.assert_array_equal(mean, -RATE * total)


def test_a_checkpoint_has_the_mean_for_any_number_of_workers(jobs, folder):
    for i, value in enumerate(jobs[0]["saves"]["saved"]):
        local = np.float64([job["saves"]["unequal"][i] for job in jobs])
        np.testing.assert_array_equal(value, local.mean(0))
        assert np.any(local[0] != local[1])
    for job in jobs:
        for name in ("saved", "restored", "synchronous"):
            assert job["saves"][name] == jobs[0]["saves"]["saved"]
        assert "residual of a job with local steps" in job["saves"]["refused"]
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in SHAPES]
    single = gc.CompressedOptimizer(keras.optimizers.SGD(RATE), local_steps=gc.Gossip())
    single.build(variables)
    values = [variable.value for variable in variables]
    tf.train.Checkpoint(optimizer=single, variables=values).read(f"{folder}/worker_0/gossip")
    shares = steps_of(1)[0][0]
    single.apply([tf.constant(share) for share in shares], variables)
    for variable, saved, share in zip(variables, jobs[0]["saves"]["saved"], shares, strict=True):
        np.testing.assert_array_equal(variable, np.float32(saved) - RATE * share)


def test_workers_with_different_ranks_get_errors(jobs):
    for job in jobs:
        assert "local_steps' rank" in job["disagree"]


def test_fit_evaluates_the_mean(jobs):
    seen = [job["in_fit"] for job in jobs]
    for one in seen:
        assert one["epochs"] == seen[0]["epochs"]  # also of the statistics of BatchNormalization
        assert one["values"] == seen[0]["values"]
        assert one["evaluated"] == seen[0]["evaluated"]
        assert one["logs"]["val_loss"] == seen[0]["logs"]["val_loss"]
        assert one["logs"]["loss"] == seen[0]["logs"]["loss"]
        assert one["exchanges"] == 3 * (5 + 1)  # the mean at the end of an epoch is an exchange
        assert one["logs"]["rounds"] == [5, 10, 15]
        assert 0 < one["logs"]["drift"][-1] < 1
        assert one["logs"]["fewer_bytes"][-1] > 1
    assert all(
        len(set(steps)) == WORKERS for steps in zip(*(s["steps"] for s in seen), strict=True)
    )
    assert seen[0]["logs"]["val_loss"][-1] < seen[0]["logs"]["val_loss"][0]


if __name__ == "__main__":
    FOLDER = argument(1)
    checks = (
        *(on_a_ring, with_outer, overflows, accumulates, scaled, warms_up, saves),
        *(disagree, in_fit),
    )
    report({check.__name__: check() for check in checks})
