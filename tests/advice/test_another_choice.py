"""A job that resumes with another choice loses neither residuals nor Adam's moments."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import adam_bound, assert_close
from tests.replicas import collective, copies, stepper
from tf_gradcomp.advice import probe as probing
from tf_gradcomp.advice.cost_model import Prediction, ProbeResult

METHODS = ["no_compression", "adacomp(bin_sizes=20)"]
DENSE, SPARSE = METHODS
ELEMENTS = 60


@pytest.fixture
def choose(monkeypatch):
    """Makes a method the fastest for optimizers that are built later."""

    def choose(method):
        def probe(strategy, specs, candidates, effort):
            seconds = [float(METHODS[i] != method) for i, _ in enumerate(candidates)]
            return ProbeResult([Prediction("", 0, s, 0, 0, 0, 0, 0) for s in seconds])

        monkeypatch.setattr(probing, "probe", probe)

    return choose


class Job:
    """Two replicas that train a vector."""

    def __init__(self, inner, compressor=None):
        with collective().scope():
            self.variable = keras.Variable(np.zeros(ELEMENTS, "float32"), name="kernel")
            self.optimizer = gc.CompressedOptimizer(
                inner(), compressor or gc.compressors.Auto(METHODS)
            )
            self.optimizer.build([self.variable])
        apply = stepper(
            collective(), lambda grads: self.optimizer.apply(grads, [self.variable]), graph=True
        )
        self.step = lambda gradients: apply([[gradient] for gradient in gradients])
        self.checkpoint = tf.train.Checkpoint(variable=self.variable, optimizer=self.optimizer)

    def resumed(self, folder, inner):
        """Returns a job that resumes from this job's save."""
        path = self.checkpoint.write(str(folder / "checkpoint"))
        other = Job(inner)
        other.checkpoint.read(path).assert_consumed()
        return other

    def residual(self):
        return np.sum(copies(collective(), self.optimizer.exchange.residuals[0]), 0)

    def own_moments(self):
        return copies(collective(), self.optimizer.exchange.state["second_moment"][0])

    def inner_moment(self):
        return self.optimizer.inner_optimizer._velocities[0].numpy()

    def value(self):
        return self.variable.numpy()


def gradients(seed):
    return list(np.random.default_rng(seed).normal(size=(2, ELEMENTS)).astype("float32"))


ZEROS = [np.zeros(ELEMENTS, "float32")] * 2


def sgd():
    return keras.optimizers.SGD(1.0)


def adam():
    return keras.optimizers.Adam(0.1)


def test_the_dense_choice_sends_what_the_sparse_one_left(choose, tmp_path):
    choose(SPARSE)
    job = Job(sgd)
    step_gradients = gradients(0)
    job.step(step_gradients)
    assert np.abs(job.residual()).max() > 0.1
    choose(DENSE)
    job = job.resumed(tmp_path, sgd)
    job.step(ZEROS)
    assert_close(
        job.value(),
        -np.sum(step_gradients, 0),
        terms=6,
        scale=np.sum(np.abs(step_gradients), 0).max(),
    )
    assert not job.residual().any()
    assert not job.optimizer.exchange.facts.has_residual.numpy().any()


def test_a_step_that_is_skipped_leaves_it_for_the_next(choose, tmp_path):
    choose(SPARSE)
    job = Job(sgd)
    step_gradients = gradients(0)
    job.step(step_gradients)
    choose(DENSE)
    job = job.resumed(tmp_path, sgd)
    before = job.value()
    job.step([ZEROS[0], np.full(ELEMENTS, np.nan, "float32")])
    np.testing.assert_array_equal(job.value(), before)
    job.step(ZEROS)
    assert_close(
        job.value(),
        -np.sum(step_gradients, 0),
        terms=6,
        scale=np.sum(np.abs(step_gradients), 0).max(),
    )


def test_adam_gets_its_second_moment_back(choose, tmp_path):
    choose(SPARSE)
    job = Job(adam)
    for seed in range(3):
        job.step(gradients(seed))
    moment = np.sum(job.own_moments(), 0)
    left = job.residual() * (np.sqrt(moment) + 1e-7) / np.sqrt(1 - 0.999**3)
    choose(DENSE)
    job = job.resumed(tmp_path, adam)
    job.step(ZEROS)
    expected = moment + 1e-3 * (left**2 - moment)
    assert_close(job.inner_moment(), expected, adam_bound(), steps=3)


def test_replicas_take_their_shares_of_what_the_dense_choice_had(choose, tmp_path):
    choose(DENSE)
    job = Job(adam)
    for seed in range(3):
        job.step(gradients(seed))
    moment = job.inner_moment()
    choose(SPARSE)
    job = job.resumed(tmp_path, adam)
    job.step(ZEROS)
    for local in job.own_moments():
        assert_close(local, 0.999 * moment / 2, terms=4)


def test_the_same_choice_continues(choose, tmp_path):
    choose(SPARSE)
    job = Job(adam)
    job.step(gradients(0))
    before, moments = job.residual(), np.sum(job.own_moments(), 0)
    job = job.resumed(tmp_path, adam)
    np.testing.assert_array_equal(job.residual(), before)
    job.step(ZEROS)
    assert_close(np.sum(job.own_moments(), 0), 0.999 * moments, terms=4)


def test_a_method_that_is_named_takes_its_share_of_a_dense_job(tmp_path):
    dense = Job(adam, DENSE)
    dense.step(gradients(0))
    moment = dense.inner_moment()
    sparse = Job(adam, SPARSE)
    path = dense.checkpoint.write(str(tmp_path / "checkpoint"))
    sparse.checkpoint.read(path).expect_partial()
    sparse.step(ZEROS)
    for local in sparse.own_moments():
        assert_close(local, 0.999 * moment / 2, terms=4)
