"""Tests the clear errors of `CompressedOptimizer`."""

from __future__ import annotations

import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import adam_bound, assert_close
from tests.optimizer.cases import Replicas, gradients_at, new_variables
from tests.replicas import mirrored, stepper
from tests.workers import run_workers


def test_errors_name_what_users_know():
    with pytest.raises(TypeError, match=r"Pass a compressor by its name: compressor=\.\.\."):
        gc.MultiWorkerMirroredStrategy("adacomp")
    with pytest.raises(AttributeError, match=r"did you mean gc\.compressors\.AdaComp\?"):
        _ = gc.AdaComp


@pytest.mark.parametrize("scaled", [False, True])
def test_wrapping_twice_is_refused(scaled):
    inner = gc.CompressedOptimizer("adam")
    if scaled:
        inner = keras.optimizers.LossScaleOptimizer(inner)
    with pytest.raises(ValueError, match="already compressed; wrap it only once"):
        gc.CompressedOptimizer(inner)


@pytest.mark.parametrize(
    "compressor",
    [
        *("adacomp", "max_norm", "lgreco(method='top_k')"),
        "cast(warmup_steps=2, warmup='top_k')",
    ],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_adafactor_that_makes_nan_of_zeros_is_warned_of(compressor, scaled):
    inner = keras.optimizers.Adafactor(0.01)
    if scaled:
        inner = keras.optimizers.LossScaleOptimizer(inner)
    with mirrored(2).scope(), pytest.warns(UserWarning, match="Adafactor makes NaN of .*epsilon_1"):
        gc.CompressedOptimizer(inner, compressor)


@pytest.mark.parametrize(
    ("compressor", "settings", "replicas"),
    [("cast", {}, 2), ("adacomp", {"epsilon_1": 1e-15}, 2), ("adacomp", {}, 1)],
)
def test_adafactor_is_not_warned_of_where_no_zeros_are_lost(compressor, settings, replicas):
    with mirrored(replicas).scope(), warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.CompressedOptimizer(keras.optimizers.Adafactor(0.01, **settings), compressor)


def test_the_default_choice_with_adafactor_is_between_methods_that_it_can_follow():
    with mirrored(2).scope():
        optimizer = gc.CompressedOptimizer(keras.optimizers.Adafactor(0.01), "auto")
        names = [c.compressor.name for c in optimizer.exchange._method.candidates]
    assert names == ["no_compression", "cast"]


ADAFACTOR_UNDER_A_STRATEGY = """
    import keras
    import numpy as np
    import tf_gradcomp as gc

    with gc.MultiWorkerMirroredStrategy(compressor="adacomp").scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.Adafactor(0.01), "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 3)), verbose=0)
"""


def test_adafactor_is_warned_of_with_a_compressor_on_the_strategy_as_well():
    for worker in run_workers(ADAFACTOR_UNDER_A_STRATEGY, 2):
        assert "Adafactor makes NaN of" in worker.stderr


@pytest.mark.filterwarnings("ignore:Adafactor makes NaN:UserWarning")  # shapes are not known yet
def test_adafactor_of_vectors_alone_has_no_rows_and_columns_to_lose():
    with mirrored(2).scope() as strategy:
        variable = keras.Variable(np.zeros(4, "float32"), name="bias")
        optimizer = gc.CompressedOptimizer(keras.optimizers.Adafactor(0.01), "top_k")
        optimizer.build([variable])
    step = stepper(strategy, lambda g: optimizer.apply(g, [variable]))
    for _ in range(3):
        step([[np.array([1, 0, 0, 0], "float32")]] * 2)
    assert np.isfinite(variable.numpy()).all()


WHOLE = "adacomp(overrides={'.*': None})"


@pytest.mark.filterwarnings("ignore:Adafactor makes NaN:UserWarning")
@pytest.mark.parametrize("compressor", ["cast", "power_sgd", WHOLE])
def test_adafactor_trains_behind_methods_that_send_all(compressor):
    replicas = Replicas(keras.optimizers.Adafactor(0.01), compressor=compressor)
    for step in range(3):
        replicas.step(gradients_at(step))
    assert np.isfinite(replicas.value()).all()


@pytest.mark.parametrize("name", ["epsilon", "beta_2"])
def test_an_adam_that_is_changed_after_it_was_wrapped_is_refused(name):
    with mirrored(2).scope():
        adam = keras.optimizers.Adam()
        optimizer = gc.CompressedOptimizer(adam)
        setattr(adam, name, 0.5)
        with pytest.raises(ValueError, match="was changed after it was wrapped"):
            optimizer.build(new_variables())


def wrapped_again(inner):
    return gc.CompressedOptimizer(inner, "no_compression")


def wrapped_again_in_a_scaler(inner):
    return gc.CompressedOptimizer(keras.optimizers.LossScaleOptimizer(inner), "no_compression")


@pytest.mark.parametrize("again", [wrapped_again, wrapped_again_in_a_scaler])
def test_an_adam_whose_second_moments_are_kept_for_it_is_refused_in_another(again):
    replicas = Replicas(keras.optimizers.Adam(0.01))
    with (
        replicas.strategy.scope(),
        pytest.raises(ValueError, match=r"keeps its second moments.*Use a new optimizer"),
    ):
        again(replicas.optimizer.inner_optimizer)


def test_an_adam_in_two_wrappers_is_refused_when_the_second_is_built():
    with mirrored(2).scope():
        inner, variables = keras.optimizers.Adam(0.01), new_variables()
        first, second = gc.CompressedOptimizer(inner), wrapped_again(inner)
        first.build(variables)
        first.build(variables)
        with pytest.raises(ValueError, match=r"keeps its second moments"):
            second.build(variables)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_adam_whose_second_moments_are_kept_for_it_is_refused_alone(scaled):
    replicas = Replicas(keras.optimizers.Adam(0.01))
    single = replicas.optimizer.inner_optimizer
    if scaled:
        with replicas.strategy.scope():
            single = keras.optimizers.LossScaleOptimizer(single)
    replicas.step(gradients_at(0))
    before = replicas.value()
    step = stepper(replicas.strategy, lambda grads: single.apply(grads, replicas.variables))
    with pytest.raises(ValueError, match=r"much too long, alone or in another"):
        step(gradients_at(1))
    np.testing.assert_array_equal(replicas.value(), before)
    replicas.step(gradients_at(2))
    replicas.assert_replicas_equal()


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


@pytest.mark.parametrize("inner", ["sgd", "adam"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_variable_that_it_was_not_built_for_is_refused(count, inner):
    replicas = Replicas(inner, mirrored(count))
    with replicas.strategy.scope():
        stranger = keras.Variable(np.zeros(3, "float32"), name="stranger")
    step = stepper(replicas.strategy, lambda g: replicas.optimizer.apply(g, [stranger]))
    message = "'stranger' is not among the variables whose gradients.*compile with a new Compressed"
    with pytest.raises(ValueError, match=message):
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
        replicas.strategy,
        lambda g: replicas.optimizer.apply([None, None], replicas.variables),
    )
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        step(gradients_at(0))


@pytest.mark.parametrize("steps", [None, 2])
def test_a_gradient_in_float64_is_refused_by_several_replicas_before_the_first_update(steps):
    strategy = mirrored(2)
    with strategy.scope():
        wide = keras.Variable(np.zeros(3), dtype="float64", name="wide")
        inner = keras.optimizers.SGD(gradient_accumulation_steps=steps)
        optimizer = gc.CompressedOptimizer(inner)
        optimizer.build([wide])
    with pytest.raises(ValueError, match=r"'wide' is float64.*Change its dtype"):
        strategy.run(lambda: optimizer.apply([tf.ones(3, tf.float64)], [wide]))


def test_a_variable_that_was_created_outside_of_the_scope_is_refused():
    outside = keras.Variable(np.zeros(3), name="outside")
    with mirrored(2).scope():
        optimizer = gc.CompressedOptimizer("sgd")
        with pytest.raises(ValueError, match=r"'outside' was created outside the scope"):
            optimizer.build([outside])


def test_one_replica_trains_a_float64_variable():
    wide = keras.Variable(np.zeros(3), dtype="float64", name="wide")
    optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([wide])
    optimizer.apply([tf.fill([3], tf.constant(1 / 3, tf.float64))], [wide])
    np.testing.assert_array_equal(wide.numpy(), np.full(3, -1 / 3))


def multi_optimizer():
    keras_optimizers = keras.optimizers
    return keras_optimizers.MultiOptimizer(
        keras_optimizers.OptimizerMap(keras_optimizers.SGD(1.0), {"bias": keras_optimizers.Adam()})
    )


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
@pytest.mark.parametrize("around", [lambda inner: inner, keras.optimizers.LossScaleOptimizer])
def test_optimizers_that_reduce_by_themselves_are_refused(around):
    with pytest.raises(ValueError, match=r"would reduce them twice\. Wrap each optimizer inside"):
        gc.CompressedOptimizer(around(multi_optimizer()))


class Delegating(keras.optimizers.Optimizer):
    """Composed as Keras' own loss scaler is: it has another optimizer apply the gradients."""

    def __init__(self, inner_optimizer):
        super().__init__(learning_rate=0.0)
        self.inner_optimizer = inner_optimizer

    def build(self, variables):
        super().build(variables)
        self.inner_optimizer.build(variables)

    def apply(self, grads, trainable_variables=None):
        self.inner_optimizer.apply(grads, trainable_variables)


@pytest.mark.parametrize("count", [1, 2])
def test_an_optimizer_that_applies_by_another_one_is_refused_inside_and_works_around(count):
    """The one inside would sum what are sums already."""
    strategy = mirrored(count) if count > 1 else tf.distribute.get_strategy()

    def moved(make):
        with strategy.scope():
            variable = keras.Variable(np.zeros(1, "float32"), name="kernel")
            optimizer = make(keras.optimizers.SGD(1.0))
            optimizer.build([variable])
        step = stepper(strategy, lambda grads: optimizer.apply(grads, [variable]))
        step([[np.float32([2 * replica + 1])] for replica in range(count)])
        return variable.numpy().tolist()

    def compressed(inner):
        return gc.CompressedOptimizer(inner, "no_compression")

    assert moved(lambda sgd: Delegating(compressed(sgd))) == [-(count**2)]
    if count == 1:
        assert moved(lambda sgd: compressed(Delegating(sgd))) == [-1]
    else:
        with pytest.raises(ValueError, match=r"Put Delegating around it: Delegating\(Compressed"):
            moved(lambda sgd: compressed(Delegating(sgd)))


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
def test_a_loss_scaler_whose_scale_nothing_applies_is_refused():
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    inside = keras.optimizers.OptimizerMap(gc.CompressedOptimizer(scaler), {})
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.MultiOptimizer(inside), "mse")
    with pytest.raises(ValueError, match=r"Put a LossScaleOptimizer around the MultiOptimizer"):
        model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)


@pytest.mark.parametrize("name", ["clipnorm", "global_clipnorm", "clipvalue", "weight_decay"])
@pytest.mark.parametrize("count", [1, 2])
def test_settings_on_the_wrapper_instead_of_the_inner_optimizer_are_refused(name, count):
    replicas = Replicas(keras.optimizers.SGD(1.0), mirrored(count))
    setattr(replicas.optimizer, name, 0.01)
    with pytest.raises(ValueError, match=rf"optimizer.inner_optimizer.{name} = "):
        replicas.step(gradients_at(0, count))


class MyAdam(keras.optimizers.Adam):
    """An optimizer of unknown behaviour."""


@pytest.mark.parametrize("precondition", ["local", None])
def test_momentums_of_divided_gradients_are_not_loaded_into_a_subclass_of_adam(
    precondition, tmp_path
):
    def compiled(optimizer, strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            model.compile(optimizer, "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    strategy, file = mirrored(2), tmp_path / "job.weights.h5"
    with strategy.scope():
        adam = gc.CompressedOptimizer(keras.optimizers.Adam(0.1), precondition=precondition)
    saved = compiled(adam, strategy)
    step = stepper(strategy, lambda grads: adam.apply(grads, saved.trainable_variables))
    step([[np.ones((3, 2), "float32"), np.ones(2, "float32")]] * 2)
    saved.save_weights(file)
    other = compiled(gc.CompressedOptimizer(MyAdam(0.1)), tf.distribute.get_strategy())
    if precondition is None:
        other.load_weights(file)
        momentum = other.optimizer.variables[2].numpy()
        assert_close(momentum, np.full((3, 2), 0.2), adam_bound(0.9))  # 0.1 is 1 - 0.9 in float32
    else:
        with pytest.raises(ValueError, match="momentums in the file would not fit"):
            other.load_weights(file)


def test_variables_that_gradients_overwrite_are_refused_by_several_replicas():
    with mirrored(2).scope():
        scale = keras.Variable(np.ones(3, "float32"), name="scale")
        scale.overwrite_with_gradient = True
        with pytest.raises(ValueError, match="scale are new values for these variables"):
            gc.CompressedOptimizer("sgd").build([scale])


def test_one_replica_overwrites_variables_as_keras_does():
    scale = keras.Variable(np.ones(3, "float32"), name="scale")
    scale.overwrite_with_gradient = True
    optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([scale])
    optimizer.apply([tf.fill([3], 5.0)], [scale])
    np.testing.assert_array_equal(scale.numpy(), np.full(3, 5.0))


def test_parameter_servers_are_refused(monkeypatch):
    cluster = tf.train.ClusterSpec(
        {"chief": ["localhost:1"], "ps": ["localhost:2"], "worker": ["localhost:3"]}
    )
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    # The strategy's constructor would connect to the servers.
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


def test_an_optimizer_created_outside_of_the_scope_is_refused():
    optimizer = gc.CompressedOptimizer("adam")
    with mirrored(2).scope(), pytest.raises(ValueError, match="outside the strategy's scope"):
        optimizer.build(new_variables())


def test_an_inner_optimizer_created_outside_of_the_scope_is_refused():
    inner = keras.optimizers.SGD()
    with mirrored(2).scope(), pytest.raises(ValueError, match="outside the strategy's scope"):
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


class Mistaken(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        raise ValueError("a mistake of the program")


def test_the_frames_of_a_program_with_a_similar_name_are_shown():
    names = {"Mistaken": Mistaken}
    source = """
class Beside(Mistaken):
    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
"""
    exec(compile(source, f"{Path(gc.__file__).parent}_of_mine.py", "exec"), names)
    with gc.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(gc.CompressedOptimizer("sgd"), "mse")
    with pytest.raises(ValueError, match="a mistake of the program") as error:
        model.fit(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0, callbacks=[names["Beside"]()])
    assert [entry.name for entry in error.traceback][-2:] == ["on_epoch_begin"] * 2


@pytest.mark.parametrize(
    ("rows", "filtered", "frames"),
    [
        (3, True, ["fit_of", "filtered"]),
        (4, True, ["fit_of", "filtered", "on_epoch_begin"]),
        (3, False, ["fit_of", "filtered", "fit", "enter_context"]),
    ],
)
def test_errors_of_fit_show_the_frames_of_the_program(rows, filtered, frames):
    with gc.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(gc.CompressedOptimizer("sgd"), "mse")

    def fit_of(x, y):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[Mistaken()])

    if not filtered:
        keras.config.disable_traceback_filtering()
    try:
        with pytest.raises(ValueError, match=r"Data cardinality|a mistake of") as error:
            fit_of(np.zeros((4, 2)), np.zeros((rows, 1)))
    finally:
        keras.config.enable_traceback_filtering()
    _, *found = [entry.name for entry in error.traceback]
    assert found[: len(frames)] == frames
    assert filtered == (len(found) == len(frames))
