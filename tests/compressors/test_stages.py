"""A method may keep state for the whole job, and be made of methods that take turns."""

import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import assert_close, rounding
from tests.compressors.lockstep import in_lockstep
from tests.replicas import collective, copies, mirrored, stepper
from tf_gradcomp.advice.probe import choose
from tf_gradcomp.compressors import (
    AdaComp,
    Cast,
    JobStateSpec,
    NoCompression,
    StepInputs,
    get,
)
from tf_gradcomp.compressors.stages import Staged, run_stage
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.setup import Candidate, Method
from tf_gradcomp.exchange.state import handles, new_job_state, new_state
from tf_gradcomp.groups.current import current_group
from tf_gradcomp.policy import GradientSpec

FINE = np.float32(1 + 2**-20)  # which float16 cannot tell from 1


class Counting(NoCompression, registered=False):
    """Counts, for the job, the steps in which it had its turn."""

    name = "counting"

    def job_state(self, specs):
        return {"turns": JobStateSpec((), "int64"), "seen": JobStateSpec((2,), shared=False)}

    def reduce(self, inputs):
        reduced = yield from super().reduce(inputs)
        inputs.job_state["turns"].assign_add(tf.cast(reduced.finite, tf.int64))
        inputs.job_state["seen"].assign_add([1.0, tf.cast(inputs.rank, tf.float32)])
        return reduced


class DenseThenCast(Staged, registered=False):
    """Two dense steps that count, whenever they are; then sums in 16 bits, without an end."""

    name = "dense_then_cast"

    def __init__(self, then=None):
        super().__init__()
        self.then = then
        self.stages = (Counting(), then or Cast())

    def stage(self, step, job_state):
        return tf.cast(job_state["turns"].read_value() >= 2, tf.int32)


class Exchanging:
    """Two replicas that exchange one vector by a method with stages."""

    def __init__(self, compressor=None, strategy=None):
        self.strategy = strategy or collective()
        self.reduced, self._delayed = [], []
        with self.strategy.scope():
            variable = tf.Variable(tf.zeros(3), name="kernel")
            candidate = Candidate(compressor or DenseThenCast())
            self.exchange = GradientExchange(Method("stages", [candidate], choose))
            self.exchange.build([variable])

        def reduce(gradients):
            delayed = self.exchange.setup.variables.delayed
            (total,), *_ = self.exchange.reduce(gradients, [variable])
            tf.numpy_function(self._note, [total, self.exchange.replica().local(delayed)[0]], [])

        self._step = stepper(self.strategy, reduce, graph=True)

    def _note(self, total, delayed):
        self.reduced.append(total)
        self._delayed.append(bool(delayed))

    @property
    def delayed(self):
        """Tells whether each step was delayed, on the first replica."""
        return self._delayed[::2]

    def step_of(self, gradient):
        """A step in which both replicas have this gradient."""
        self._step([[gradient]] * 2)

    def steps(self, values):
        """Returns the sum of two equal gradients, for each value."""
        self.reduced.clear()
        for value in values:
            self.step_of(np.full(3, value, "float32"))
        totals = self.reduced[::2]
        assert len(self.reduced) == 2 * len(values)
        for other, total in zip(self.reduced[1::2], totals, strict=True):
            np.testing.assert_array_equal(other, total)
        return [float(total[0]) for total in totals]


def test_stages_change_at_the_same_step_by_the_state_of_the_job():
    exchanging = Exchanging()
    assert exchanging.steps([FINE] * 4) == [2 * FINE, 2 * FINE, 2, 2]
    assert exchanging.exchange.job_state["turns"].numpy() == 2


def test_a_step_that_is_skipped_does_not_change_the_stage():
    exchanging = Exchanging()
    totals = exchanging.steps([FINE, np.nan, FINE, FINE])
    assert [totals[i] for i in (0, 2, 3)] == [2 * FINE, 2 * FINE, 2]


def test_the_state_of_the_job_is_in_checkpoints(tmp_path):
    before, after = Exchanging(), Exchanging()
    before.steps([FINE] * 1)
    path = tf.train.Checkpoint(exchange=before.exchange).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(exchange=after.exchange).restore(path).assert_consumed()
    assert after.steps([FINE] * 2) == [2 * FINE, 2]
    # Separate state of replicas is divided equally.
    tf.train.Checkpoint(exchange=after.exchange).restore(path)
    for copy in copies(collective(), after.exchange.job_state["seen"]):
        np.testing.assert_array_equal(copy, [1.0, 0.5])


def test_state_of_a_later_phase_is_kept_from_the_start():
    exchange = Exchanging(DenseThenCast(AdaComp())).exchange
    assert [residual.shape for residual in exchange.residuals] == [(3,)]


def test_learners_in_lockstep_take_the_same_turns():
    compressor = DenseThenCast()
    specs = [GradientSpec("kernel", (3,), "float32", "vector")]
    state = [new_state(compressor, specs) for _ in range(3)]
    jobs = [new_job_state(compressor, specs) for _ in range(3)]
    sums = []
    for step in range(3):
        inputs = [
            StepInputs(
                specs,
                [tf.fill([3], FINE)],
                handles(replica_state),
                tf.constant(step, tf.int64),
                tf.constant(True),
                rank,
                3,
                job_state=job,
            )
            for rank, (replica_state, job) in enumerate(zip(state, jobs, strict=True))
        ]
        ends = run_stage(
            compressor,
            inputs[0],
            lambda method, inputs=inputs: in_lockstep(method, inputs),
        )
        sums.append(float(ends[0].result.gradients[0][0]))
    np.testing.assert_allclose(sums, [3 * FINE, 3 * FINE, 3], rtol=rounding(1, terms=3))


def test_only_the_steps_of_a_sparse_turn_are_delayed():
    exchanging = Exchanging(get("top_k(density=0.3, warmup_steps=2)"))
    exchanging.steps([1, 2, 3])
    assert exchanging.delayed == [False, False, True]


def test_strategies_without_collectives_refuse_turns():
    with pytest.raises(
        ValueError, match=r"a method that alternates with another, needs collectives in a branch"
    ):
        Exchanging(strategy=mirrored(2))


class InTurn(Staged, registered=False):
    """Uses each of some methods for two steps, and then stays with the last method."""

    name = "in_turn"

    def __init__(self, *methods):
        super().__init__()
        self.methods = methods
        self.stages = tuple(map(get, methods))

    def stage(self, step, job_state):
        return tf.cast(tf.minimum(step // 2, len(self.stages) - 1), tf.int32)


@pytest.mark.parametrize(
    "compressor",
    [
        InTurn("top_k(density=0.3)", "no_compression"),
        InTurn("cast", "top_k(density=0.3)", "no_compression"),
        get("no_compression(warmup_steps=2, warmup='adacomp(bin_sizes=2)')"),
    ],
    ids=["sparse, dense", "cast, sparse, dense", "warm-up"],
)
def test_a_phase_without_a_residual_sends_what_is_left_of_the_one_before(compressor):
    exchanging = Exchanging(compressor)
    given, received, largest = np.zeros(3), np.zeros(3), 0.0
    for step in range(7):
        gradient = np.random.default_rng(step).normal(size=3).astype("float32")
        exchanging.step_of(gradient)
        given += 2 * gradient
        largest = max(largest, np.abs(gradient).max())
        received += exchanging.reduced[-1]
    # At most two steps are cast.
    assert_close(received, given, steps=2, scale=2 * largest, dtype="float16")
    assert not any(np.any(copy) for copy in copies(collective(), exchanging.exchange.residuals[0]))


@pytest.mark.parametrize(
    "compressor",
    [
        "scalecom(rates=4, beta=0.5, warmup_steps=2, warmup='adacomp')",
        InTurn("scalecom(beta=0.5)", "top_k"),
    ],
    ids=["warm-up", "stages"],
)
def test_stages_with_residuals_of_different_scales_are_refused(compressor):
    with pytest.raises(ValueError, match="keeps a residual of another scale"):
        Exchanging(get(compressor) if isinstance(compressor, str) else compressor)


def test_a_phase_that_is_not_there_is_an_error():
    class Beyond(InTurn, registered=False):
        name = "beyond"

        def stage(self, step, job_state):
            return tf.constant(2)

    with pytest.raises(tf.errors.InvalidArgumentError):
        Exchanging(Beyond("cast", "no_compression")).steps([FINE])


def test_a_choice_can_be_made_among_methods_with_stages_and_state():
    with collective().scope():
        specs = [GradientSpec("kernel", (300,), "float32", "vector")]
        candidates = [Candidate(DenseThenCast()), Candidate(Counting())]
        assert choose(current_group(), candidates, specs) in candidates
