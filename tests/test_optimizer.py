"""`CompressedOptimizer` with one replica and with several in one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.replicas import collective, copies, mirrored, per_replica, stepper

OPTIMIZERS = [
    keras.optimizers.SGD(0.1),
    keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    keras.optimizers.Adam(0.01, amsgrad=True),
    keras.optimizers.AdamW(0.01, weight_decay=0.1),
    keras.optimizers.Adadelta(1.0),
    keras.optimizers.Adagrad(0.1),
    keras.optimizers.Adamax(0.01),
    keras.optimizers.Adafactor(0.05),
    keras.optimizers.Nadam(0.01),
    keras.optimizers.Ftrl(0.1),
    keras.optimizers.Lion(0.001),
    keras.optimizers.Lamb(0.01),
    *([keras.optimizers.Muon(0.01)] if hasattr(keras.optimizers, "Muon") else []),
]
FEATURES = [
    keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    keras.optimizers.Adam(0.01, clipnorm=0.5),
    keras.optimizers.Adam(0.01, global_clipnorm=0.5),
    keras.optimizers.Adam(0.01, clipvalue=0.1),
    keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10)),
    keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0),
]


def iterations(optimizer):
    return int(keras.ops.convert_to_numpy(optimizer.iterations))


def label(optimizer):
    settings = [
        name
        for name in ("use_ema", "gradient_accumulation_steps", "clipnorm", "global_clipnorm")
        if getattr(optimizer, name)
    ]
    return "-".join([type(optimizer).__name__, *settings])


every_optimizer = pytest.mark.parametrize("inner", OPTIMIZERS, ids=label)
every_feature = pytest.mark.parametrize("inner", FEATURES, ids=label)


def copy_of(optimizer):
    return type(optimizer).from_config(optimizer.get_config())


def new_variables():
    generator = np.random.default_rng(1)
    return [
        keras.Variable(generator.normal(size=(40, 30)).astype("float32"), name="kernel"),
        keras.Variable(np.zeros(30, "float32"), name="bias"),
    ]


def gradients_at(step, replicas=2, bad=None):
    """`gradients[replica][variable]`; that of replica `bad` is not finite."""
    generator = np.random.default_rng(100 + step)
    gradients = [
        [generator.normal(size=shape).astype("float32") for shape in ((40, 30), (30,))]
        for _ in range(replicas)
    ]
    if bad is not None:
        gradients[bad][0][3, 4] = np.nan
    return gradients


class Replicas:
    """A compressed optimizer with two variables under a `MirroredStrategy`."""

    def __init__(self, inner="sgd", strategy=None, *, graph=True, around=None, **kwargs):
        self.strategy = strategy or mirrored(2)
        with self.strategy.scope():
            self.variables = new_variables()
            if not isinstance(inner, str):
                inner = copy_of(inner)  # an optimizer is created in the scope
            self.optimizer = self.outer = gc.CompressedOptimizer(inner, **kwargs)
            if around is not None:
                self.outer = around(self.optimizer)
            self.outer.build(self.variables)
        self.step = stepper(
            self.strategy, lambda grads: self.outer.apply(grads, self.variables), graph=graph
        )

    def value(self, variable=0):
        return self.variables[variable].numpy()

    def residuals(self, variable=0):
        return copies(self.strategy, self.optimizer.exchange.residuals[variable])

    def assert_replicas_equal(self):
        for variable in [*self.variables, *self.optimizer.inner_optimizer.variables]:
            first, *others = copies(self.strategy, variable)
            for other in others:
                np.testing.assert_array_equal(first, other)


# One replica


def assert_equal_training(inner, strategy=None, *, jit_compile=False, steps=5):
    """Trains a small model with and without compression, and compares every bit.

    Except with XLA, which rounds in another way when the code around changes.
    """
    tolerance = 1e-5 if jit_compile else 0

    def train(strategy, make_optimizer):
        with strategy.scope():
            return train_in_scope(make_optimizer())

    def train_in_scope(optimizer):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(20, 8),
                keras.layers.Flatten(),
                keras.layers.Dense(10, activation="relu"),
                keras.layers.Dense(3),
            ]
        )
        model.compile(optimizer, loss="mse", jit_compile=jit_compile)
        generator = np.random.default_rng(0)
        x = generator.integers(0, 20, (steps * 8, 6))
        y = generator.normal(size=(steps * 8, 3))
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        return model

    default = tf.distribute.get_strategy()
    plain = train(default, lambda: copy_of(inner))
    compressed = train(strategy or default, lambda: gc.CompressedOptimizer(copy_of(inner)))
    for expected, actual in zip(plain.variables, compressed.variables, strict=True):
        np.testing.assert_allclose(
            expected.numpy(), actual.numpy(), tolerance, tolerance, err_msg=expected.path
        )
    state = compressed.optimizer.inner_optimizer.variables
    for expected, actual in zip(plain.optimizer.variables, state, strict=True):
        np.testing.assert_allclose(
            expected.numpy(), actual.numpy(), tolerance, tolerance, err_msg=expected.path
        )
    assert iterations(plain.optimizer) == iterations(compressed.optimizer)


@pytest.mark.parametrize("inner", [*OPTIMIZERS, *FEATURES], ids=label)
def test_one_replica_is_the_inner_optimizer_bit_by_bit(inner):
    assert_equal_training(inner)


@pytest.mark.parametrize("inner", [keras.optimizers.Adam(0.01), *FEATURES], ids=label)
def test_one_replica_of_a_strategy_is_the_inner_optimizer_bit_by_bit(inner):
    """With accumulation and overwriting averages, too, where Keras itself fails."""
    for strategy in (gc.MultiWorkerMirroredStrategy(), mirrored(1)):
        assert_equal_training(inner, strategy, steps=4)  # none of which is left accumulated


def test_one_replica_may_be_compiled_by_xla():
    assert_equal_training(keras.optimizers.Adam(0.01), jit_compile=True)


def test_one_replica_sends_nothing():
    optimizer, variables = gc.CompressedOptimizer("sgd"), new_variables()
    optimizer.build(variables)
    optimizer.apply([tf.ones(v.shape) for v in variables], variables)
    assert optimizer.exchange.traffic().exchanges == 0


def test_one_replica_of_a_method_without_residuals_is_the_inner_optimizer():
    optimizer, variables = gc.CompressedOptimizer("sgd", "cast"), new_variables()
    plain, expected = keras.optimizers.get("sgd"), new_variables()
    gradients = [tf.constant(gradient) for gradient in gradients_at(0)[0]]
    optimizer.apply(gradients, variables)
    plain.apply(gradients, expected)
    for variable, other in zip(variables, expected, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy())


# Several replicas


@pytest.mark.parametrize("compressor", gc.compressors.names())
def test_a_bad_gradient_is_skipped_with(compressor):
    replicas = Replicas(keras.optimizers.Adam(0.1), compressor=compressor)
    replicas.step(gradients_at(0))
    before = replicas.value()
    replicas.step(gradients_at(1, bad=1))
    np.testing.assert_array_equal(replicas.value(), before)
    replicas.step(gradients_at(2))
    assert np.any(replicas.value() != before)
    assert np.all(np.isfinite(replicas.value()))
    replicas.assert_replicas_equal()


def test_a_sum_that_does_not_fit_into_float16_variables_is_skipped():
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(np.zeros(4, "float16"), dtype="float16", name="kernel")
        optimizer = gc.CompressedOptimizer("sgd", "no_compression")
        optimizer.build([variable])
    step = stepper(strategy, lambda grads: optimizer.apply(grads, [variable]))
    step([[np.full(4, 6e4, "float16")]] * 2)
    assert optimizer.exchange.skipped_steps.numpy() == 1
    assert not variable.numpy().any()


@pytest.mark.parametrize("setting", ["gradient_accumulation_steps", "ema_overwrite_frequency"])
def test_one_replica_that_skips_a_step_counts_it(setting):
    inner = keras.optimizers.Adam(0.1, use_ema=True, **{setting: 2})
    replicas = Replicas(inner, mirrored(1))
    for number in range(4):
        replicas.step(gradients_at(number, 1, bad=0 if number == 1 else None))
    assert np.isfinite(replicas.value()).all()
    assert replicas.optimizer.exchange.skipped_steps.numpy() == 1


@pytest.mark.parametrize("compressor", gc.compressors.names())
def test_state_is_saved_and_restored_with(compressor, tmp_path):
    first, second = (Replicas(keras.optimizers.Adam(0.1), compressor=compressor) for _ in range(2))
    first.step(gradients_at(0))
    path = tf.train.Checkpoint(optimizer=first.optimizer).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(optimizer=second.optimizer).read(path).assert_consumed()
    for saved, restored in zip(first.optimizer.variables, second.optimizer.variables, strict=True):
        np.testing.assert_allclose(saved.numpy(), restored.numpy(), rtol=1e-6, atol=1e-6)


@every_optimizer
def test_replicas_end_equal(inner):
    replicas = Replicas(inner)
    before = replicas.value()
    for step in range(3):
        replicas.step(gradients_at(step))
    replicas.assert_replicas_equal()
    assert (replicas.value() != before).any()
    assert iterations(replicas.optimizer) == 3


@every_feature
def test_replicas_end_equal_with(inner):
    replicas = Replicas(inner)
    before = replicas.value()
    for step in range(4):
        replicas.step(gradients_at(step))
    replicas.assert_replicas_equal()
    assert (replicas.value() != before).any()


@pytest.mark.parametrize(
    ("make", "count"), [(mirrored, 2), (mirrored, 3), (mirrored, 4), (lambda _: collective(), 2)]
)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_sgd_applies_the_sum_of_what_was_sent(make, count, graph):
    strategy = make(count)
    replicas = Replicas(keras.optimizers.SGD(1.0), strategy, graph=graph)
    start, total = replicas.value(), np.zeros((40, 30))
    for step in range(3):
        gradients = gradients_at(step, count)
        total += sum(of_one[0] for of_one in gradients)
        replicas.step(gradients)
    replicas.assert_replicas_equal()
    residuals = replicas.residuals()
    assert len(residuals) == count
    assert (residuals[0] != residuals[1]).any()
    np.testing.assert_allclose(start - replicas.value() + sum(residuals), total, atol=1e-4)


def test_whole_gradients_train_as_the_inner_optimizer_would_on_their_sum():
    whole = gc.compressors.AdaComp(dict.fromkeys(["dense", "vector"]))
    adam = keras.optimizers.Adam(0.1, clipnorm=1.0)
    replicas = Replicas(adam, compressor=whole, precondition=None)
    inner, variables = keras.optimizers.Adam(0.1, clipnorm=1.0), new_variables()
    for step in range(3):
        gradients = gradients_at(step)
        replicas.step(gradients)
        inner.apply([tf.constant(a + b) for a, b in zip(*gradients, strict=True)], variables)
    np.testing.assert_array_equal(replicas.value(), variables[0].numpy())


def test_clips_the_reduced_gradient():
    whole = gc.compressors.AdaComp(dict.fromkeys(["dense", "vector"]))
    replicas = Replicas(keras.optimizers.SGD(1.0, clipvalue=1.0), compressor=whole)
    start = replicas.value(1)
    ones = [np.zeros((40, 30), "float32"), np.full(30, 0.75, "float32")]
    replicas.step([ones, ones])
    np.testing.assert_allclose(start - replicas.value(1), 1.0)


def test_gradients_may_be_applied_as_pairs():
    replicas = Replicas(keras.optimizers.SGD(1.0))
    before = replicas.value()
    counted = []
    step = stepper(
        replicas.strategy,
        lambda grads: counted.append(
            replicas.optimizer.apply_gradients(zip(grads, replicas.variables, strict=True))
        ),
    )
    step(gradients_at(0))
    assert (replicas.value() != before).any()
    assert counted[0] is replicas.optimizer.inner_optimizer.iterations


def test_an_optimizer_that_is_not_built_yet_is_built_by_the_first_step():
    strategy = mirrored(2)
    with strategy.scope():
        variables, optimizer = new_variables(), gc.CompressedOptimizer("adam")
    step = stepper(strategy, lambda grads: optimizer.apply(grads, variables))
    for number in range(2):
        step(gradients_at(number))
    assert iterations(optimizer) == 2
    first, second = copies(strategy, variables[0])
    np.testing.assert_array_equal(first, second)
    assert optimizer.exchange.traffic().exchanges == 2


def test_variables_without_a_gradient_are_left_as_they_are():
    replicas = Replicas(keras.optimizers.SGD(1.0))
    bias = replicas.value(1)
    step = stepper(
        replicas.strategy,
        lambda grads: replicas.optimizer.apply([grads[0], None], replicas.variables),
    )
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        step(gradients_at(0))
    np.testing.assert_array_equal(replicas.value(1), bias)
    assert replicas.optimizer.exchange.traffic().tensor_bytes["bias"] == 0


def test_some_of_the_variables_can_be_given():
    replicas = Replicas(keras.optimizers.SGD(1.0))
    kernel, bias = replicas.value(0), replicas.value(1)
    step = stepper(
        replicas.strategy,
        lambda grads: replicas.optimizer.apply([grads[1]], [replicas.variables[1]]),
    )
    step(gradients_at(0))
    np.testing.assert_array_equal(replicas.value(0), kernel)
    assert (replicas.value(1) != bias).any()


def embedding_step(optimizer, table, strategy, indices, values):
    """Applies `tf.IndexedSlices`, as Keras' Embedding yields them, with an index twice."""
    replica_indices = per_replica(strategy, [tf.constant(i, tf.int64) for i in indices])
    replica_values = per_replica(strategy, [tf.constant(v) for v in values])

    def run(index, value):
        optimizer.apply([tf.IndexedSlices(value, index, tf.constant([50, 4], tf.int64))], [table])

    tf.function(lambda: strategy.run(run, (replica_indices, replica_values)), autograph=False)()


@pytest.mark.parametrize("limit", [2**26, 10], ids=["made dense", "left sparse"])
def test_embedding_gradients_are_merged(limit):
    strategy = mirrored(2)
    with strategy.scope():
        table = keras.Variable(np.zeros((50, 4), "float32"), name="embeddings")
        optimizer = gc.CompressedOptimizer(
            keras.optimizers.SGD(1.0),
            gc.compressors.AdaComp({"embedding": None}),
            policy=gc.Policy(max_dense_elements=limit),
        )
        optimizer.build([table])
    indices = [[3, 3, 7], [7, 9, 9]]
    values = [np.full((3, 4), 1.0, "float32"), np.full((3, 4), 10.0, "float32")]
    embedding_step(optimizer, table, strategy, indices, values)
    expected = np.zeros((50, 4))
    expected[[3, 7, 9]] = [[-2] * 4, [-11] * 4, [-20] * 4]
    for copy in copies(strategy, table):
        np.testing.assert_array_equal(copy, expected)
    assert optimizer.exchange.traffic().exchanges == (1 if limit > 200 else 0)


def test_non_finite_slices_that_stay_sparse_are_skipped_by_all():
    strategy = mirrored(2)
    with strategy.scope():
        table = keras.Variable(np.zeros((50, 4), "float32"), name="embeddings")
        optimizer = gc.CompressedOptimizer("adam", policy=gc.Policy(max_dense_elements=10))
        optimizer.build([table])
    values = [np.ones((1, 4), "float32"), np.full((1, 4), np.inf, "float32")]
    embedding_step(optimizer, table, strategy, [[1], [2]], values)
    assert not table.numpy().any()
    assert iterations(optimizer) == 0
    assert optimizer.exchange.skipped_steps.numpy() == 1


# Steps that are skipped


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("make", [mirrored, collective], ids=["copied", "collective"])
def test_a_step_with_a_bad_gradient_is_skipped_by_all(bad, graph, make):
    replicas = Replicas("adam", make(), graph=graph, precondition=None)
    replicas.step(gradients_at(0))
    before = replicas.value()
    residuals = replicas.residuals()
    gradients = gradients_at(1, bad=bad)
    replicas.step(gradients)
    np.testing.assert_array_equal(replicas.value(), before)
    assert iterations(replicas.optimizer) == 1
    assert replicas.optimizer.exchange.skipped_steps.numpy() == 1
    after = replicas.residuals()
    np.testing.assert_allclose(after[bad], residuals[bad], atol=1e-5)
    good = 1 - bad
    np.testing.assert_allclose(after[good], residuals[good] + gradients[good][0], atol=1e-5)
    replicas.step(gradients_at(2))
    assert iterations(replicas.optimizer) == 2
    assert np.isfinite(replicas.value()).all()
    replicas.assert_replicas_equal()


def scaled(gradients, scale):
    return [[gradient * np.float32(scale) for gradient in of_one] for of_one in gradients]


def outer_scaler(**kwargs):
    return lambda optimizer: keras.optimizers.LossScaleOptimizer(optimizer, **kwargs)


@pytest.mark.parametrize("where", ["inside", "around"])
def test_loss_scaling(where):
    if where == "inside":
        inner = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=64.0, dynamic_growth_steps=2
        )
        replicas = Replicas(inner)
        scaler = replicas.optimizer.inner_optimizer
    else:
        around = outer_scaler(initial_scale=64.0, dynamic_growth_steps=2)
        replicas = Replicas(keras.optimizers.SGD(1.0), around=around)
        scaler = replicas.outer
    plain = Replicas(keras.optimizers.SGD(1.0))
    assert float(replicas.outer.scale_loss(1.0)) == 64.0

    replicas.step(scaled(gradients_at(0), 64))
    plain.step(gradients_at(0))
    np.testing.assert_array_equal(replicas.value(), plain.value())
    np.testing.assert_array_equal(replicas.residuals()[0], plain.residuals()[0])
    assert scaler.dynamic_scale.numpy() == 64

    replicas.step(gradients_at(1, bad=1))
    np.testing.assert_array_equal(replicas.value(), plain.value())
    assert copies(replicas.strategy, scaler.dynamic_scale) == [32, 32]
    assert iterations(replicas.outer) == 1

    for step in (2, 3):
        replicas.step(scaled(gradients_at(step), 32))
    assert copies(replicas.strategy, scaler.dynamic_scale) == [64, 64]
    replicas.assert_replicas_equal()


@pytest.mark.parametrize("around", [None, outer_scaler(initial_scale=4.0)], ids=["", "scaled"])
def test_gradient_accumulation_exchanges_on_the_steps_that_update(around):
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    replicas = Replicas(inner, around=around)
    plain = Replicas(keras.optimizers.SGD(1.0))
    factor = 4 if around else 1
    for round_ in range(2):
        micro = [gradients_at(3 * round_ + i) for i in range(3)]
        for i, gradients in enumerate(micro):
            before = replicas.value()
            replicas.step(scaled(gradients, factor))
            assert (replicas.value() == before).all() == (i < 2)
        means = [
            [np.float32(sum(m[r][v] for m in micro)) / np.float32(3) for v in range(2)]
            for r in range(2)
        ]
        plain.step(means)
        np.testing.assert_allclose(replicas.value(), plain.value(), atol=1e-5)
    assert replicas.optimizer.exchange.traffic().exchanges == 2
    assert iterations(replicas.optimizer) == 2
    replicas.assert_replicas_equal()


def test_a_bad_gradient_while_accumulating_skips_the_update_and_no_more():
    replicas = Replicas(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
    start = replicas.value()
    replicas.step(gradients_at(0, bad=0))
    replicas.step(gradients_at(1))
    np.testing.assert_array_equal(replicas.value(), start)
    assert replicas.optimizer.exchange.skipped_steps.numpy() == 1
    replicas.step(gradients_at(2))
    replicas.step(gradients_at(3))
    assert (replicas.value() != start).any()
    assert np.isfinite(replicas.value()).all()


# What is set on the inner optimizer


def test_learning_rate_is_the_inner_optimizers():
    inner = keras.optimizers.SGD(0.5)
    optimizer = gc.CompressedOptimizer(inner)
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert float(inner.learning_rate) == 0.25
    optimizer.learning_rate.assign(0.125)
    assert float(inner.learning_rate) == 0.125


def test_a_set_learning_rate_is_applied_by_all_replicas():
    replicas = Replicas(keras.optimizers.SGD(1.0))
    replicas.optimizer.learning_rate = 0.0
    start = replicas.value()
    replicas.step(gradients_at(0))
    np.testing.assert_array_equal(replicas.value(), start)


def test_schedules_follow_the_steps():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [1.0, 0.5, 0.25])
    replicas = Replicas(keras.optimizers.SGD(schedule))
    rates = []
    for step in range(4):
        rates.append(float(replicas.optimizer.learning_rate))
        replicas.step(gradients_at(step))
    assert rates == [1.0, 1.0, 0.5, 0.25]


def test_weight_decay_excludes_variables():
    strategy = mirrored(2)
    with strategy.scope():
        inner = keras.optimizers.SGD(1.0, weight_decay=0.5)
        variables = [keras.Variable(np.ones(3, "float32"), name=n) for n in ("kernel", "bias")]
        optimizer = gc.CompressedOptimizer(inner)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        optimizer.build(variables)
    step = stepper(strategy, lambda grads: optimizer.apply(grads, variables))
    step([[np.zeros(3, "float32")] * 2] * 2)
    np.testing.assert_array_equal(variables[0].numpy(), np.full(3, 0.5))
    np.testing.assert_array_equal(variables[1].numpy(), np.ones(3))


def test_finalizing_overwrites_weights_by_their_averages():
    replicas = Replicas(keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5))
    weights = []
    for step in range(2):
        replicas.step(gradients_at(step))
        weights.append(replicas.value())
    replicas.optimizer.finalize_variable_values(replicas.variables)
    for copy in copies(replicas.strategy, replicas.variables[0]):
        np.testing.assert_allclose(copy, (weights[0] + weights[1]) / 2, rtol=1e-5, atol=1e-6)


def test_weights_are_overwritten_by_their_averages_at_the_set_frequency():
    averaging = {"use_ema": True, "ema_momentum": 0.5}
    inner = keras.optimizers.SGD(1.0, **averaging, ema_overwrite_frequency=2)
    replicas = Replicas(inner)
    plain = Replicas(keras.optimizers.SGD(1.0, **averaging))
    for step in range(2):
        replicas.step(gradients_at(step))
        plain.step(gradients_at(step))
        assert (replicas.value() == plain.value()).all() == (step == 0)
    plain.optimizer.finalize_variable_values(plain.variables)
    np.testing.assert_array_equal(replicas.value(), plain.value())
    replicas.assert_replicas_equal()


def test_variables_are_the_inner_optimizers_then_those_of_the_exchange():
    optimizer = Replicas("adam").optimizer
    inner = optimizer.inner_optimizer.variables
    assert [id(v) for v in optimizer.variables[: len(inner)]] == [id(v) for v in inner]
    names = [variable.name for variable in optimizer.variables[len(inner) :]]
    assert names[:3] == ["exchange_step", "skipped_steps", "unsent"]
    state = ["residual", "second_moment"]
    assert names[3:] == [f"{name}_{kind}" for kind in state for name in ("kernel", "bias")]


# Construction, config, copies


@pytest.mark.parametrize("form", ["object", "config", "name"])
def test_the_inner_optimizer_is_an_object_a_config_or_a_name(form):
    adam = keras.optimizers.Adam(0.125)
    given = {"object": adam, "config": keras.optimizers.serialize(adam), "name": "adam"}[form]
    optimizer = gc.CompressedOptimizer(given)
    assert type(optimizer.inner_optimizer) is keras.optimizers.Adam
    if form != "name":
        assert float(optimizer.learning_rate) == 0.125
    if form == "object":
        assert optimizer.inner_optimizer is adam


@pytest.mark.parametrize("inner", [*OPTIMIZERS, *FEATURES], ids=label)
def test_config_round_trips(inner):
    compressor = gc.compressors.AdaComp(bin_sizes=60, scale_factor=3.0, overrides={"bias": None})
    policy = gc.Policy({"kernel": "convolution"}, max_dense_elements=100)
    optimizer = gc.CompressedOptimizer(copy_of(inner), compressor, policy, name="mine")
    again = [
        gc.CompressedOptimizer.from_config(optimizer.get_config()),
        keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
        keras.optimizers.get(keras.optimizers.serialize(optimizer)),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer)),
    ]
    for copy in again:
        assert type(copy) is gc.CompressedOptimizer
        assert copy is not optimizer
        assert copy.get_config() == optimizer.get_config()
        assert copy.name == "mine"
        assert type(copy.inner_optimizer) is type(inner)
        assert copy.compressor.get_config() == compressor.get_config()
        assert copy.exchange.policy.get_config() == policy.get_config()


def test_a_custom_inner_optimizer_comes_back_by_custom_objects():
    class Mine(keras.optimizers.SGD):
        pass

    config = gc.CompressedOptimizer(Mine(0.5)).get_config()
    copy = gc.CompressedOptimizer.from_config(config, custom_objects={"Mine": Mine})
    assert type(copy.inner_optimizer) is Mine


@pytest.mark.parametrize("wrong", [None, 3, keras.optimizers.Adam, object()], ids=str)
def test_what_is_no_optimizer_is_refused(wrong):
    with pytest.raises(TypeError, match=r"expected a Keras 3 optimizer.*; received"):
        gc.CompressedOptimizer(wrong)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="adamantium"):
        gc.CompressedOptimizer("adamantium")
    with pytest.raises(ValueError, match="unknown name 'zip'"):
        gc.CompressedOptimizer("adam", "zip")
    with pytest.raises(TypeError, match="expected a name"):
        gc.CompressedOptimizer("adam", 5)


@pytest.mark.parametrize("scaled", [False, True])
def test_wrapping_twice_is_refused(scaled):
    inner = gc.CompressedOptimizer("adam")
    if scaled:
        inner = keras.optimizers.LossScaleOptimizer(inner)
    with pytest.raises(ValueError, match="compressed already; wrap it once"):
        gc.CompressedOptimizer(inner)


def test_a_compressor_on_strategy_and_optimizer_is_refused():
    with (
        gc.MultiWorkerMirroredStrategy(compressor="adacomp").scope(),
        pytest.raises(ValueError, match="on both the strategy and the optimizer"),
    ):
        gc.CompressedOptimizer("adam")


def test_a_cross_replica_context_is_refused():
    replicas = Replicas("sgd")
    with (
        replicas.strategy.scope(),
        pytest.raises(ValueError, match=r"in a replica context, inside strategy.run"),
    ):
        replicas.optimizer.apply([tf.ones(v.shape) for v in replicas.variables], replicas.variables)


@pytest.mark.parametrize("count", [1, 2])
def test_a_variable_that_it_was_not_built_for_is_refused(count):
    replicas = Replicas("sgd", mirrored(count))
    with replicas.strategy.scope():
        stranger = keras.Variable(np.zeros(3, "float32"), name="stranger")
    step = stepper(replicas.strategy, lambda g: replicas.optimizer.apply(g, [stranger]))
    with pytest.raises(ValueError, match="'stranger' is not among those whose gradients"):
        step([[np.zeros(3, "float32")]] * count)


def test_gradients_without_variables_need_a_built_optimizer():
    with pytest.raises(ValueError, match=r"call optimizer.build\(variables\) first"):
        gc.CompressedOptimizer("sgd").apply([tf.ones(3)])


@pytest.mark.parametrize("count", [1, 2])
def test_a_wrong_number_of_gradients_is_refused(count):
    replicas = Replicas("sgd", mirrored(count))
    step = stepper(replicas.strategy, lambda g: replicas.optimizer.apply(g, replicas.variables))
    with pytest.raises(ValueError, match=r"received 1 gradients for 2 variables"):
        step([[np.zeros((40, 30), "float32")]] * count)


def test_no_gradient_at_all_is_refused():
    replicas = Replicas("sgd")
    step = stepper(
        replicas.strategy, lambda g: replicas.optimizer.apply([None, None], replicas.variables)
    )
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        step(gradients_at(0))


def test_a_float64_variable_is_refused():
    with pytest.raises(ValueError, match=r"'wide' is float64.*Change its dtype"):
        gc.CompressedOptimizer("sgd").build(
            [keras.Variable(np.zeros(3), dtype="float64", name="wide")]
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_variables(dtype):
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(np.zeros((20, 30)), dtype=dtype, name="kernel")
        optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([variable])
    step = stepper(strategy, lambda grads: optimizer.apply(grads, [variable]))
    gradient = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    for _ in range(2):
        step([[tf.cast(gradient, dtype)]] * 2)
    residuals = copies(strategy, optimizer.exchange.residuals[0])
    assert residuals[0].dtype == np.float32
    total = sum(residuals) - tf.cast(variable.value, tf.float32).numpy()
    np.testing.assert_allclose(total, 4 * gradient, atol=0.2)


def test_overlapping_names_are_told_apart():
    strategy = mirrored(2)
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros((i, 5), "float32"), name=name)
            for i, name in enumerate(["kernel", "kernel", "kernel_1", "kernel"], 1)
        ]
        optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build(variables)
    paths = [spec.path for spec in optimizer.exchange.specs]
    assert len(set(paths)) == 4
    step = stepper(strategy, lambda grads: optimizer.apply(grads, variables))
    step([[np.full((i, 5), i, "float32") for i in range(1, 5)]] * 2)
    for i, variable in enumerate(variables, 1):
        np.testing.assert_array_equal(variable.numpy(), np.full((i, 5), -2 * i))


def test_parameter_servers_are_refused(monkeypatch):
    cluster = tf.train.ClusterSpec(
        {"chief": ["localhost:1"], "ps": ["localhost:2"], "worker": ["localhost:3"]}
    )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    # Its constructor would connect to the servers.
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    with pytest.raises(ValueError, match=r"not work under ParameterServerStrategy.*; use"):
        gc.CompressedOptimizer("sgd")
    assert resolver.cluster_spec().num_tasks("ps") == 1


def test_tpus_are_refused(monkeypatch):
    strategy = object.__new__(tf.distribute.TPUStrategy)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    with pytest.raises(ValueError, match="not work under TPUStrategy"):
        gc.CompressedOptimizer("sgd")


def test_xla_is_refused_with_several_replicas():
    replicas = Replicas("sgd")
    gradients = [
        per_replica(replicas.strategy, list(g)) for g in zip(*gradients_at(0), strict=True)
    ]

    @tf.function(jit_compile=True, autograph=False)
    def compiled(*grads):
        replicas.optimizer.apply(list(grads), replicas.variables)

    with pytest.raises(ValueError, match="use jit_compile=False"):
        replicas.strategy.run(compiled, gradients)


def test_an_optimizer_created_outside_of_the_scope_is_refused():
    optimizer = gc.CompressedOptimizer("adam")
    with mirrored(2).scope(), pytest.raises(ValueError, match="outside of the strategy's scope"):
        optimizer.build(new_variables())


@pytest.mark.parametrize(
    "made",
    [
        lambda: gc.CompressedOptimizer("adam", policy="dense"),
        lambda: gc.MultiWorkerMirroredStrategy(compressor="adacomp", policy="dense"),
    ],
    ids=["optimizer", "strategy"],
)
def test_a_policy_that_is_none_is_refused(made):
    with pytest.raises(TypeError, match=r"policy: expected a gc\.Policy; received 'dense'"):
        made()


def test_an_inner_optimizer_created_outside_of_the_scope_is_refused():
    inner = keras.optimizers.SGD()
    with mirrored(2).scope(), pytest.raises(ValueError, match="outside of the strategy's scope"):
        gc.CompressedOptimizer(inner).build(new_variables())


def test_an_optimizer_built_outside_of_the_strategy_is_refused():
    strategy = mirrored(2)
    with strategy.scope():
        variables = new_variables()
    optimizer = gc.CompressedOptimizer("sgd")
    optimizer.build(variables)
    step = stepper(strategy, lambda grads: optimizer.apply(grads, variables))
    with pytest.raises(ValueError, match="scope"):
        step(gradients_at(0))
