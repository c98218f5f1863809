"""Tests jobs that resume with other settings, another number of replicas, or some variables."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import adam_bound, assert_close, rounding
from tests.replicas import copies, mirrored, stepper
from tf_gradcomp.tf_config import make_tf_config

SHAPES = {"a": (20, 3), "b": (20, 3)}
PATHS = list(SHAPES)
ZEROS = np.zeros((20, 3), "float32")
SUM_OF_TWO = 10  # of the magnitudes of normal numbers, all below 5 here


def gradients_at(step, replicas):
    generator = np.random.default_rng(step)
    return [
        [generator.normal(size=shape).astype("float32") for shape in SHAPES.values()]
        for _ in range(replicas)
    ]


class Job:
    """Replicas that train `a` and `b`, together or in turn.

    Tracing takes as long as some fifteen eager steps.
    """

    def __init__(self, replicas, inner, compressor="adacomp(bin_sizes=20)", graph=False, **kwargs):
        self.replicas = replicas
        self.graph = graph
        self._steps = {}
        self.strategy = mirrored(replicas)
        with self.strategy.scope():
            self.variables = [
                keras.Variable(np.zeros(shape, "float32"), name=name)
                for name, shape in SHAPES.items()
            ]
            self.optimizer = gc.CompressedOptimizer(inner(), compressor, **kwargs)
            self.optimizer.build(self.variables)

    def step(self, gradients, names=("a", "b")):
        """Takes a step of some variables; `gradients[replica]` has a gradient for each."""
        names = tuple(names)
        if names not in self._steps:
            variables = [self.variables[PATHS.index(name)] for name in names]
            apply = functools.partial(self.optimizer.apply, trainable_variables=variables)
            self._steps[names] = stepper(self.strategy, apply, graph=self.graph)
        self._steps[names](gradients)

    def train(self, steps):
        """Random steps; the largest move of a weight in each."""
        moves = []
        for step in steps:
            before = self.values()
            self.step(gradients_at(step, self.replicas))
            pairs = zip(self.values(), before, strict=True)
            moves.append(max(np.abs(after - value).max() for after, value in pairs))
        return moves

    def values(self):
        return [variable.numpy() for variable in self.variables]

    def left(self, name):
        """Returns a variable's residual, summed over the replicas."""
        residual = self.optimizer.exchange.residuals[PATHS.index(name)]
        return np.sum(copies(self.strategy, residual), 0)

    def saved(self):
        """Returns what Keras would save of the optimizer, of the inner one, and the weights."""
        stores = [{}, {}]
        for optimizer, store in zip(self.optimizers(), stores, strict=True):
            optimizer.save_own_variables(store)
        return stores, self.values()

    def load(self, saved):
        stores, values = saved
        for optimizer, store in zip(self.optimizers(), stores, strict=True):
            optimizer.load_own_variables(store)
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def optimizers(self):
        return self.optimizer, self.optimizer.inner_optimizer

    def resumed(self, replicas, inner, compressor="adacomp(bin_sizes=20)", **kwargs):
        """Returns a job that resumes from a Keras save of this job."""
        other = Job(replicas, inner, compressor, **kwargs)
        other.load(self.saved())
        return other


def sgd():
    return keras.optimizers.SGD(1.0)


def accumulating():
    return keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)


def adam():
    return keras.optimizers.Adam(0.01)


def amsgrad():
    return keras.optimizers.Adam(0.01, amsgrad=True)


def nadam():
    return keras.optimizers.Nadam(0.01)


def lamb():
    return keras.optimizers.Lamb(0.01)


@pytest.mark.parametrize("order", [["b", "a"], ["a", "b"]], ids="".join)
def test_variables_trained_in_turn_each_get_what_was_left_of_them(order):
    job = Job(2, sgd)
    step_gradients = gradients_at(0, 2)
    job.step(step_gradients)
    after = job.resumed(1, sgd)
    for name in order:
        after.step([[ZEROS]], [name])
    for i, name in enumerate(PATHS):
        total = sum(replica_gradients[i] for replica_gradients in step_gradients)
        assert_close(-after.variables[i].numpy(), total, terms=6, scale=SUM_OF_TWO)
        assert not after.left(name).any()


@pytest.mark.parametrize(("old", "new"), [*itertools.permutations([1.0, 0.5, 0.1], 2)])
def test_another_beta_of_scalecoms_filter_loses_nothing(old, new):
    job = Job(2, sgd, f"scalecom(rates=5, beta={old})")
    step_gradients = [gradients_at(step, 2) for step in range(3)]
    for gradients in step_gradients:
        job.step(gradients)
    after = job.resumed(3, sgd, f"scalecom(rates=5, beta={new})")
    after.step([[ZEROS, ZEROS]] * 3)
    for i, name in enumerate(PATHS):
        total = sum(
            replica_gradients[i] for gradients in step_gradients for replica_gradients in gradients
        )
        left = after.left(name) / new
        # The filter multiplies and divides by beta in each of four steps.
        actual = left - after.variables[i].numpy()
        assert_close(actual, total, terms=12, steps=4, scale=3 * SUM_OF_TWO / min(old, new))


ALTERNATING = "power_sgd(rank=1, alternate=True)"


@pytest.mark.parametrize("after", [ALTERNATING, "power_sgd(rank=1)", "top_k(density=0.2)"])
@pytest.mark.parametrize("before", [ALTERNATING, "power_sgd(rank=1)"])
def test_alternating_loses_nothing_where_variables_miss_steps_and_replicas_join(before, after):
    job = Job(2, sgd, before)
    totals = dict.fromkeys(PATHS, ZEROS)
    for step, names in enumerate([("a", "b"), ("a",), ("b",), ("a", "b"), ("a",)]):
        step_gradients = [
            dict(zip(PATHS, replica_gradients, strict=True))
            for replica_gradients in gradients_at(step, 2)
        ]
        job.step(
            [[replica_gradients[name] for name in names] for replica_gradients in step_gradients],
            names,
        )
        for name in names:
            totals[name] = totals[name] + sum(
                replica_gradients[name] for replica_gradients in step_gradients
            )
    other = job.resumed(3, sgd, after)
    if after == before == ALTERNATING:
        for factors in (job, other):
            known = [state_of_variable(factors, "alternating_factor", name) for name in PATHS]
            # "a" has taken part in four steps, and "b" in three.
            assert [[bool(f[:20].any()) for f in actual] for actual in known] == [
                [False] * factors.replicas,
                [True] * factors.replicas,
            ]
    for _ in range(2):
        other.step([[ZEROS, ZEROS]] * 3)
    for i, name in enumerate(PATHS):
        actual = other.left(name) - other.variables[i].numpy()
        # A step rounds products of rows and of columns; a third of a residual is summed again.
        assert_close(actual, totals[name], terms=20 + 3 + 4, steps=7, scale=4 * SUM_OF_TWO)


def test_alternating_sends_all_of_a_variable_with_a_gradient_in_every_other_step():
    """By the numbers of the steps, it would always be the turn of the same factor."""
    job = Job(2, sgd, ALTERNATING)
    gradient = np.outer(np.arange(20), [1, 2, 3]).astype("float32")
    job.step([[gradient, gradient]] * 2)
    job.step([[gradient]] * 2, ["a"])
    assert job.left("b").any()
    job.step([[gradient, gradient]] * 2)
    scale = 4 * gradient.max() * 20
    assert_close(job.left("b"), ZEROS, terms=20 + 3, steps=3, scale=scale)
    assert_close(-job.variables[1].numpy(), 4 * gradient, terms=20 + 3, steps=3, scale=scale)


@pytest.mark.parametrize("form", ["store", "checkpoint"])
@pytest.mark.parametrize(("before", "after"), [*itertools.product([1, 2, 3], repeat=2)])
def test_a_round_of_accumulation_continues_in_the_next_job(tmp_path, form, before, after):
    job = Job(before, accumulating, "top_k(density=1.0)")
    step_gradients = gradients_at(0, before)
    job.step(step_gradients)
    if form == "store":
        other = job.resumed(after, accumulating, "top_k(density=1.0)")
    else:
        other = Job(after, accumulating, "top_k(density=1.0)")
        path = tf.train.Checkpoint(optimizer=job.optimizer).save(tmp_path / "checkpoint")
        tf.train.Checkpoint(optimizer=other.optimizer).restore(path).assert_consumed()
    later = gradients_at(1, after)
    other.step(later)
    for i, value in enumerate(other.values()):
        total = sum(replica_gradients[i] for replica_gradients in [*step_gradients, *later])
        assert_close(-value, total / 2, terms=before + after + 4, scale=3 * SUM_OF_TWO)


HAND_OVERS = {
    "switched on": ((2, {"precondition": None}), (2, {})),
    "switched off": ((2, {}), (2, {"precondition": None})),
    "switched off by the method": ((2, {}), (2, {"compressor": "no_compression"})),
    "switched on by the method": ((2, {"compressor": "no_compression"}), (2, {})),
    "more replicas": ((2, {}), (3, {})),
    "one replica": ((2, {}), (1, {})),
    "from one replica": ((1, {}), (2, {})),
    "another method": ((2, {}), (2, {"compressor": "top_k(density=0.2)"})),
}


@functools.cache
def uninterrupted(inner, replicas, settings):
    """Returns a job's state after 20 steps, and its largest move of a weight in the next ten."""
    job = Job(replicas, inner, graph=True, **dict(settings))
    job.train(range(20))
    return job.saved(), max(job.train(range(20, 30)))


@pytest.mark.parametrize(
    ("inner", "way"),
    [
        *itertools.product([adam], HAND_OVERS),
        *itertools.product(
            [amsgrad, nadam, lamb], ["switched on", "switched off by the method", "one replica"]
        ),
    ],
)
def test_steps_stay_as_long_after_a_hand_over(inner, way):
    (replicas, settings), (others, new_settings) = HAND_OVERS[way]
    saved, before = uninterrupted(inner, replicas, tuple(settings.items()))
    _, expected = uninterrupted(inner, others, tuple(new_settings.items()))
    other = Job(others, inner, **new_settings)
    other.load(saved)
    assert max(other.train(range(20, 30))) <= 1.5 * max(before, expected)


def test_one_variable_after_the_other_is_handed_over():
    job = Job(2, adam, precondition=None)
    job.train(range(40))
    other = job.resumed(2, adam)
    slots = [v.numpy() for v in other.optimizer.inner_optimizer._velocities]
    other.step([replica_gradients[:1] for replica_gradients in gradients_at(40, 2)], ["a"])
    other.step([replica_gradients[1:] for replica_gradients in gradients_at(41, 2)], ["b"])
    for variable, slot in zip(other.optimizer.exchange.state["second_moment"], slots, strict=True):
        assert (np.sum(copies(other.strategy, variable), 0) >= 0.99 * slot).all()


@pytest.mark.parametrize(
    ("inner", "before", "after"),
    [
        (adam, {"precondition": None}, {}),
        (amsgrad, {}, {"precondition": None}),
        (sgd, {"compressor": "scalecom(rates=5)"}, {"compressor": "scalecom(rates=5, beta=1.0)"}),
    ],
)
def test_a_graph_converts_as_eager_steps_do(inner, before, after):
    job = Job(2, inner, **before)
    job.train(range(5))
    kinds = [job.resumed(2, inner, graph=graph, **after) for graph in (False, True)]
    for kind in kinds:
        kind.step([replica_gradients[:1] for replica_gradients in gradients_at(5, 2)], ["a"])
        kind.step(gradients_at(6, 2))
    (eager, weights), (graph, graph_weights) = (kind.saved() for kind in kinds)
    for store, second in zip(eager, graph, strict=True):
        assert store.keys() == second.keys()
        for name, value in store.items():
            assert_close(second[name], value, adam_bound(), steps=2)
    for first, second in zip(graph_weights, weights, strict=True):
        assert_close(first, second, adam_bound(), steps=2)


def late(inner, compressor="adacomp(bin_sizes=20)", graph=False):
    """A job whose inner optimizer has made 3000 updates when `b` gets its first gradient."""
    job = Job(2, inner, compressor)
    job.step([replica_gradients[:1] for replica_gradients in gradients_at(0, 2)], ["a"])
    job.optimizer.inner_optimizer.iterations.assign(3000)
    job.graph = graph
    return job


def largest_move_of_b(job, steps):
    moves = []
    for step in steps:
        before = job.values()[1]
        job.step(gradients_at(step, job.replicas))
        moves.append(np.abs(job.values()[1] - before).max())
    return max(moves)


@pytest.mark.parametrize(
    ("inner", "compressor"),
    [
        (adam, "adacomp(bin_sizes=20)"),
        (amsgrad, "adacomp(bin_sizes=20)"),
        (adam, "top_k(density=0.1)"),
        (adam, "scalecom(rates=20)"),
    ],
)
def test_a_variable_whose_gradients_come_late_moves_as_far_as_a_new_one(inner, compressor):
    new = largest_move_of_b(Job(2, inner, compressor, graph=True), range(1, 31))
    late_move = largest_move_of_b(late(inner, compressor, graph=True), range(1, 31))
    assert late_move <= 1.5 * new


def adam_that_forgets_soon():
    return keras.optimizers.Adam(0.01, beta_2=0.9)


@pytest.mark.parametrize(
    "compressor", ["adacomp(bin_sizes=20)", "top_k(density=0.1)", "scalecom(rates=20)"]
)
def test_a_variable_whose_gradients_are_zeros_at_first_moves_as_far_as_a_new_one(compressor):
    first, job = (Job(2, adam_that_forgets_soon, compressor, graph=True) for _ in range(2))
    new = largest_move_of_b(first, range(1, 31))
    bad = np.full((20, 3), np.nan, "float32")
    for step in range(40):
        job.step([[a, ZEROS] for a, _ in gradients_at(100 + step, 2)])
        if step % 10 == 0:
            job.step([[bad, ZEROS]] * 2)  # is skipped, and no update
    np.testing.assert_array_equal(job.optimizer.exchange.facts.moments_since.numpy(), [0, 40])
    assert largest_move_of_b(job, range(1, 31)) <= 1.2 * new


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_delayed_variables_keep_their_pace_in_the_next_job(replicas):
    job = late(adam)
    before = largest_move_of_b(job, range(1, 11))
    other = job.resumed(replicas, adam)
    assert largest_move_of_b(other, range(11, 21)) <= 1.5 * before


def with_residuals(moment, waiting):
    late = 0.001 * waiting**2
    together = moment + late
    mean = together.sum() / np.count_nonzero(together)
    return np.where(late > moment, np.maximum(together, mean), together)


def test_residuals_keep_their_size_when_they_are_divided_and_back():
    job = Job(2, adam, precondition=None)
    job.train(range(40))
    left = job.left("a")
    moment = job.optimizer.inner_optimizer._velocities[0].numpy()
    root = np.sqrt(with_residuals(moment, left) / (1 - 0.999**40)) + 1e-7
    on = job.resumed(2, adam)
    on.step([[ZEROS]] * 2, ["b"])  # and `a` is as the checkpoint had it
    assert_close(on.left("a"), left, terms=4)
    single = on.resumed(1, adam)
    momentum = single.optimizer.inner_optimizer._momentums[0].numpy()
    single.step([[ZEROS]], ["a"])
    given = (single.optimizer.inner_optimizer._momentums[0].numpy() - 0.9 * momentum) / 0.1
    assert_close(given, left, adam_bound(), steps=2)
    divided = job.resumed(2, adam, "top_k(density=0.02)")
    divided.step([[np.full_like(ZEROS, 1e-9)]] * 2, ["a"])
    bound = rounding(np.abs(left / root).max(), adam_bound(), steps=2)
    kept = np.isclose(divided.left("a"), left / root, rtol=0, atol=bound)
    assert kept.sum() >= 58  # of 60: one entry of each replica was sent


def test_the_sum_of_gradients_that_are_planned_with_is_divided_as_they_are():
    lgreco = gc.compressors.LGreCo("top_k(density=1)")  # Adam sees all of the first gradients
    before = Job(2, adam, lgreco, precondition=None)
    before.step(gradients_at(0, 2))
    (first, second) = (gradients_at(step, 2) for step in range(2))
    squares = (
        0.001 * sum(replica_gradients[0] for replica_gradients in first) ** 2
    )  # as the inner Adam has them
    job = before.resumed(2, adam, lgreco, precondition="local")
    job.step(second)
    local = 0.999 * squares / 2 + 0.001 * second[0][0] ** 2
    root = np.sqrt(2 * local / (1 - 0.999**2)) + 1e-7
    divided = first[0][0] / (np.sqrt(squares / 0.001) + 1e-7) + second[0][0] / root
    expected = 2 * divided  # gradients carry one over the number of replicas
    total = copies(job.strategy, job.optimizer.exchange.state["gradient_sum"][0])[0]
    assert_close(total, expected, adam_bound())


def state_of_variable(job, name, variable="a"):
    return copies(job.strategy, job.optimizer.exchange.state[name][PATHS.index(variable)])


def test_velocities_are_divided_and_multiplied_as_gradients_are():
    method = gc.compressors.TopK(density=0.05, momentum=0.9)
    job = Job(2, adam, method, precondition=None)
    for step in range(5):
        job.step(
            [
                [np.float32(1e-3) * g for g in replica_gradients]
                for replica_gradients in gradients_at(step, 2)
            ]
        )

    def check_step_without_gradients(before, after, factor):
        after.step([[ZEROS, ZEROS]] * 2)
        share = np.mean(state_of_variable(before, "velocity"), 0)
        for velocity in state_of_variable(after, "velocity"):
            kept = velocity != 0  # sent gradients have none
            assert kept.sum() >= 20
            assert_close(velocity[kept], (0.9 * share * factor)[kept], adam_bound(), steps=2)

    moment = job.optimizer.inner_optimizer._velocities[0].numpy()
    root = np.sqrt(with_residuals(moment, job.left("a")) / (1 - 0.999**5)) + 1e-7
    on = job.resumed(2, adam, method, precondition="local")
    check_step_without_gradients(job, on, 1 / root)
    moment = np.sum(state_of_variable(on, "second_moment"), 0)
    root = np.sqrt(moment / (1 - 0.999**2)) + 1e-7  # began with the estimate, one step ago
    check_step_without_gradients(on, on.resumed(2, adam, method, precondition=None), root)


def test_divided_velocities_are_not_loaded_by_an_optimizer_that_cannot_undo_it(caplog, monkeypatch):
    method = gc.compressors.TopK(density=0.05, momentum=0.9)
    job = Job(2, adam, method)
    job.train(range(3))
    other = job.resumed(2, sgd, method)
    message = "cannot use: moments_taken, residual, second_moment, velocity"
    assert message in caplog.text
    assert not np.any(state_of_variable(other, "velocity"))
    for worker in (1, 0):  # of two workers, the chief warns
        caplog.clear()
        monkeypatch.setenv("TF_CONFIG", make_tf_config(["a:1", "b:1"], worker))
        job.resumed(2, sgd, method)
        assert (message in caplog.text) == (worker == 0)


@pytest.mark.parametrize("trained_before", [False, True])
def test_state_of_another_number_of_variables_is_left_out(tmp_path, caplog, trained_before):
    """As Keras does with the inner optimizer's: when layers were unfrozen, say."""

    def compiled(frozen):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.layers[0].trainable = not frozen
        model.compile(gc.CompressedOptimizer("adam", "top_k"), "mse")
        return model

    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    head, whole = compiled(frozen=True), compiled(frozen=False)
    head.fit(x, x.sum(1), verbose=0)
    head.save_weights(tmp_path / "head.weights.h5")
    whole.optimizer.build(whole.trainable_variables)
    if trained_before:
        whole.fit(x, x.sum(1), verbose=0)
    state = [np.array(variable) for variable in whole.optimizer.exchange.variables]
    whole.load_weights(tmp_path / "head.weights.h5")
    assert "saved for 2 variables, and this optimizer trains 4" in caplog.text
    for before, after in zip(state, whole.optimizer.exchange.variables, strict=True):
        np.testing.assert_array_equal(before, after)
    for loaded, saved in zip(whole.get_weights(), head.get_weights(), strict=True):
        np.testing.assert_array_equal(loaded, saved)
    whole.fit(x, x.sum(1), verbose=0)


def test_divided_residuals_are_refused_by_an_optimizer_that_cannot_undo_it(tmp_path):
    job = Job(2, adam)
    job.train(range(2))
    path = tf.train.Checkpoint(optimizer=job.optimizer).save(tmp_path / "checkpoint")
    other = Job(2, sgd)
    tf.train.Checkpoint(optimizer=other.optimizer).restore(path).expect_partial()
    with pytest.raises(tf.errors.InvalidArgumentError, match="not of the Adam family"):
        other.step(gradients_at(2, 2))
