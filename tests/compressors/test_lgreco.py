"""Tests L-GreCo in one process: steps by a plan, and the making of a plan."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import assert_close
from tests.compressors.lockstep import Lockstep, assert_equal_bits, specs_of
from tests.compressors.test_conformance import random_gradients
from tests.optimizer.cases import Replicas, gradients_at
from tests.replicas import collective, copies, mirrored, stepper
from tf_gradcomp import ops
from tf_gradcomp.advice.probe import choose
from tf_gradcomp.compressors import (
    QSGD,
    AdaComp,
    ArcTopK,
    Auto,
    Cast,
    LGreCo,
    NoCompression,
    PowerSGD,
    ScaleCom,
    StepInputs,
    TopK,
)
from tf_gradcomp.compressors.base import GRADIENT_SUM, RESIDUAL
from tf_gradcomp.compressors.lgreco import LayerPlanner
from tf_gradcomp.compressors.power_sgd import ALTERNATING_FACTOR, FACTOR
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.replica import ReplicaStep
from tf_gradcomp.exchange.setup import Candidate, Method
from tf_gradcomp.exchange.state import handles, new_job_state, new_state
from tf_gradcomp.groups.communicator import communicate
from tf_gradcomp.groups.lockstep import lockstep_communicators
from tf_gradcomp.policy import GradientSpec

SHAPES = [(40, 60), (50,), (60, 80), (3, 3, 8, 32), (20, 10)]  # two are not planned
METHODS = [
    (AdaComp(50), [50, 500, 7]),
    (QSGD(4), [2, 3, 8]),
    (TopK(0.01), [0.001, 0.01, 0.1]),
    (PowerSGD(3), [1, 2, 6]),
    (PowerSGD(3, alternate=True), [1, 2, 6]),
    (ScaleCom(40), [16, 32, 90]),
    (ArcTopK(0.1, block=16), [0.05, 0.1, 0.3]),
]
every_method = pytest.mark.parametrize(
    ("method", "values"), METHODS, ids=[method.name for method, _ in METHODS]
)


def dense_specs(shapes=((60, 80), (40, 60)), dtype="float32"):
    return [
        GradientSpec(f"layer_{i}", shape, dtype, "dense" if len(shape) > 1 else "vector")
        for i, shape in enumerate(shapes)
    ]


def install(lgreco, job_states, plan):
    """Gives replicas a plan of settings; -1 where there is none."""
    for job_state in job_states:
        job_state[lgreco.plan.name].assign([setting + 1 for setting in plan])


@every_method
def test_steps_by_five_plans_in_one_trace_are_the_methods_with_these_settings(method, values):
    lgreco, specs = LGreCo(method, values), dense_specs(SHAPES)
    defaults = method.settings(specs)
    choices = [lgreco.choices(spec) for spec in specs]
    wide = method
    if method.name == "power_sgd":  # with room for all ranks
        wide = PowerSGD(6, overrides={"layer_4": 3}, alternate=method.alternate)
    settings = tf.Variable(defaults, dtype=tf.int64)
    by_plan = Lockstep(lgreco, specs, 2, graph=True)
    right = Lockstep(wide, specs, 2, graph=True, settings=settings)
    for step in range(6):
        plan = [choice[(i + step) % 3] if choice else -1 for i, choice in enumerate(choices)]
        if step == 3:  # there is none
            plan = [-1] * len(specs)
        install(lgreco, by_plan.job_state, plan)
        settings.assign(
            [s if s >= 0 else default for s, default in zip(plan, defaults, strict=True)]
        )
        gradients = random_gradients(SHAPES, 2, seed=step)
        actual, expected = by_plan.step(gradients), right.step(gradients)
        assert actual.payload_bytes == expected.payload_bytes
        for replica in range(2):
            for name in ("reduced", "residuals"):
                arrays = (getattr(outcome, name)[replica] for outcome in (actual, expected))
                for array, by_method in zip(*arrays, strict=True):
                    assert_equal_bits(array, by_method)
    assert by_plan.traces == 1
    assert [bool(choice) for choice in choices] == [True, False, True, True, False]


class Exchanging:
    """Two replicas that exchange the gradients of some of three variables in each step."""

    SHAPES = ((40, 60), (60, 80), (30, 50))

    def __init__(self, compressor, strategy=None):
        self.strategy = strategy or collective()
        self.reduced = []
        with self.strategy.scope():
            self.variables = [
                tf.Variable(tf.zeros(shape), name=f"kernel_{i}")
                for i, shape in enumerate(self.SHAPES)
            ]
            candidate = Candidate(compressor)
            self.exchange = GradientExchange(Method(repr(compressor), [candidate], choose))
            self.exchange.build(self.variables)

    def step(self, gradients, indices):
        """Returns the reduced gradients of the variables at some places."""
        variables = [self.variables[index] for index in indices]
        self.reduced.clear()

        def reduce(given):
            totals, *_ = self.exchange.reduce(given, variables)
            tf.numpy_function(lambda *totals: self.reduced.append(totals), totals, [])

        given = [[replica_gradients[index] for index in indices] for replica_gradients in gradients]
        stepper(self.strategy, reduce)(given)
        return self.reduced[0]

    def sums(self, replica=0):
        """The sums of gradients of one of the replicas."""
        return [copies(self.strategy, v)[replica] for v in self.exchange.state[GRADIENT_SUM]]

    def plan(self, settings):
        install_in(self.exchange, settings)


def install_in(exchange, plan):
    name = exchange.hooks.get(LayerPlanner).lgreco.plan.name
    for local in copies_of(exchange.job_state[name]):
        local.assign([setting + 1 for setting in plan])


def copies_of(variable):
    """The variables that the replicas have of one."""
    return getattr(variable, "values", [variable])


def test_a_step_of_some_variables_takes_their_own_settings_of_the_plan():
    entries = [240, 120, 15]
    densities = {
        f"_{i}": count / math.prod(shape)
        for i, (count, shape) in enumerate(zip(entries, Exchanging.SHAPES, strict=True))
    }
    planned = Exchanging(LGreCo(TopK(0.05)), mirrored(2))
    right = Exchanging(TopK(overrides=densities), mirrored(2))
    planned.plan(entries)
    assert planned.exchange.hooks.plan_in_force().settings == entries
    assert right.exchange.compressor.settings(right.exchange.specs) == entries
    sums = [np.zeros(shape, "float32") for shape in Exchanging.SHAPES]
    for step, indices in enumerate([[0, 1, 2], [2], [1, 0], [2, 1]]):
        gradients = random_gradients(Exchanging.SHAPES, 2, seed=step)
        totals = planned.step(gradients, indices)
        for actual, expected in zip(totals, right.step(gradients, indices), strict=True):
            np.testing.assert_array_equal(actual, expected)
        for index in indices:
            sums[index] += 2 * gradients[0][index]
    for actual, expected in zip(planned.sums(), sums, strict=True):
        assert_close(actual, expected, terms=4, steps=4)
    assert not any(total.any() for total in planned.sums(replica=1))


def test_the_plan_that_all_replicas_take_sends_less_and_misses_no_more():
    exchanging = Exchanging(LGreCo(TopK(0.05)))
    # The first layer has a few large entries, the second some more, and the third is flat.
    shares = [0.01, 0.2, 1.0]
    totals = [np.zeros(shape) for shape in Exchanging.SHAPES]
    for step in range(2):
        gradients = random_gradients(Exchanging.SHAPES, 2, seed=step)
        for plan_copy in gradients:
            for gradient, share in zip(plan_copy, shares, strict=True):
                gradient[np.random.default_rng(0).random(gradient.shape) > share] *= 0.01
        exchanging.step(gradients, [0, 1, 2])
        totals = [
            total + gradient_0 for total, gradient_0 in zip(totals, gradients[0], strict=True)
        ]
    plan = exchanging.exchange.plan_settings()

    def missed(entries):
        return sum(
            np.linalg.norm(np.sort(np.abs(total), axis=None)[:-count])
            for total, count in zip(totals, entries, strict=True)
        )

    defaults = TopK(0.05).settings(exchanging.exchange.specs)
    assert sum(plan.settings) < sum(defaults)
    assert plan.settings[0] < defaults[0]
    assert missed(plan.settings) <= missed(defaults) * (1 + 1e-6)
    assert plan.budget_used == pytest.approx(missed(plan.settings) / missed(defaults), rel=1e-5)
    assert plan.ratio == pytest.approx(sum(defaults) / sum(plan.settings))
    for plan_copy in copies(collective(), exchanging.exchange.job_state["top_k_plan"]):
        assert plan_copy.tolist() == [setting + 1 for setting in plan.settings]
    for replica in range(2):  # and begins again
        assert not any(total.any() for total in exchanging.sums(replica))
    assert exchanging.exchange.hooks.plan_in_force() == plan


def test_only_steps_that_are_taken_enter_and_what_waits_in_the_residual_does_not():
    specs = specs_of(random_gradients([(40, 30)], 1)[0])
    lockstep = Lockstep(LGreCo(TopK(0.1)), specs, 3)
    steps = [random_gradients([(40, 30)], 3, seed=seed) for seed in range(4)]
    steps[1][2][0][3, 4] = np.nan  # of the last replica
    for gradients in steps[:3]:
        state = lockstep.step(gradients).state
    assert state[0][RESIDUAL][0].any()
    state = lockstep.step(steps[3], finite=False).state  # as another part of the step says
    assert_equal_bits(state[0][GRADIENT_SUM][0], 3 * steps[0][0][0] + 3 * steps[2][0][0])
    assert not state[1][GRADIENT_SUM][0].any()


@pytest.mark.parametrize("method", [TopK(0.1), AdaComp(50)], ids=lambda method: method.name)
def test_gradients_enter_as_they_are_compressed_divided_by_adams_second_moment(method):
    replicas = Replicas(keras.optimizers.Adam(0.01), compressor=LGreCo(method))
    assert replicas.optimizer.exchange.setup.preconditioner
    moment, total = tf.Variable(tf.zeros((40, 30))), np.zeros((40, 30), "float32")
    for step in range(3):
        gradients = gradients_at(step)
        replicas.step(gradients)
        moments = ops.SecondMoments([moment], step + 1, 0.999, 1e-7, 2)
        total += 2 * ops.precondition(moments, [tf.constant(gradients[0][0])])[0].numpy()
    (first_sum, other_sum) = copies(
        replicas.strategy, replicas.optimizer.exchange.state[GRADIENT_SUM][0]
    )
    assert_close(first_sum, total, terms=4, steps=3)
    assert not other_sum.any()


def test_a_step_of_the_warm_up_does_not_enter():
    specs = specs_of(random_gradients([(40, 30)], 1)[0])
    lgreco = LGreCo(TopK(0.1), warmup_steps=2)
    lockstep = Lockstep(lgreco, specs, 2)
    install(lgreco, lockstep.job_state, [12])
    steps = [random_gradients([(40, 30)], 2, seed=seed) for seed in range(4)]
    outcomes = [lockstep.step(gradients) for gradients in steps]
    assert outcomes[1].payload_bytes == [4 * 1200] * 2
    assert outcomes[2].payload_bytes == [56 + 8 * 12] * 2
    total = outcomes[3].state[0][GRADIENT_SUM][0]
    assert_equal_bits(total, 2 * steps[2][0][0] + 2 * steps[3][0][0])


def test_more_replicas_with_smaller_gradients_enter_as_fewer_with_larger_ones():
    """A job that resumes with another number of replicas therefore plans by sums of one scale."""
    (gradient,) = random_gradients([(40, 30)], 1)[0]
    totals = []
    for size in (1, 2, 8):
        lockstep = Lockstep(LGreCo(TopK(0.1)), specs_of([gradient]), size)
        state = lockstep.step([[gradient / size]] * size).state
        totals.append(state[0][GRADIENT_SUM][0])
    for total in totals:
        assert_equal_bits(total, gradient)


@every_method
def test_replicas_with_other_plans_notice(method, values):
    """Two layers of one shape have changed their settings: all vectors are as long as before."""
    lgreco, specs = LGreCo(method, values), dense_specs(((60, 80), (60, 80)))
    two = lgreco.choices(specs[0])[:2]

    def step(plans):
        steps = []
        for rank, plan in enumerate(plans):
            job_state = new_job_state(lgreco, specs)
            install(lgreco, [job_state], plan)
            inputs = StepInputs(
                specs,
                [tf.constant(gradient) for gradient in random_gradients([(60, 80)] * 2, 1)[0]],
                handles(new_state(lgreco, specs)),
                tf.constant(0, tf.int64),
                tf.constant(True),
                rank,
                2,
                job_state=job_state,
            )
            steps.append(ReplicaStep.new(inputs))
        reductions = [step.reduce_by(lgreco) for step in steps]
        return communicate(reductions, lockstep_communicators(2))[0]

    assert bool(step([two, two])[0].reduced.finite)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"settings|plan"):
        step([two, two[::-1]])


def test_a_plan_for_other_choices_is_not_used():
    spec = GradientSpec("layer", (60, 80), "float32", "dense")
    local, choices = LGreCo(QSGD(4)), LGreCo(QSGD(4), [2, 8])
    plan = tf.constant([0, 3 + 1, 8 + 1, 9 + 1], tf.int64)
    assert local.plan.settings([spec] * 4, plan).numpy().tolist() == [4, 3, 8, 4]
    assert choices.plan.settings([spec] * 4, plan).numpy().tolist() == [4, 4, 8, 4]


def test_a_plan_that_is_not_used_as_it_is_has_no_measures():
    planner = planner_of(LGreCo(QSGD(4), [2, 8]))
    job_state = new_job_state(planner.lgreco, planner.specs)
    planner.install(np.array([1.5, 0.75, 1, 2 + 1, 8 + 1]), job_state, [])
    assert planner.in_force(job_state) == ([2, 8], 1.5, 0.75, 1)
    install(planner.lgreco, [job_state], [2, 3])
    assert planner.in_force(job_state) == ([2, 4], 1.0, 1.0, 0)


def job(compressor):
    return Replicas("sgd", compressor=compressor, precondition=None, graph=False)


def resumed(before, compressor):
    """Returns a job with another compressor that resumes from a Keras save."""
    store, after = {}, job(compressor)
    before.optimizer.save_own_variables(store)
    after.optimizer.load_own_variables(store)
    return after


@pytest.mark.parametrize(
    ("alternate", "name", "rows"),
    [(False, FACTOR, 30), (True, ALTERNATING_FACTOR, 40 + 30)],
    ids=["", "alternating"],
)
def test_a_resumed_job_has_plan_and_sums_and_as_many_columns_of_factors_as_it_can_use(
    alternate, name, rows
):
    def lgreco(rank):
        return LGreCo(PowerSGD(rank, alternate=alternate))

    before = job(lgreco(3))
    install_in(before.optimizer.exchange, [5, -1])
    for step in range(2):
        before.step(gradients_at(step))
    factor = copies(before.strategy, before.optimizer.exchange.state[name][0])[0]
    assert factor.any(0).tolist() == [True] * 5 + [False]
    for rank, in_force, columns in ((3, 5, 6), (2, 2, 4), (6, 5, 8)):  # rank 2 goes up to 4
        after = resumed(before, lgreco(rank))
        exchange = after.optimizer.exchange
        assert exchange.hooks.plan_in_force().settings[0] == in_force
        for copy in copies(after.strategy, exchange.state[name][0]):
            width = min(6, columns)
            assert copy.shape == (rows, columns)
            np.testing.assert_array_equal(copy[:, :width], factor[:, :width])
            assert not copy[:, width:].any()
        total = copies(after.strategy, exchange.state[GRADIENT_SUM][0])[0]
        expected = 2 * gradients_at(0)[0][0] + 2 * gradients_at(1)[0][0]
        np.testing.assert_array_equal(total, expected)
    after.step(gradients_at(2))
    after.assert_replicas_equal()
    plain = job(lgreco(3).method)
    plain.step(gradients_at(0))
    exchange = resumed(plain, lgreco(3)).optimizer.exchange
    assert exchange.hooks.plan_in_force().settings == PowerSGD(3).settings(exchange.specs)


@pytest.mark.parametrize("method", [QSGD(5), TopK(0.01)], ids=lambda method: method.name)
def test_a_plan_for_another_method_is_not_used(method):
    """Ranks could be taken for bits, or for numbers of entries."""
    before = job(LGreCo(PowerSGD(3)))
    install_in(before.optimizer.exchange, [4, -1])
    exchange = resumed(before, LGreCo(method)).optimizer.exchange
    assert 4 in exchange.hooks.get(LayerPlanner).lgreco.choices(exchange.specs[0])
    assert exchange.hooks.plan_in_force().settings == method.settings(exchange.specs)


def planner_of(compressor, shapes=((60, 80), (40, 60)), dtype="float32"):
    return compressor.hook(dense_specs(shapes, dtype), replicas=2)


def uneven_sums():
    """The first layer has few large entries, and the other layer has only large entries."""
    sums = random_gradients([(60, 80), (40, 60)], 1)[0]
    sums[0][np.random.default_rng(0).random((60, 80)) > 0.02] *= 0.001
    return sums


@pytest.mark.parametrize(
    ("values", "reason"), [(1.0, "the budget of errors is 0"), (math.nan, "not finite")]
)
def test_without_a_budget_the_methods_own_settings_stay_with_a_notice(values, reason, caplog):
    planner = planner_of(LGreCo(QSGD(4)))
    sums = [np.full(shape, values, np.float32) for shape in ((60, 80), (40, 60))]
    tf.get_logger().propagate = True
    try:
        proposed = planner.propose(sums, {})
    finally:
        tf.get_logger().propagate = False
    assert not proposed.any()
    assert reason in caplog.text
    job_state = new_job_state(planner.lgreco, planner.specs)
    install(planner.lgreco, [job_state], [7, 8])
    planner.install(proposed, job_state, [])
    assert planner.in_force(job_state) == ([4, 4], 1.0, 1.0, 0)


def test_without_gradients_since_the_last_plan_it_stays(caplog):
    """As after two consecutive plans, where the second plan has no gradients."""
    planner = planner_of(LGreCo(TopK(0.05)))
    job_state, sums = new_job_state(planner.lgreco, planner.specs), uneven_sums()
    planner.install(planner.propose(sums, job_state), job_state, [])
    before, kept = planner.in_force(job_state), [v.numpy() for v in job_state.values()]
    assert before.ratio > 1
    tf.get_logger().propagate = True
    try:
        again = planner.propose([np.zeros_like(total) for total in sums], job_state)
    finally:
        tf.get_logger().propagate = False
    assert "keeps its plan: no gradients were exchanged" in caplog.text
    planner.install(again, job_state, [])
    assert planner.in_force(job_state) == before
    for variable, value in zip(job_state.values(), kept, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_variables_that_are_never_exchanged_are_outside_the_plan():
    """A large table, for example, has no error and no bytes, because its gradients are sent as
    slices."""
    lgreco, table = LGreCo(TopK(0.01)), np.zeros((5000, 60), "float32")
    first, last = uneven_sums()
    proposed = planner_of(lgreco).propose([first, last], {})
    beside = planner_of(lgreco, ((60, 80), (5000, 60), (40, 60))).propose([first, table, last], {})
    assert proposed.any()
    np.testing.assert_array_equal(np.delete(beside, 4), proposed)
    assert beside[4] == 0


def test_sums_that_float16_cannot_hold_are_planned():
    lgreco = LGreCo(AdaComp(50))
    sums = [1e5 * total for total in uneven_sums()]
    expected = planner_of(lgreco).propose(sums, {})
    assert expected.any()
    proposed = planner_of(lgreco, dtype="float16").propose(sums, {})
    np.testing.assert_array_equal(proposed, expected)


def test_choices_are_worked_out_once_for_all_steps(monkeypatch):
    asked, choices = [], TopK.choices
    monkeypatch.setattr(TopK, "choices", lambda *args: asked.append(1) or choices(*args))
    lgreco, specs = LGreCo(TopK(0.1)), specs_of(random_gradients([(40, 30)], 1)[0])
    lockstep = Lockstep(lgreco, specs, 3)
    lockstep.step(random_gradients([(40, 30)], 3))
    asked.clear()
    lockstep.step(random_gradients([(40, 30)], 3))
    assert not asked


def test_lgreco_may_be_a_warm_up_or_a_candidate_but_only_one_stage_is_planned():
    warm_up = NoCompression(warmup_steps=3, warmup=LGreCo(QSGD(4)))
    exchange = Exchanging(warm_up).exchange
    assert exchange.hooks.get(LayerPlanner).lgreco is warm_up.warmup
    assert Exchanging(Cast()).exchange.hooks.get(LayerPlanner) is None
    with pytest.raises(ValueError, match="only one of its stages can be LGreCo"):
        Exchanging(LGreCo(QSGD(4), warmup_steps=3, warmup=LGreCo(QSGD(8))))
    choice = Auto([LGreCo(QSGD(4)), LGreCo(TopK(0.01)), LGreCo(PowerSGD(2))])
    exchange = Exchanging(choice.candidates[0]).exchange
    assert exchange.hooks.get(LayerPlanner).lgreco.method.name == "qsgd"


def test_one_replica_has_nothing_to_plan():
    single = Exchanging(LGreCo(QSGD(4)), mirrored(1)).exchange
    assert single.plan_settings() is None
    assert single.hooks.plan_in_force() is None
    assert Exchanging(Cast()).exchange.plan_settings() is None
