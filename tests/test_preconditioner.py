"""Adam's second moment in front of the compressor."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import adam_bound, assert_close
from tests.replicas import copies, mirrored, stepper
from tf_gradcomp.adam.preconditioner import LARGEST, SECOND_MOMENT
from tf_gradcomp.keras.common.second_moments import preconditioner_for
from tf_gradcomp.keras.keras3.adam import STEPS, momentum_only
from tf_gradcomp.private import keras3 as keras_private

SHAPES = [(40, 30), (30,)]
SIGNS = np.array([1, 1, -1, 1, -1, -1, -1], "float32")


def new_variables():
    generator = np.random.default_rng(1)
    return [
        keras.Variable(generator.normal(size=shape).astype("float32"), name=name)
        for shape, name in zip(SHAPES, ("kernel", "bias"), strict=True)
    ]


def gradients_at(step, replicas):
    generator = np.random.default_rng(100 + step)
    return [
        [generator.normal(size=shape).astype("float32") for shape in SHAPES]
        for _ in range(replicas)
    ]


class Job:
    """A compressed optimizer on some replicas, on two variables."""

    def __init__(self, replicas=2, inner=None, *, graph=False, **kwargs):
        self.strategy = mirrored(replicas)
        self.replicas = replicas
        with self.strategy.scope():
            self.variables = new_variables()
            inner = keras.optimizers.deserialize(inner) if inner else keras.optimizers.Adam(0.1)
            self.optimizer = gc.CompressedOptimizer(inner, **kwargs)
            self.optimizer.build(self.variables)
        self.step = stepper(
            self.strategy, lambda grads: self.optimizer.apply(grads, self.variables), graph=graph
        )

    def train(self, first, steps):
        for step in range(first, first + steps):
            self.step(gradients_at(step, self.replicas))
        return self

    def moments(self):
        """By variable, of each replica."""
        return [copies(self.strategy, v) for v in self.optimizer.exchange.state[SECOND_MOMENT]]

    def slots(self):
        inner = self.optimizer.inner_optimizer
        return [v.numpy() for v in keras_private.slots(inner, "velocities", self.variables)]

    def resumed(self, replicas, **kwargs):
        """Returns a job with a number of replicas that resumes from this job's checkpoint."""
        other, saved = Job(replicas, **kwargs), {}
        self.optimizer.save_own_variables(saved)
        other.optimizer.load_own_variables(saved)
        inner = {}
        self.optimizer.inner_optimizer.save_own_variables(inner)
        other.optimizer.inner_optimizer.load_own_variables(inner)
        for variable, value in zip(other.variables, self.variables, strict=True):
            variable.assign(value.numpy())
        return other


@pytest.mark.parametrize("class_", STEPS, ids=lambda class_: class_.__name__)
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"use_ema": True}], ids=str)
def test_momentum_steps_equal_keras_where_the_second_moment_is_constant(class_, settings):
    plain, stepped = ([*new_variables()] for _ in range(2))
    optimizer, momentum = (class_(0.05, epsilon=1e-12, **settings) for _ in range(2))
    optimizer.build(plain)
    momentum.build(stepped)
    sizes = [np.abs(gradient) + 0.1 for gradient in gradients_at(0, 1)[0]]
    for sign in SIGNS:
        optimizer.apply([tf.constant(sign * size) for size in sizes], plain)
        with momentum_only(momentum, stepped, [False] * len(stepped)):
            momentum.apply([tf.fill(size.shape, sign) for size in sizes], stepped)
    assert type(momentum) is class_
    for first, second in zip(plain, stepped, strict=True):
        largest = np.abs(first.numpy()).max()  # of the weights: also steps of Lamb are no longer
        assert_close(first, second, adam_bound(), steps=len(SIGNS), scale=largest)


@pytest.mark.parametrize("class_", STEPS, ids=lambda class_: class_.__name__)
def test_a_delayed_gradient_goes_past_the_momentum(class_):
    delayed, without = class_(0.05), class_(0.05, beta_1=0.0)
    weights = {}
    for optimizer in (delayed, without):
        weights[optimizer] = variables = new_variables()
        optimizer.build(variables)
        for step in range(3):
            gradients = [tf.constant(gradient) for gradient in gradients_at(step, 1)[0]]
            with momentum_only(optimizer, variables, [optimizer is delayed] * 2):
                optimizer.apply(gradients, variables)
    for weight, other_weight in zip(weights[delayed], weights[without], strict=True):
        assert_close(weight, other_weight, terms=20, steps=3)
    momentums = keras_private.slots(delayed, "momentums", weights[delayed])
    assert not any(momentum.numpy().any() for momentum in momentums)


def test_a_momentum_that_was_left_is_used_up_by_delayed_steps():
    (variable, _) = variables = new_variables()
    adam = keras.optimizers.Adam(0.1)
    adam.build(variables)
    adam.iterations.assign(10_000)
    (momentum, _) = keras_private.slots(adam, "momentums", variables)
    momentum.assign(np.ones(SHAPES[0]))
    start = variable.numpy()
    with momentum_only(adam, variables, [True, True]):
        for _ in range(200):
            adam.apply([tf.zeros(shape) for shape in SHAPES], variables)
    # 0.9 + 0.9**2 + ..., as with the same gradients in Adam itself.
    largest = np.abs(start).max() + 0.9
    assert_close(start - variable.numpy(), 0.1 * 9, terms=2, steps=200, scale=largest)


def test_a_variable_that_is_sent_whole_keeps_adams_momentum():
    job = Job(compressor=gc.compressors.TopK(0.1, overrides={"bias": None}), precondition="local")
    job.train(0, 3)
    adam = job.optimizer.inner_optimizer
    kernel, bias = keras_private.slots(adam, "momentums", job.variables)
    assert not kernel.numpy().any()
    assert bias.numpy().all()


@functools.cache
def values_of_a_bias(method, elements):
    """Returns the bias after each step of two replicas."""
    strategy = mirrored()
    with strategy.scope():
        bias = keras.Variable(np.zeros(elements, "float32"), name="bias")
        adam = keras.optimizers.Adam(0.1)
        optimizer = gc.CompressedOptimizer(adam, method, precondition="local")
        optimizer.build([bias])
    step = stepper(strategy, lambda grads: optimizer.apply(grads, [bias]))
    values = []
    for sign in SIGNS:
        step([[np.full(elements, sign)]] * 2)
        values.append(bias.numpy())
    return values


@pytest.mark.parametrize(
    ("compressor", "elements"),
    [
        ("top_k", 1),
        ("adacomp", 1),
        ("scalecom", 1),
        ("top_k(density=1)", 3),
        ("scalecom(rates=1)", 3),
    ],
)
def test_variables_sent_in_every_step_keep_adams_momentum(compressor, elements):
    expected = values_of_a_bias("no_compression", elements)
    np.testing.assert_array_equal(values_of_a_bias(compressor, elements), expected)


def test_replicas_keep_their_own_second_moments_and_equal_weights():
    job = Job().train(0, 3)
    for copies_ in job.moments():
        assert (copies_[0] != copies_[1]).any()
    for variable in [*job.variables, *job.optimizer.inner_optimizer.variables]:
        first, second = copies(job.strategy, variable)
        np.testing.assert_array_equal(first, second)
    assert not any(slot.any() for slot in job.slots())


@pytest.mark.parametrize("compressor", ["adacomp", "scalecom"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
def test_divided_gradients_are_sent_or_kept(amsgrad, compressor):
    settings = {"beta_2": 0.5, "learning_rate": 1.0, "amsgrad": amsgrad}
    job = Job(inner={"class_name": "Adam", "config": settings}, compressor=compressor)
    start = job.variables[0].numpy()
    job.train(0, 4)
    total, moments, largest = 0, [0.0, 0.0], [0.0, 0.0]
    for step in range(4):
        for replica, replica_gradients in enumerate(gradients_at(step, 2)):
            moments[replica] = 0.5 * moments[replica] + 0.5 * replica_gradients[0] ** 2
            largest[replica] = np.maximum(largest[replica], moments[replica])
            divisor = (largest if amsgrad else moments)[replica] / (1 - 0.5 ** (step + 1))
            total = total + replica_gradients[0] / np.sqrt(2 * divisor)
    kept = sum(copies(job.strategy, job.optimizer.exchange.residuals[0]))
    applied = start - job.variables[0].numpy()
    # Every quotient is at most the root of the number of steps, and there are two in each step.
    assert_close(applied + kept, total, terms=10, steps=4, scale=np.abs(start).max() + 2 * 4 * 2)


def test_clips_each_replica_before_it_divides():
    job = Job(inner=keras.optimizers.serialize(keras.optimizers.Adam(0.1, clipvalue=0.01)))
    job.train(0, 3)
    for moments in job.moments():
        assert max(moment.max() for moment in moments) <= 0.01**2
    # The divided values, in contrast, are about 1.
    assert np.abs(job.variables[0].numpy() - new_variables()[0].numpy()).max() > 0.1


def test_accumulated_gradients_are_divided_once_for_each_update():
    adam = keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)
    accumulating = Job(inner=keras.optimizers.serialize(adam), graph=True)
    at_once = Job()
    for step in range(3):
        gradients = [
            [np.round(8 * g) / 8 for g in replica_gradients]
            for replica_gradients in gradients_at(step, 2)
        ]
        accumulating.step(
            [[0.5 * gradient for gradient in replica_gradients] for replica_gradients in gradients]
        )
        accumulating.step(
            [[1.5 * gradient for gradient in replica_gradients] for replica_gradients in gradients]
        )
        at_once.step(gradients)
    for variable, other_variable in zip(accumulating.variables, at_once.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other_variable.numpy())


def test_scaled_gradients_are_divided_in_their_own_units():
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=64.0)
    inside, plain = Job(inner=keras.optimizers.serialize(scaled), graph=True), Job()
    for step in range(3):
        gradients = gradients_at(step, 2)
        inside.step(
            [[64 * gradient for gradient in replica_gradients] for replica_gradients in gradients]
        )
        plain.step(gradients)
    for variable, other_variable in zip(inside.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other_variable.numpy())


@pytest.mark.parametrize(("compressor", "terms"), [("scalecom", 0), ("adacomp", 6)])
def test_a_replica_with_a_bad_gradient_keeps_its_second_moment(compressor, terms):
    """AdaComp takes the square out again: three operations to add it, and three more."""
    job = Job(compressor=compressor).train(0, 2)
    before, weights = job.moments(), job.variables[0].numpy()
    gradients = gradients_at(2, 2)
    gradients[1][0][3, 4] = np.nan
    job.step(gradients)
    np.testing.assert_array_equal(job.variables[0].numpy(), weights)
    for after, old, gradient in zip(job.moments(), before, gradients[1], strict=True):
        most = np.nanmax(0.999 * old[1] + 0.001 * gradient**2)
        assert_close(after[1], old[1], terms, scale=most)
        assert (after[1] <= old[1]).all()
    for after, old, gradient in zip(job.moments(), before, gradients[0], strict=True):
        created = 0.999 * old[0] + 0.001 * gradient**2
        assert_close(after[0], created, adam_bound())
    assert job.optimizer.exchange.skipped_steps.numpy() == 1


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_job_resumes_with_the_sum_of_second_moments(replicas):
    job = Job().train(0, 3)
    other = job.resumed(replicas)
    for after, before in zip(other.moments(), job.moments(), strict=True):
        assert_close(sum(after), sum(before), terms=2 * replicas)


def test_one_replica_gets_the_second_moments_back_and_many_take_them_over():
    job = Job().train(0, 3)
    single = job.resumed(1).train(3, 1)
    step_gradients = gradients_at(3, 1)[0][0] + late_gradient(job)
    expected = 0.999 * sum(job.moments()[0]) + 0.001 * step_gradients**2
    assert_close(single.slots()[0], expected, adam_bound(), steps=3)
    assert not any(np.any(r.numpy()) for r in single.optimizer.exchange.residuals)
    many = single.resumed(2)
    slot = many.slots()[0]
    many.train(4, 1)
    for replica, replica_gradients in enumerate(gradients_at(4, 2)):
        expected = 0.999 * slot / 2 + 0.001 * replica_gradients[0] ** 2
        assert_close(many.moments()[0][replica], expected, adam_bound())


def late_gradient(job):
    """The first variable's residuals, all together, as a gradient that is not divided."""
    residual = sum(copies(job.strategy, job.optimizer.exchange.residuals[0]))
    return residual * (np.sqrt(sum(job.moments()[0]) / (1 - 0.999**3)) + 1e-7)


def test_residuals_and_momentum_are_not_divided_for_one_replica():
    job = Job().train(0, 3)
    single = job.resumed(1)
    adam = single.optimizer.inner_optimizer
    (momentum, _) = keras_private.slots(adam, "momentums", single.variables)
    root = np.sqrt(sum(job.moments()[0]) / (1 - 0.999**3)) + 1e-7
    before = momentum.numpy() * root
    single.step([[np.zeros(shape, "float32") for shape in SHAPES]])
    given = (momentum.numpy() - 0.9 * before) / 0.1
    assert_close(given, late_gradient(job), adam_bound())


@pytest.mark.parametrize(
    ("inner", "compressor", "setting", "expected"),
    [
        ("adam", "adacomp", "auto", True),
        ("adamw", "scalecom", "auto", True),
        ("adam", "qsgd", "auto", False),
        ("adam", "random_k", "auto", False),
        ("adam", "no_compression", "local", True),
        ("sgd", "adacomp", "auto", False),
        ("adam", "adacomp", None, False),
    ],
)
def test_auto_is_local_where_it_helps(inner, compressor, setting, expected):
    found = preconditioner_for(keras.optimizers.get(inner), gc.compressors.get(compressor), setting)
    assert (found is not None) == expected


def test_amsgrads_largest_second_moments_are_handed_over_and_given_back():
    inner = {"class_name": "Adam", "config": {"beta_2": 0.5, "amsgrad": True}}
    job = Job(inner=inner).train(0, 3)
    names = [SECOND_MOMENT, LARGEST]
    sums = [sum(copies(job.strategy, job.optimizer.exchange.state[name][0])) for name in names]
    assert (sums[1] > sums[0]).any()
    single = job.resumed(1, inner=inner)
    single.step([[np.zeros(shape, "float32") for shape in SHAPES]])
    residual = sum(copies(job.strategy, job.optimizer.exchange.residuals[0]))
    given = residual * np.sqrt(sums[1] / (1 - 0.5**3))
    moment = 0.5 * sums[0] + 0.5 * given**2
    hats = keras_private.slots(single.optimizer.inner_optimizer, "velocity_hats", single.variables)
    assert_close(single.slots()[0], moment, terms=20)
    assert_close(hats[0], np.maximum(sums[1], moment), terms=20)


@pytest.mark.parametrize("setting", ["auto", "local", None], ids=str)
def test_config_keeps_the_setting(setting):
    optimizer = gc.CompressedOptimizer("adam", precondition=setting)
    restored = gc.CompressedOptimizer.from_config(optimizer.get_config())
    assert restored.precondition == setting


@pytest.mark.parametrize("compressor", ["adacomp(bin_sizes=None)", "top_k(density=1.0)"])
@pytest.mark.parametrize("class_", [keras.optimizers.Adam, keras.optimizers.AdamW])
def test_slices_of_a_row_are_squared_one_by_one_as_keras_does(class_, compressor):
    """Without momentum, dividing each replica's gradient by one root equals dividing their sum."""
    strategy = mirrored(2)
    inner = {"beta_1": 0.0, "beta_2": 0.9, "epsilon": 1e-12}
    with strategy.scope():
        table = keras.Variable(np.zeros((50, 4), "float32"), name="embeddings")
        optimizer = gc.CompressedOptimizer(class_(0.1, **inner), compressor, precondition="local")
        optimizer.build([table])
    single, plain = keras.Variable(np.zeros((50, 4), "float32")), class_(0.1, **inner)
    plain.build([single])

    def slices(values, indices):
        return tf.IndexedSlices(values, indices, tf.constant([50, 4], tf.int64))

    step = stepper(strategy, lambda given: optimizer.apply([slices(*given)], [table]), graph=True)
    for index in range(3):
        generator = np.random.default_rng(index)
        indices = np.arange(100, dtype=np.int64) // 2  # each row twice
        values = generator.normal(size=(100, 4)).astype("float32")
        step([[values, indices]] * 2)
        plain.apply([slices(np.concatenate([values] * 2), np.concatenate([indices] * 2))], [single])
    for copy in copies(strategy, table):
        assert_close(copy, single, adam_bound(0.9), steps=3)


@pytest.mark.parametrize(
    ("class_", "settings"),
    [
        (keras.optimizers.Adam, {}),
        (keras.optimizers.Adam, {"amsgrad": True}),
        (keras.optimizers.AdamW, {"weight_decay": 0.0}),
        (keras.optimizers.Nadam, {}),
    ],
)
def test_a_large_epsilon_shortens_steps_as_in_keras(class_, settings):
    """Two replicas with one gradient g: each divides as Keras divides the gradient sqrt(2) g."""
    inner = {"beta_1": 0.0, "beta_2": 0.9, "epsilon": 0.1, **settings}
    strategy, root = mirrored(2), np.sqrt(2)
    with strategy.scope():
        variable = keras.Variable(np.zeros(6, "float32"), name="kernel")
        optimizer = gc.CompressedOptimizer(
            class_(0.1, **inner), "adacomp(bin_sizes=None)", precondition="local"
        )
        optimizer.build([variable])
    single, plain = keras.Variable(np.zeros(6, "float32")), class_(0.1 * root, **inner)
    plain.build([single])
    step = stepper(strategy, lambda grads: optimizer.apply(grads, [variable]))
    for index in range(4):
        gradient = 0.01 * np.random.default_rng(index).normal(size=6).astype("float32")
        step([[gradient]] * 2)
        plain.apply([tf.constant(root * gradient, tf.float32)], [single])
    for copy in copies(strategy, variable):
        assert_close(copy, single, adam_bound(0.9), steps=4)


def test_a_small_epsilon_leaves_small_gradients_as_large_as_others():
    """Else they would be sent late, and the character LSTM lagged by 0.1 bits early on."""
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(np.zeros(2, "float32"), name="kernel")
        optimizer = gc.CompressedOptimizer(
            keras.optimizers.Adam(0.1, beta_1=0.0), "adacomp(bin_sizes=None)", precondition="local"
        )
        optimizer.build([variable])
    step = stepper(strategy, lambda grads: optimizer.apply(grads, [variable]))
    gradient = np.array([1e-6, 1.0], "float32")
    step([[gradient]] * 2)
    expected = -0.1 * 2 * gradient / (np.sqrt(2) * gradient + 1e-7)
    assert_close(copies(strategy, variable)[0], expected, adam_bound())


def test_sparse_gradients_go_through_all_of_adam():
    strategy = mirrored(2)
    with strategy.scope():
        table = keras.Variable(np.zeros((50, 4), "float32"), name="embeddings")
        policy = gc.Policy(max_dense_elements=10)
        optimizer = gc.CompressedOptimizer("adam", policy=policy, precondition="local")
        optimizer.build([table])

    def apply(given):
        return optimizer.apply([tf.IndexedSlices(*given, (50, 4))], [table])

    ones = np.ones((1, 4), "float32")
    stepper(strategy, apply)([[ones, np.array([3])], [ones, np.array([5])]])
    (slot,) = keras_private.slots(optimizer.inner_optimizer, "velocities", [table])
    assert np.count_nonzero(slot.numpy()) == 8
    expected = np.zeros((50, 4))
    expected[[3, 5]] = -0.001
    assert_close(table, expected, adam_bound())
