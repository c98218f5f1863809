"""`CompressedOptimizer` of Keras 2 on several replicas of one process, and with loss scalers.

The code of `tf_keras` equals Keras 2.15's, so these tests run with only one of the two.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.keras2.models import small_model
from tests.replicas import copies, mirrored, stepper

keras = tf.keras
legacy = keras.optimizers.legacy


@pytest.mark.parametrize("adam", [keras.optimizers.Adam, legacy.Adam])
def test_replicas_of_one_process_stay_equal_with_separate_second_moments(adam):
    strategy, before = mirrored(), np.linspace(1, 2, 60, dtype="float32")
    with strategy.scope():
        variable = tf.Variable(before)
        optimizer = gc.CompressedOptimizer(adam(0.01), gc.compressors.AdaComp(20))
        optimizer.build([variable])

    def apply(gradients):
        optimizer.apply_gradients([(gradients[0], variable)])

    step, random = stepper(strategy, apply, graph=True), np.random.default_rng(0)
    for _ in range(3):
        step(random.normal(size=(2, 1, 60)).astype("float32"))
    first, second = copies(strategy, variable)
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - before).max() > 0


def test_slices_may_be_given_without_a_shape_or_with_a_tuple():
    values, indices = np.ones((3, 2), "float32"), np.array([0, 5, 5])

    def trained(shape):
        strategy = mirrored()
        with strategy.scope():
            table = tf.Variable(np.zeros((9, 2), "float32"))
            optimizer = gc.CompressedOptimizer(keras.optimizers.Adam(0.01))
            optimizer.build([table])

        def apply(given):
            optimizer.apply_gradients([(tf.IndexedSlices(*given, shape), table)])

        stepper(strategy, apply, graph=True)([[values, indices]] * 2)
        return table.numpy()

    expected = trained(np.array([9, 2]))
    assert np.count_nonzero(expected) == 4
    for shape in (None, (9, 2)):
        np.testing.assert_array_equal(trained(shape), expected)


@pytest.mark.parametrize("adam", [keras.optimizers.Adam, legacy.Adam])
def test_an_adam_whose_second_moments_are_kept_for_it_is_refused_in_another_and_alone(adam):
    strategy = mirrored()
    with strategy.scope():
        variable, inner = tf.Variable(np.ones(60, "float32")), adam(0.01)
        optimizer = gc.CompressedOptimizer(inner, "adacomp")
        second = gc.CompressedOptimizer(inner, "no_compression")
        for _ in range(2):
            optimizer.build([variable])
        with pytest.raises(ValueError, match="Use a new optimizer"):
            second.build([variable])
        with pytest.raises(ValueError, match="Use a new optimizer"):
            gc.CompressedOptimizer(keras.mixed_precision.LossScaleOptimizer(inner))
        gc.CompressedOptimizer.from_config(optimizer.get_config()).build([variable])
    gradients = np.ones((2, 1, 60), "float32")
    single = stepper(
        strategy, lambda grads: inner.apply_gradients([(grads[0], variable)]), graph=True
    )
    with pytest.raises(ValueError, match="much too long, alone or in another"):
        single(gradients)
    np.testing.assert_array_equal(variable.numpy(), np.ones(60))
    stepper(strategy, lambda grads: optimizer.apply_gradients([(grads[0], variable)]), graph=True)(
        gradients
    )
    assert (variable.numpy() < 1).all()


@pytest.mark.parametrize("sgd", [keras.optimizers.SGD, legacy.SGD])
def test_an_optimizer_that_was_wrapped_sums_gradients_itself_when_used_alone(sgd):
    strategy = mirrored()
    with strategy.scope():
        variable, inner = tf.Variable(np.ones(3, "float32")), sgd(0.25)
        optimizer = gc.CompressedOptimizer(inner, "no_compression")
    for used in (optimizer, inner):
        step = stepper(
            strategy, lambda g, used=used: [used.apply_gradients([(g[0], variable)])], graph=True
        )
        step(np.array([[[1, 2, 3]], [[2, 2, 2]]], "float32"))
    for copy in copies(strategy, variable):
        np.testing.assert_array_equal(copy, 1 - 2 * 0.25 * np.array([3, 4, 5]))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"dynamic": False, "initial_scale": 1024.0}])
def test_of_a_loss_scaler_around_and_one_inside_the_one_around_counts(settings, replicas):
    """`compile` adds one around under `mixed_float16`; both scales would be too much together."""
    scaled = functools.partial(keras.mixed_precision.LossScaleOptimizer, **settings)
    weights = []
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        for scaler in (scaled, lambda inner: inner):
            with mirrored(replicas).scope():
                inner = scaler(keras.optimizers.SGD(0.1))
                model = small_model(gc.CompressedOptimizer(inner, "no_compression"))
            x = np.arange(24).reshape(12, 2) % 6
            model.fit(x, x.sum(1) / 5, batch_size=4, epochs=2, shuffle=False, verbose=0)
            assert float(model.optimizer.loss_scale) == 2**15
            weights.append(model.get_weights())
    finally:
        keras.mixed_precision.set_global_policy("float32")
    for left, right in zip(*weights, strict=True):
        np.testing.assert_array_equal(left, right)
        assert np.isfinite(left).all()


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_one_replica_counts_what_a_loss_scaler_skips(inside, dynamic):
    scaled = functools.partial(
        keras.mixed_precision.LossScaleOptimizer, dynamic=dynamic, initial_scale=8
    )
    inner = keras.optimizers.SGD(0.25)
    compressed = gc.CompressedOptimizer(scaled(inner) if inside else inner)
    optimizer = compressed if inside else scaled(compressed)
    variables = [tf.Variable(np.ones(3, "float32"), name=name) for name in "ab"]
    for bad in (False, True, False):
        gradient = tf.constant([1, np.nan if bad else 1, 1], tf.float32)
        optimizer.apply_gradients([(gradient, variables[0]), (tf.ones(3), variables[1])])
    assert np.isfinite(variables[0].numpy()).all() == dynamic
    if dynamic:
        assert int(compressed.exchange.skipped_steps.numpy()) == 1


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("sgd", [keras.optimizers.SGD, legacy.SGD])
def test_a_bad_step_is_skipped_with_any_loss_scaler_inside(sgd, dynamic):
    """A loss scaler with a fixed scale does not check whether gradients are finite."""
    strategy = mirrored()
    with strategy.scope():
        variables = [tf.Variable(np.ones(3, "float32"), name=name) for name in "ab"]
        scaler = keras.mixed_precision.LossScaleOptimizer(
            sgd(0.25), dynamic=dynamic, initial_scale=128
        )
        optimizer = gc.CompressedOptimizer(scaler, "no_compression")
        optimizer.build(variables)
    step = stepper(
        strategy,
        lambda grads: optimizer.apply_gradients(list(zip(grads, variables, strict=True))),
        graph=True,
    )
    good = np.ones((2, 2, 3), "float32")  # [replicas, variables, elements]
    bad = good.copy()
    bad[1, 0] = np.nan
    for gradients in (good, bad):
        step(gradients)
    assert int(optimizer.exchange.skipped_steps.numpy()) == 1
    for variable in variables:
        for copy in copies(strategy, variable):
            np.testing.assert_array_equal(copy, np.full(3, 1 - 0.25 * 2))
