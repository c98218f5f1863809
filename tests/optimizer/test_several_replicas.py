"""`CompressedOptimizer` on several replicas in one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close
from tests.optimizer.cases import (
    Replicas,
    every_feature,
    every_optimizer,
    gradients_at,
    iterations,
    new_variables,
)
from tests.replicas import (
    collective,
    copies,
    mirrored,
    names_without_stages,
    per_replica,
    stepper,
)


# tests/compressors has a gradient that is not finite with each method.
@pytest.mark.parametrize("compressor", ["no_compression", "adacomp", "max_norm", "power_sgd"])
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


@pytest.mark.parametrize("compressor", names_without_stages())
def test_replicas_of_one_process_that_talk_by_collectives_do_what_others_do_with(compressor):
    """A replica must not wait for another replica's check before its own collective."""
    talking, others = (
        Replicas(strategy=strategy, compressor=compressor, graph=strategy is collective())
        for strategy in (collective(), mirrored(2))
    )
    for step in range(3):
        talking.step(gradients_at(step))
        others.step(gradients_at(step))
    talking.assert_replicas_equal()
    np.testing.assert_array_equal(talking.value(), others.value())


@pytest.mark.parametrize("warmup", ["no_compression", "scalecom(rates=2)"])
def test_replicas_of_one_process_end_a_warm_up_together(warmup):
    compressor = f"scalecom(rates=4, warmup_steps=2, warmup={warmup!r})"
    replicas = Replicas(strategy=collective(), compressor=compressor, graph=True)
    for step in range(4):
        replicas.step(gradients_at(step))
    replicas.assert_replicas_equal()
    assert np.all(np.isfinite(replicas.value()))


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
    for step in range(4):
        replicas.step(gradients_at(step, 1, bad=0 if step == 1 else None))
    assert np.isfinite(replicas.value()).all()
    assert replicas.optimizer.exchange.skipped_steps.numpy() == 1


@pytest.mark.parametrize("compressor", names_without_stages())
def test_state_is_saved_and_restored_with(compressor, tmp_path):
    first, second = (Replicas(keras.optimizers.Adam(0.1), compressor=compressor) for _ in range(2))
    first.step(gradients_at(0))
    path = tf.train.Checkpoint(optimizer=first.optimizer).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(optimizer=second.optimizer).read(path).assert_consumed()
    for saved, restored in zip(first.optimizer.variables, second.optimizer.variables, strict=True):
        np.testing.assert_array_equal(saved.numpy(), restored.numpy())


@every_optimizer
def test_replicas_end_equal(inner):
    replicas = Replicas(inner)  # test_embeddings.py traces all optimizers
    before = replicas.value()
    for step in range(3):
        replicas.step(gradients_at(step))
    replicas.assert_replicas_equal()
    assert (replicas.value() != before).any()
    assert iterations(replicas.optimizer) == 3


@every_feature
def test_replicas_end_equal_with(inner):
    replicas = Replicas(inner, graph=True)
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
        total += sum(replica_gradients[0] for replica_gradients in gradients)
        replicas.step(gradients)
    replicas.assert_replicas_equal()
    residuals = replicas.residuals()
    assert len(residuals) == count
    assert (residuals[0] != residuals[1]).any()
    # Entries of a gradient are at most 5, of weights and residuals together at most as many.
    applied = start - replicas.value() + sum(residuals)
    assert_close(applied, total, terms=count + 2, steps=3, scale=5 * (3 * count + 1))


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


def test_an_optimizer_that_was_wrapped_sums_gradients_itself_when_used_alone():
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    replicas = Replicas(keras.optimizers.SGD(**settings), compressor="no_compression")
    replicas.step(gradients_at(0))
    inner = replicas.optimizer.inner_optimizer
    step = stepper(replicas.strategy, lambda grads: inner.apply(grads, replicas.variables))
    step(gradients_at(1))
    replicas.assert_replicas_equal()
    plain, variables = keras.optimizers.SGD(**settings), new_variables()
    for step in range(2):
        plain.apply([sum(copies) for copies in zip(*gradients_at(step), strict=True)], variables)
    np.testing.assert_array_equal(replicas.value(), variables[0].numpy())


@pytest.mark.parametrize(
    "inner",
    [
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
        keras.optimizers.Adam(0.1),
    ],
    ids=["momentum", "accumulation", "scaled", "adam"],
)
@pytest.mark.parametrize("count", [1, 2])
def test_weights_may_be_set(inner, count):
    first, second = (Replicas(inner, mirrored(count), precondition=None) for _ in range(2))
    for step in range(4):
        first.step(gradients_at(step, count))
    second.optimizer.set_weights([v.numpy() for v in first.optimizer.variables])
    for ours, theirs in zip(second.optimizer.variables, first.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    assert iterations(second.optimizer) == iterations(first.optimizer) > 0


def test_weights_of_each_optimizer_in_a_multi_optimizer_may_be_set():
    def new():
        variables = new_variables()
        each = (gc.CompressedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)) for _ in range(2))
        kernel_optimizer, other_optimizer = each
        multi = keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(other_optimizer, {"kernel": kernel_optimizer})
        )
        multi.build(variables)
        return multi, variables

    (first, variables), (second, _) = new(), new()
    first.apply([tf.ones(v.shape) for v in variables], variables)
    second.set_weights([v.numpy() for v in first.variables])
    for ours, theirs in zip(second.variables, first.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_other_weights_are_not_set():
    optimizer = Replicas(keras.optimizers.SGD(0.1, momentum=0.9)).optimizer
    weights = [v.numpy() for v in optimizer.variables]
    with pytest.raises(ValueError, match="4 variables of its inner optimizer; received 3 weights"):
        optimizer.set_weights(weights[1:])
    with pytest.raises(ValueError, match=r"has shape \(40, 30\); received \(30,\)"):
        optimizer.set_weights([*weights[:2], weights[3], weights[3]])
    with pytest.raises(ValueError, match=r"call build\(model.trainable_variables\)"):
        gc.CompressedOptimizer("sgd").set_weights(weights)
    divided = Replicas("adam").optimizer
    with pytest.raises(ValueError, match=r"Use model.save_weights and model.load_weights"):
        divided.set_weights([v.numpy() for v in divided.variables])


def test_clips_the_reduced_gradient():
    whole = gc.compressors.AdaComp(dict.fromkeys(["dense", "vector"]))
    replicas = Replicas(keras.optimizers.SGD(1.0, clipvalue=1.0), compressor=whole)
    start = replicas.value(1)
    ones = [np.zeros((40, 30), "float32"), np.full(30, 0.75, "float32")]
    replicas.step([ones, ones])
    np.testing.assert_array_equal(start - replicas.value(1), 1.0)


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
    step = stepper(strategy, lambda grads: optimizer.apply(grads, variables), graph=True)
    for index in range(2):
        step(gradients_at(index))
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
    assert optimizer.exchange.traffic().exchanges == 1


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
