"""Tests Muon in rounds on two workers, against MuLoCo in NumPy."""

import contextlib
import functools
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import rounding
from tests.distributed.common import Setup, local_residuals, scalar
from tests.ranks import RANK, argument, digest, exchange_of, inner_of, report, values
from tests.reference import muloco
from tests.workers import results, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
PATHS = ["tall", "wide", "embedding", "bias"]
SHAPES = [(8, 4), (4, 6), (5, 4), (8,)]
SETTINGS = {"learning_rate": 2.0**-5, "weight_decay": 0.5, "adam_weight_decay": 0.25}
OUTER = {"learning_rate": 0.75, "momentum": 0.875}
METHODS = {
    "no_compression": "no_compression",
    "top_k": "top_k(density=0.25)",
    "qsgd": "qsgd(bits=2, bucket_size=32)",
}
CLIPS = {"clipnorm": 4.0, "global_clipnorm": 8.0}
STEPS = 3  # of a round
BATCH, LENGTH, WORDS = 8, 6, 12


def initial():
    """Returns the initial weights."""
    rng = np.random.default_rng(2)
    return [rng.normal(size=shape).astype("float32") for shape in SHAPES]


def gradients(steps, seed=3):
    """Returns each worker's share of the gradients: [step][worker][variable]."""
    rng = np.random.default_rng(seed)
    return [
        [[rng.normal(size=shape).astype("float32") for shape in SHAPES] for _ in range(2)]
        for _ in range(steps)
    ]


def of_different_sizes(steps):
    """Returns steps whose gradients differ in size, so that clipping changes the momentum."""
    return [
        [[size * gradient for gradient in gradients] for gradients in worker_gradients]
        for size, worker_gradients in zip((1.0, 0.125, 16.0, 0.25), steps, strict=True)
    ]


def with_missing(steps):
    """Returns steps without gradients of some variables, the same on both workers."""
    for step, index in ((0, 0), (1, 2), (1, 3), (4, 1)):
        for worker_gradients in steps[step]:
            worker_gradients[index] = None
    return steps


class Rounds:
    """Variables that Muon trains in rounds, on given gradients."""

    def __init__(self, compressor, outer=None, steps=STEPS, scaler=None, **settings):
        with strategy.scope():
            self.variables = [
                keras.Variable(value, aggregation="mean", name=path)
                for path, value in zip(PATHS, initial(), strict=True)
            ]
            inner = keras.optimizers.Muon(**{**SETTINGS, **settings})
            rounds = gc.LocalSteps(steps, outer and keras.optimizers.SGD(**outer, nesterov=True))
            self.optimizer = gc.CompressedOptimizer(inner, compressor, local_steps=rounds)
            self.applies = scaler(self.optimizer) if scaler else self.optimizer
            self.applies.build(self.variables)
        values = [variable.value for variable in self.variables]
        self.checkpoint = tf.train.Checkpoint(optimizer=self.optimizer, variables=values)

    @functools.cached_property
    def step(self):
        def step(grads):
            scale = self.applies.scale_loss(tf.constant(1.0))
            local = [None if gradient is None else scale * gradient for gradient in grads]
            strategy.run(lambda: self.applies.apply(local, self.variables))

        return tf.function(step, autograph=False)

    def on(self, steps):
        """Takes a step on each list of gradients; returns what is then seen."""
        for step_gradients in steps:
            self.step([None if g is None else tf.constant(g) for g in step_gradients[RANK]])
        return self.seen()

    def seen(self):
        exchange = self.optimizer.exchange
        return {
            "values": [variable.numpy() for variable in self.variables],
            "residuals": local_residuals(exchange) if exchange.residuals else None,
            "iterations": scalar(self.optimizer.iterations),
            "exchanges": exchange.exchanges,
            "skipped": scalar(exchange.skipped_steps),
        }


def rounds():
    """Two rounds, two steps and a save; then a round of another job that resumes from it."""
    steps, seen = gradients(11), {}
    for name, compressor in METHODS.items():
        first = Rounds(compressor, OUTER)
        seen[name] = [first.seen(), first.on(steps[:3]), first.on(steps[3:6])]
        first.on(steps[6:8])
        first.checkpoint.write(f"{FOLDER}/{name}_{RANK}")
        second = Rounds(compressor, OUTER)
        second.checkpoint.read(f"{FOLDER}/{name}_0").assert_existing_objects_matched()
        seen[name] += [first.seen(), second.seen(), second.on(steps[8:])]
    return seen


def clipped():
    steps = of_different_sizes(gradients(4))
    return {
        name: Rounds("no_compression", steps=4, **{name: limit}).on(steps)
        for name, limit in CLIPS.items()
    }


def missing():
    return Rounds("no_compression").on(with_missing(gradients(6)))


def scaled():
    """In the first round, worker 1 skips a step and halves its loss scale."""
    steps = gradients(3)
    steps[1][1][0][0, 0] = np.inf
    scaler = lambda inner: keras.optimizers.LossScaleOptimizer(inner, 8.0)  # noqa: E731
    trained = Rounds("no_compression", scaler=scaler)
    return {**trained.on(steps), "scale": scalar(trained.applies.dynamic_scale)}


def within():
    """Each worker's weights within a round."""
    trained = Rounds("no_compression")
    seen = trained.on(gradients(2))
    trained.optimizer.synchronize()
    return seen


def synchronous():
    """Steps with an exchange each: nothing divides the gradients of AdamW's variables."""
    trained = Rounds("no_compression", steps=1)
    with strategy.scope():
        inner = keras.optimizers.Muon(**SETTINGS)
        trained.optimizer = gc.CompressedOptimizer(inner, "adacomp")
        trained.applies = trained.optimizer
        trained.optimizer.build(trained.variables)
    seen = trained.on(gradients(3))
    divides = trained.optimizer.exchange.setup.preconditioner is not None
    return {**seen, "divides": divides, "collectives": collectives(trained)}


def collectives(trained):
    """Returns the number of collectives in a step."""
    specs = [tf.TensorSpec(shape) for shape in SHAPES]
    graph = trained.step.get_concrete_function(specs).graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    return sum(node.op.startswith("Collective") for node in nodes)


class EndError(Exception):
    """Ends a job within an epoch."""


class Watch(keras.callbacks.Callback):
    """The state at the start of `fit` and after a step, which may be the last."""

    def __init__(self, step=None, ends=False):
        super().__init__()
        self.step, self.ends, self.seen = step, ends, {}

    def state(self):
        optimizer = self.model.optimizer
        return {
            "weights": digest(self.model.trainable_variables),
            "slots": digest(inner_of(optimizer).variables),
            "residuals": digest(exchange_of(self.model).residuals),
            "iterations": scalar(inner_of(optimizer).iterations),
        }

    def on_train_begin(self, logs=None):
        self.seen["begin"] = self.state()

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.step:
            self.seen["saved"] = self.state()
            if self.ends:
                raise EndError


def network():
    return keras.Sequential(
        [
            keras.layers.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(WORDS, 8),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3, dtype="float32", name="last"),
        ]
    )


def compiled():
    setup = Setup("optimizer", "top_k(density=0.25)")

    def optimizer():
        outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        inner = keras.optimizers.Muon(0.02, exclude_layers=["last"], clipnorm=1.0)
        return setup.wrap(inner, precondition="auto", local_steps=gc.LocalSteps(3, outer))

    return setup.model(network, optimizer)


def fitted(model, folder, step, batches=8, *, ends=False):
    """Trains with a backup after `step` steps; both workers have the same rows."""
    rng = np.random.default_rng(5)
    x = rng.integers(0, WORDS, (8, BATCH // 2, LENGTH)).astype("int32")
    x = np.concatenate([x, x], 1)[:batches].reshape(-1, LENGTH)
    y = x.sum(1) % 3
    watch = Watch(step, ends)
    backup = keras.callbacks.BackupAndRestore(f"{FOLDER}/{folder}", save_freq=step)
    with contextlib.suppress(EndError):
        callbacks = [backup, watch]
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    return {**watch.seen, "end": watch.state()}


def resumed():
    """By the step of the backup, which is within a round or ends one.

    A job ends after this step, and another one resumes and repeats the epoch; or one job goes on.
    """
    seen = {}
    for step in (5, 6):
        ended = fitted(compiled(), f"ended_{step}", step, ends=True)
        resumed = fitted(compiled(), f"ended_{step}", step)
        model = compiled()
        fitted(model, f"first_{step}", step, step)
        whole = fitted(model, f"second_{step}", step)
        seen[step] = {"ended": ended, "resumed": resumed, "whole": whole}
    return seen


def in_float16():
    """`fit` with the loss scaler that Keras adds; worker 1 has a batch that overflows."""
    setup = Setup("optimizer", "top_k(density=0.25)")
    inner = lambda: keras.optimizers.Muon(0.02, global_clipnorm=1.0)  # noqa: E731
    build = lambda: keras.Sequential(  # noqa: E731
        [keras.Input((6,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
    )
    optimizer = lambda: setup.wrap(inner(), local_steps=3)  # noqa: E731
    model = setup.model(build, optimizer, policy="mixed_float16", loss="mse")
    rng = np.random.default_rng(5)
    x = rng.normal(size=(9 * BATCH, 6)).astype("float32")
    y = x.sum(1, keepdims=True) / 8
    before = model.evaluate(x, y, verbose=0)
    y_bad = y.copy()
    y_bad[BATCH + BATCH // 2] = 1e6  # worker 1's first row of the second batch
    model.fit(x, y_bad, batch_size=BATCH, shuffle=False, verbose=0)
    return {
        "values": values(model.trainable_variables),
        "losses": [before, model.evaluate(x, y, verbose=0)],
        "scale": scalar(model.optimizer.dynamic_scale),
        "skipped": scalar(exchange_of(model).skipped_steps),
    }


WORKERS = 2
BUCKET = 32  # of QSGD
LEVELS = 3  # steps between the levels of two bits


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    return results(run_workers(PROGRAM, WORKERS, [folder]))


def new_muon(**settings):
    rate, decay, adam_decay = SETTINGS.values()
    return muloco.Muon(PATHS, SHAPES, rate, decay, adam_decay, **settings)


def arrays(lists):
    return [np.asarray(values, np.float64) for values in lists]


def local_round(muons, start, steps):
    """Returns each worker's weights after local steps, and the bounds of their errors."""
    weights = []
    for rank, muon in enumerate(muons):
        muon.begin()
        local = [value.copy() for value in start]
        for step_gradients in steps:
            if step_gradients[rank] is not None:  # the worker's share of the sum
                grads = [None if g is None else WORKERS * g for g in step_gradients[rank]]
                muon.step(local, grads)
        weights.append(local)
    return weights, np.max([muon.error for muon in muons], 0)


def assert_within(actual, expected, errors):
    for value, other, error in zip(arrays(actual), expected, errors, strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=error)


def means(weights, start):
    """Returns the common weights of a round without an outer optimizer."""
    return [np.mean(pair, 0) for pair in zip(*weights, strict=True)]


@pytest.mark.parametrize("name", METHODS)
def test_rounds_are_those_of_muloco(jobs, name):
    seen = [job["rounds"][name] for job in jobs]
    muons = [new_muon(), new_muon()]
    outer = muloco.Nesterov(OUTER["learning_rate"], OUTER["momentum"])
    steps = gradients(11)
    # The third round ends early, by the save; a new job takes the fourth.
    for before, after, begin, end in ((0, 1, 0, 3), (1, 2, 3, 6), (2, 3, 6, 8), (4, 5, 8, 11)):
        start = arrays(seen[0][before]["values"])
        weights, errors = local_round(muons, start, steps[begin:end])
        # The pseudo-gradient, its residual and the outer step round a few more times.
        errors = [e + rounding(2.0, 8) for e in errors]
        sent = []
        for worker, local in zip(seen, weights, strict=True):
            shares = [(a - b) / WORKERS for a, b in zip(start, local, strict=True)]
            sent.append(sent_of(name, worker[before], worker[after], shares, errors))
        total = [np.sum(pair, 0) for pair in zip(*sent, strict=True)]
        expected = outer.step(start, total)
        # The outer step multiplies the sum of both shares' errors.
        gain = OUTER["learning_rate"] * (1 + OUTER["momentum"]) * (after + 1)
        assert_within(seen[0][after]["values"], expected, gain * np.asarray(errors))
        assert max(gain * np.asarray(errors)) < 0.05 * np.abs(expected[0] - start[0]).max()
        if after == 3:  # the new job has the chief's state on both workers
            muons[1].momentum = [value.copy() for value in muons[0].momentum]
            muons[1].velocity = [value.copy() for value in muons[0].velocity]
    for first, second in zip(*seen, strict=True):
        assert first["values"] == second["values"]
    assert [one["exchanges"] for one in seen[0]] == [0, 1, 2, 3, 3, 4]
    assert [one["iterations"] for one in seen[0]] == [0, 3, 6, 8, 8, 11]


def sent_of(name, before, after, shares, errors):
    """Returns what a worker has sent, by its residuals; checks the compressor's rule."""
    if name == "no_compression":
        return shares
    sent = []
    for index, (share, error) in enumerate(zip(shares, errors, strict=True)):
        whole = np.asarray(before["residuals"][index]) + share
        left = np.asarray(after["residuals"][index], np.float64)
        sent.append(whole - left)
        if name == "top_k":
            assert np.count_nonzero(left) == left.size - left.size // 4
            kept = left != 0
            np.testing.assert_allclose(left[kept], whole[kept], rtol=0, atol=error)
            assert np.abs(whole[~kept]).min() >= np.abs(whole[kept]).max() - 2 * error
        elif PATHS[index] == "bias":
            assert not np.any(left)
        else:
            flat, rest = whole.reshape(-1), left.reshape(-1)
            for begin in range(0, flat.size, BUCKET):
                bucket = slice(begin, begin + BUCKET)
                unit = np.ptp(flat[bucket]) / LEVELS
                assert np.abs(rest[bucket]).max() <= unit + 2 * error
            assert np.any(left)
    return sent


def test_a_new_job_shares_the_residual_equally(jobs):
    for name in ("top_k", "qsgd"):
        saved, restored = ([job["rounds"][name][i] for job in jobs] for i in (3, 4))
        for index in range(len(SHAPES)):
            total = sum(np.float32(one["residuals"][index]) for one in saved)
            for one in restored:
                np.testing.assert_array_equal(np.float32(one["residuals"][index]), total / 2)
        assert restored[0]["values"] == restored[1]["values"] == saved[0]["values"]


def test_workers_share_nothing_within_a_round(jobs):
    muons = [new_muon(), new_muon()]
    weights, errors = local_round(muons, arrays(initial()), gradients(2))
    for job, local in zip(jobs, weights, strict=True):
        assert_within(job["within"]["values"], local, errors)
    assert np.abs(weights[0][0] - weights[1][0]).max() > 10 * errors[0]


@pytest.mark.parametrize("clip", CLIPS)
def test_each_worker_clips_its_own_gradients(jobs, clip):
    start, steps = arrays(initial()), of_different_sizes(gradients(4))
    muons = [new_muon(**{clip: CLIPS[clip]}) for _ in range(WORKERS)]
    weights, errors = local_round(muons, start, steps)
    unclipped, _ = local_round([new_muon(), new_muon()], start, steps)
    assert np.abs(weights[0][0] - unclipped[0][0]).max() > 4 * errors[0]
    for job in jobs:
        assert_within(job["clipped"][clip]["values"], means(weights, start), errors)


def test_variables_without_a_gradient_neither_move_nor_decay(jobs):
    muons, start = [new_muon(), new_muon()], arrays(initial())
    steps = with_missing(gradients(6))
    weights, first_errors = local_round(muons, start, steps[:3])
    weights, errors = local_round(muons, means(weights, start), steps[3:])
    for job in jobs:
        errors_of_both = np.add(first_errors, errors)
        assert_within(job["missing"]["values"], means(weights, start), errors_of_both)


def test_a_worker_skips_a_step_alone_although_weights_decay(jobs):
    steps, start = gradients(3), arrays(initial())
    steps[1][1] = None
    weights, errors = local_round([new_muon(), new_muon()], start, steps)
    for job in jobs:
        assert_within(job["scaled"]["values"], means(weights, start), errors)
    assert [job["scaled"]["scale"] for job in jobs] == [8.0, 4.0]
    assert [job["scaled"]["skipped"] for job in jobs] == [0, 1]


def test_synchronous_steps_divide_nothing_and_average_no_weights(jobs):
    for job in jobs:
        seen = job["synchronous"]
        assert not seen["divides"]
        assert seen["collectives"] == 2  # the lengths and the payloads
        assert seen["values"] == jobs[0]["synchronous"]["values"]


@pytest.mark.parametrize("step", ["5", "6"])
def test_a_resumed_job_continues_like_one_that_never_ended(jobs, step):
    # Both workers have the same rows, so that the chief's state is that of both.
    for job in jobs:
        seen = job["resumed"][step]
        assert seen["ended"]["saved"] == seen["whole"]["begin"] == seen["resumed"]["begin"]
        assert seen["resumed"]["end"] == seen["whole"]["end"]
        assert seen["resumed"]["begin"]["iterations"] == int(step)
        assert seen["resumed"]["end"]["iterations"] == int(step) + 8
        assert seen["resumed"]["end"] == jobs[0]["resumed"][step]["resumed"]["end"]


def test_fit_in_float16_skips_a_step_of_one_worker_alone(jobs):
    first, second = (job["in_float16"] for job in jobs)
    assert first["values"] == second["values"]
    assert (first["skipped"], second["skipped"]) == (0, 1)
    assert second["scale"] == first["scale"] / 2
    assert first["losses"][1] < first["losses"][0]
    assert np.isfinite(first["losses"]).all()


@pytest.mark.parametrize("local_steps", [None, 16])
def test_second_moments_in_front_of_muon_are_refused(local_steps):
    inner = keras.optimizers.Muon()
    with pytest.raises(ValueError, match=r'="local" is for.* Muon.*precondition="auto"'):
        gc.CompressedOptimizer(inner, precondition="local", local_steps=local_steps)


if __name__ == "__main__":
    FOLDER = argument(1)
    strategy = Setup("optimizer").strategy
    checks = rounds, clipped, missing, scaled, within, synchronous, resumed, in_float16
    report({check.__name__: check() for check in checks})
