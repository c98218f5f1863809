"""Adam's second moments switched on and off at a resume, from and to each method."""

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.bounds import adam_bound, assert_close
from tests.replicas import mirrored, names_without_stages, stepper

SHAPE = (60, 100)
STEPS, MORE = 50, 5
BETA_2 = np.float32(0.999)
METHODS = [
    name for name in names_without_stages() if name != "lgreco"
]  # one of the others, planned
# One that keeps no residual, one that sends few entries, and one that sends all of them roughly.
KINDS = {"no_compression", "top_k", "power_sgd"}


def gradients_at(step):
    generator = np.random.default_rng(step)
    return [[generator.normal(size=SHAPE).astype("float32")] for _ in range(2)]


class Job:
    """Two replicas that train one kernel; `load` resumes from another job."""

    def __init__(self, method, precondition):
        self.strategy = mirrored()
        with self.strategy.scope():
            self.kernel = keras.Variable(np.zeros(SHAPE, "float32"), name="kernel")
            self.optimizer = gc.CompressedOptimizer(
                keras.optimizers.Adam(0.01), method, precondition=precondition
            )
            self.optimizer.build([self.kernel])
        self.step = stepper(
            self.strategy,
            lambda gradients: self.optimizer.apply(gradients, [self.kernel]),
            graph=True,
        )

    def train(self, steps):
        """Returns the largest move of a weight in a step."""
        moves = []
        for step in steps:
            before = self.kernel.numpy()
            self.step(gradients_at(step))
            moves.append(np.abs(self.kernel.numpy() - before).max())
        return max(moves)

    def saved(self):
        stores = [{}, {}]
        for optimizer, store in zip(self.optimizers(), stores, strict=True):
            optimizer.save_own_variables(store)
        return [{name: np.array(value) for name, value in store.items()} for store in stores]

    def load(self, saved):
        for optimizer, store in zip(self.optimizers(), saved, strict=True):
            optimizer.load_own_variables(store)

    def optimizers(self):
        return self.optimizer, self.optimizer.inner_optimizer


class Uninterrupted:
    """All jobs of one setting: what each had saved, and its largest move in the next steps."""

    def __init__(self, precondition):
        self.jobs = {name: Job(name, precondition) for name in METHODS}
        self.saved, self.moves = {}, {}
        for name, job in self.jobs.items():
            job.train(range(STEPS))
            self.saved[name] = job.saved()
            self.moves[name] = job.train(range(STEPS, STEPS + MORE))


@pytest.fixture(scope="module")
def uninterrupted():
    return {setting: Uninterrupted(setting) for setting in ("local", None)}


@pytest.mark.parametrize("setting", ["local", None], ids=["on", "off"])
def test_steps_are_as_long_as_in_a_job_that_never_switched(uninterrupted, setting):
    unswitched = uninterrupted[None if setting else "local"]
    throughout = uninterrupted[setting]
    too_long = {}
    for before, saved in unswitched.saved.items():
        for after, job in throughout.jobs.items():
            if not {before, after} & KINDS:
                continue
            job.load(saved)
            move = job.train(range(STEPS, STEPS + MORE))
            # The first step of a dense method sends the residual of the job before.
            allowed = 1.5 * max(throughout.moves[before], throughout.moves[after])
            if not move <= allowed:
                too_long[before, after] = (move, allowed)
    assert not too_long


def test_gradients_that_were_never_sent_are_not_divided_by_a_root_of_zero(uninterrupted):
    """A dense method keeps no residual, so the second moments of the job before are not used."""
    job = uninterrupted["local"].jobs["no_compression"]
    job.load(uninterrupted[None].saved["top_k"])
    job.train([STEPS])
    np.testing.assert_array_equal(job.optimizer.exchange.facts.moments_since.numpy(), [STEPS - 1])


def test_a_variable_that_was_sent_in_every_step_keeps_its_second_moments(uninterrupted):
    job = uninterrupted["local"].jobs["top_k"]
    saved = uninterrupted[None].saved["no_compression"]
    job.load(saved)
    slot = job.optimizer.inner_optimizer._velocities[0].numpy()
    job.train([STEPS])
    np.testing.assert_array_equal(job.optimizer.exchange.facts.moments_since.numpy(), [0])
    squares = sum(gradient**2 for (gradient,) in gradients_at(STEPS))
    moments = job.saved()[0]["second_moment_0"]
    expected = BETA_2 * slot + (1 - BETA_2) * squares
    assert_close(moments, expected, adam_bound(BETA_2))
