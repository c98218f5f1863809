"""Steps that all replicas skip; loss scaling and accumulation."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close
from tests.optimizer.cases import Replicas, copy_of, gradients_at, iterations, new_variables
from tests.replicas import collective, copies, mirrored, names_without_stages, stepper
from tf_gradcomp.keras.common.inner import clip


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
    # Sent values return to the residuals; the bad replica's gradient is discarded.
    largest = np.nanmax(np.abs(residuals[bad] + gradients[bad][0]))
    assert_close(after[bad], residuals[bad], terms=2, scale=largest)
    good = 1 - bad
    assert_close(after[good], residuals[good] + gradients[good][0], terms=2)
    replicas.step(gradients_at(2))
    assert iterations(replicas.optimizer) == 2
    assert np.isfinite(replicas.value()).all()
    replicas.assert_replicas_equal()


@pytest.mark.parametrize("clipping", ["clipvalue", "clipnorm", "global_clipnorm"])
def test_clipping_hides_no_overflow(clipping):
    replicas = Replicas(keras.optimizers.Adam(0.1, **{clipping: 0.5}))
    replicas.step(gradients_at(0))
    before = replicas.value()
    gradients = gradients_at(1)
    gradients[1][0][3, 4] = np.inf
    replicas.step(gradients)
    np.testing.assert_array_equal(replicas.value(), before)
    assert replicas.optimizer.exchange.skipped_steps.numpy() == 1


def test_clipping_hides_no_overflow_of_a_slice():
    table = keras.Variable(np.zeros((3, 2), "float32"))
    slices = tf.IndexedSlices(tf.constant([[np.inf, 2.0]]), tf.constant([1]), (3, 2))
    [clipped] = clip(keras.optimizers.SGD(clipvalue=0.5), [slices], [table])
    np.testing.assert_array_equal(clipped.values, [[np.inf, 0.5]])
    np.testing.assert_array_equal(clipped.indices, [1])


def scaled(gradients, scale):
    return [
        [gradient * np.float32(scale) for gradient in replica_gradients]
        for replica_gradients in gradients
    ]


def outer_scaler(**kwargs):
    return lambda optimizer: keras.optimizers.LossScaleOptimizer(optimizer, **kwargs)


@pytest.mark.parametrize("where", ["inside", "around"])
def test_loss_scaling(where):
    if where == "inside":
        inner = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=64.0, dynamic_growth_steps=2
        )
        replicas = Replicas(inner, graph=True)
        scaler = replicas.optimizer.inner_optimizer
    else:
        around = outer_scaler(initial_scale=64.0, dynamic_growth_steps=2)
        replicas = Replicas(keras.optimizers.SGD(1.0), around=around, graph=True)
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


def in_multi_optimizer(optimizer):
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(optimizer, {}))


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("make", [mirrored, collective], ids=["copied", "collective"])
def test_a_loss_scaler_around_a_multi_optimizer_follows_what_all_replicas_saw(bad, make):
    scaler = outer_scaler(initial_scale=64.0)
    direct, multi = (
        Replicas(
            keras.optimizers.SGD(1.0),
            make(),
            around=around,
            graph=around is not scaler,
            compressor="no_compression",
        )
        for around in (scaler, lambda inner: scaler(in_multi_optimizer(inner)))
    )
    for step in range(4):
        step_gradients = gradients_at(step, bad=bad if step == 1 else None)
        for replicas in (direct, multi):
            replicas.step(scaled(step_gradients, replicas.outer.scale_loss(1.0)))
        scales = copies(multi.strategy, multi.outer.dynamic_scale)
        assert scales == copies(direct.strategy, direct.outer.dynamic_scale)
        np.testing.assert_array_equal(multi.value(), direct.value())
    assert scales == [32, 32]
    multi.assert_replicas_equal()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_of_two_loss_scalers_the_outer_one_counts(count, graph):
    scaled_by = keras.optimizers.LossScaleOptimizer
    inner = scaled_by(keras.optimizers.SGD(1.0, momentum=0.9), initial_scale=8.0)
    around = outer_scaler(initial_scale=64.0, dynamic_growth_steps=2)
    settings = {"around": around, "compressor": "no_compression", "graph": graph}
    replicas = Replicas(inner, mirrored(count), **settings)
    plain, variables = around(keras.optimizers.SGD(1.0, momentum=0.9)), new_variables()
    for step in range(4):
        gradients = gradients_at(step, count, bad=0 if step == 1 else None)
        gradients = scaled(gradients, plain.scale_loss(1.0))
        assert float(replicas.outer.scale_loss(1.0)) == float(plain.scale_loss(1.0))
        replicas.step(gradients)
        plain.apply([sum(copies) for copies in zip(*gradients, strict=True)], variables)
    np.testing.assert_array_equal(replicas.value(), variables[0].numpy())
    assert iterations(replicas.outer) == iterations(plain) == 3
    assert replicas.optimizer.exchange.skipped_steps.numpy() == 1
    replicas.assert_replicas_equal()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("xla", [False, True])
def test_one_replica_under_mixed_float16_trains_as_keras_and_counts_what_it_skips(inside, xla):
    def trained(wrap):
        keras.utils.set_random_seed(0)
        policy = keras.mixed_precision.dtype_policy()
        keras.mixed_precision.set_global_policy("mixed_float16")
        layers = [keras.Input((8,)), keras.layers.Dense(1, dtype="float32")]
        model = keras.Sequential(layers)
        keras.mixed_precision.set_global_policy(policy)
        optimizer = keras.optimizers.SGD(0.05)
        if inside:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(wrap(optimizer), "mse", jit_compile=xla)
        x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
        y = x.sum(1, keepdims=True)
        x[5] = np.nan
        monitor = [gc.callbacks.CompressionMonitor()] * (wrap is gc.CompressedOptimizer)
        options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
        return model, model.fit(x, y, callbacks=monitor, **options).history

    (ours, history), (theirs, _) = trained(gc.CompressedOptimizer), trained(lambda inner: inner)
    for weight, other_weight in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other_weight)
    assert history["skipped_steps"] == [1, 2]
    assert iterations(ours.optimizer) == iterations(theirs.optimizer) == 6


def test_one_replica_counts_what_the_loss_scaler_inside_skips():
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    optimizer, variables = gc.CompressedOptimizer(inner), new_variables()
    for step in range(4):
        (gradients,) = gradients_at(step, 1, bad=0 if step == 1 else None)
        optimizer.apply([tf.constant(gradient) for gradient in gradients], variables)
    assert optimizer.exchange.skipped_steps.numpy() == 1
    assert iterations(optimizer) == 3


@pytest.mark.parametrize("count", [1, 2])
def test_an_update_ends_the_round_of_variables_that_have_no_gradient_in_it(count):
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    strategy = mirrored(count)
    with strategy.scope():
        optimizer = gc.CompressedOptimizer(copy_of(inner), "no_compression")
        ours = new_variables()
        optimizer.build(ours)
    theirs = new_variables()
    plain = copy_of(inner)
    plain.build(theirs)
    for step, indices in enumerate(([0, 1], [0], [0, 1], [0, 1])):
        gradients = [
            [replica_gradients[i] for i in indices]
            for replica_gradients in gradients_at(step, count)
        ]
        variables = [ours[i] for i in indices]
        stepper(strategy, lambda g, of=variables: optimizer.apply(g, of))(gradients)
        sums = [tf.constant(sum(copies)) for copies in zip(*gradients, strict=True)]
        plain.apply(sums, [theirs[i] for i in indices])
    for ours_value, other in zip(ours, theirs, strict=True):
        assert_close(
            ours_value, other, terms=2 * count + 2, steps=2
        )  # each replica accumulates alone


@pytest.mark.parametrize("around", [None, outer_scaler(initial_scale=4.0)], ids=["", "scaled"])
def test_gradient_accumulation_exchanges_on_the_steps_that_update(around):
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    replicas = Replicas(inner, around=around, graph=True)
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
        assert_close(replicas.value(), plain.value(), terms=8, steps=2)
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


@pytest.mark.parametrize("name", names_without_stages())
def test_a_sum_that_float16_cannot_hold_does_not_come_back(name):
    """Residuals are as large, so methods that send little used to skip many steps."""
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(np.zeros((40, 30), "float16"), dtype="float16", name="kernel")
        optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(0.01), name)
        optimizer.build([variable])
    step = stepper(strategy, lambda gradients: optimizer.apply(gradients, [variable]), graph=True)
    generator = np.random.default_rng(0)
    for index in range(40):
        gradients = generator.normal(size=(2, 1, 40, 30)) + (4e4 if index == 1 else 0)
        step(gradients.astype("float16"))
    assert optimizer.exchange.skipped_steps.numpy() <= 1
    first, second = copies(strategy, variable)
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first).all()
