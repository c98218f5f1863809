"""Tests each private name that `private/` uses, and each replaced function.

When a test here fails, a release of TensorFlow or Keras has changed what its name says.
"""

import ast
import contextlib
import inspect
import pkgutil
import queue
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.framework import random_seed

import tf_gradcomp
from tests.patched import canonical
from tests.replicas import mirrored
from tests.workers import results, run_workers
from tf_gradcomp.keras.common import fit as fit_module
from tf_gradcomp.keras_version import install_patches
from tf_gradcomp.private import keras3 as keras_private
from tf_gradcomp.private import patching
from tf_gradcomp.private import tensorflow as tf_private
from tf_gradcomp.private.patching import PATCHES, ChangedFunctionError, UntestedVersionError
from tf_gradcomp.strategy import shuffles

pytestmark = [pytest.mark.oldest, pytest.mark.quick]
SOURCES = sorted(Path(tf_gradcomp.__file__).parent.rglob("*.py"))


install_patches()  # which makes the table complete


def part(target):
    """Returns the owner of a function, the function's name, and the function."""
    owner_name, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    return owner, name, vars(owner).get(name, getattr(owner, name))


def replace(monkeypatch, test, by):
    """Has `by` replace the function whose replacement has a test of this name."""
    (one,) = [each for each in PATCHES if each.test == test]
    owner, name, value = part(one.target)
    monkeypatch.setattr(owner, name, value)
    patching.apply([one._replace(by=by)], "", "", pytest.fail)


def noting(seen, *, self_only=True):
    """Returns a replacement that notes its arguments, and calls the original."""

    def by(original, *args, **kwargs):
        seen.append(args[0] if self_only else args)
        return original(*args, **kwargs)

    return by


@pytest.fixture
def optimizer():
    return keras.optimizers.SGD(1.0)


@pytest.fixture
def variable():
    return keras.Variable(np.zeros(2, "float32"), name="variable")


def test_end_in_background():
    taken, dropped, seen = threading.Event(), threading.Event(), queue.SimpleQueue()

    def batch(number):
        if number == 6:  # taken ahead
            taken.set()
            seen.put(dropped.wait(300))
        return number

    pause = lambda x: tf.numpy_function(batch, [x], tf.int64)  # noqa: E731
    numbers = tf.data.Dataset.range(8).map(pause).batch(2).prefetch(2)
    iterator = iter(mirrored(2).experimental_distribute_dataset(numbers))
    tf_private.end_in_background(iterator)
    next(iterator)
    assert taken.wait(300)  # else it may never be
    del iterator
    dropped.set()
    assert seen.get(timeout=300)


def test_begin_steps_with_local_data(monkeypatch):
    seen = []
    replace(monkeypatch, "test_begin_steps_with_local_data", noting(seen))
    strategy = mirrored(2)
    batches = tf.data.Dataset.range(3).batch(2)
    assert len(list(strategy.experimental_distribute_dataset(batches))) == 2
    assert set(seen) == {strategy}


def test_shuffle(monkeypatch, tmp_path):
    seen = []

    def by(original, self, buffer_size, seed=None, *args, **kwargs):
        seen.append(seed)
        return original(self, buffer_size, 4 if seed is None else seed, *args, **kwargs)

    replace(monkeypatch, "test_shuffle", by)
    rows = tf.data.Dataset.range(64)
    assert [*rows.shuffle(64)] == [*rows.shuffle(64, seed=4)] != [*rows.shuffle(64, 5)]
    for name in "abc":
        (tmp_path / name).touch()
    tf.data.Dataset.list_files(f"{tmp_path}/*")
    assert seen == [None, 4, 5, None]


def test_a_global_seed_is_seen_without_a_draw():
    tf.random.set_seed(None)
    assert tf.compat.v1.random.get_seed(0)[0] == shuffles.NO_GLOBAL_SEED
    draws = []
    for looks in (False, True):
        tf.random.set_seed(1)
        if looks:
            assert tf.compat.v1.random.get_seed(0)[0] == 1
        draws.append(tf.random.uniform([]).numpy())
    assert draws[0] == draws[1]


def test_undistributed_and_shared_by_workers():
    rows = tf.data.Dataset.range(4)
    names = tf.data.Dataset.from_tensor_slices(["a", "b"])
    read = names.interleave(lambda name: tf.data.TextLineDataset(name).skip(1)).shuffle(2)

    def of(dataset, policy=None):
        options = tf.data.Options()
        if policy:
            options.experimental_distribute.auto_shard_policy = policy
        strategy = mirrored(2)
        created = strategy.experimental_distribute_dataset(dataset.batch(2).with_options(options))
        assert tf_private.undistributed(created).element_spec.shape.rank == 1
        shared = tf_private.shared_by_workers(created)
        return shared and [np.array(item).tolist() for item in shared.as_numpy_iterator()]

    policies = tf.data.experimental.AutoShardPolicy
    assert of(rows) == of(rows, policies.DATA) == [[0, 1], [2, 3]]
    assert of(rows, policies.OFF) is of(rows, policies.FILE) is None
    assert of(read) == of(read, policies.FILE) == [b"a", b"b"]
    for reader in (tf.data.TFRecordDataset, tf.data.TextLineDataset):
        assert of(reader(["a", "b"])) == [b"a", b"b"]
    assert of(tf.data.FixedLengthRecordDataset(["a", "b"], 1)) == [b"a", b"b"]
    from_function = mirrored(2).distribute_datasets_from_function(lambda _: rows)
    assert tf_private.shared_by_workers(from_function) is None


def test_use_logical_cpus():
    # The tests of two levels use its result.
    ours = collective_all_reduce_strategy.CollectiveAllReduceExtended._initialize_local_devices
    assert list(inspect.signature(ours).parameters) == ["self", "cluster_resolver", "worker_device"]


def test_cross_device_ops_of_a_strategy_without():
    assert tf_private.cross_device_ops(tf.distribute.get_strategy()) is None


_RUNNING = """
import tensorflow as tf
from tf_gradcomp.private import tensorflow as tf_private

print(tf_private.is_running())
tf.zeros(1)
print(tf_private.is_running())
"""


def test_is_running():
    command = [sys.executable, "-c", _RUNNING]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_anonymous_name():
    handles = [
        tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=tf_private.anonymous_name())
        for _ in range(2)
    ]
    for index, handle in enumerate(handles):
        tf.raw_ops.AssignVariableOp(resource=handle, value=index)
    values = [tf.raw_ops.ReadVariableOp(resource=h, dtype=tf.int32).numpy() for h in handles]
    assert values == [0, 1]


def test_counting_replicas():
    strategy = tf.distribute.get_strategy()
    with tf_private.counting_replicas(3):
        assert strategy.num_replicas_in_sync == 3
    assert strategy.num_replicas_in_sync == 1


def test_save_as(tmp_path):
    variable, read = tf.Variable([1.0, 2.0]), []
    tf_private.save_as(variable, lambda: 2 * variable.read_value(), read.append)
    checkpoint = tf.train.Checkpoint(variable=variable)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(variable=(plain := tf.Variable([0.0, 0.0]))).read(path)
    np.testing.assert_array_equal(plain, [2, 4])
    checkpoint.read(path).assert_consumed()
    np.testing.assert_array_equal(read, [[2, 4]])
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    with pytest.raises(ValueError, match="asynchronous checkpoint would hold"):
        checkpoint.save(str(tmp_path / "later"), options)


def test_in_xla():
    seen = []

    def body():
        seen.append(tf_private.in_xla())
        return tf.constant(0)

    tf.function(body).get_concrete_function()
    tf.function(body, jit_compile=True).get_concrete_function()
    assert seen == [False, True]


def test_applying_at_once_sums_nothing(optimizer, monkeypatch):
    # the base class's, so that a new name for it would show
    calls = []
    monkeypatch.setattr(
        TFOptimizer, "_all_reduce_sum_gradients", lambda self, pairs: calls.append(1) or pairs
    )
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer.apply([tf.ones(2)], [variable])
    assert calls == [1]
    with keras_private.applying_at_once(optimizer):
        optimizer.apply([tf.ones(2)], [variable])
    assert calls == [1]
    optimizer.apply([tf.ones(2)], [variable])
    assert calls == [1, 1]
    np.testing.assert_array_equal(variable.numpy(), [-3, -3])


def test_applying_at_once_computes_the_learning_rate_once():
    calls = []

    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            calls.append(1)
            return 0.5 ** keras.ops.cast(step, "float32")

    def trained(context):
        optimizer = keras.optimizers.AdamW(Halving(), weight_decay=0.1)
        variables = [keras.Variable(np.ones(2, "float32")) for _ in range(3)]
        optimizer.build(variables)
        for _ in range(2):
            with context(optimizer):
                optimizer.apply([tf.constant([0.5, -2.0])] * 3, variables)
        return [variable.numpy() for variable in variables]

    by_keras = trained(lambda _: contextlib.nullcontext())
    assert len(calls) > 2  # in each step once for each variable, and for the update
    calls.clear()
    np.testing.assert_array_equal(trained(keras_private.applying_at_once), by_keras)
    assert len(calls) == 2


def test_applying_at_once_does_not_accumulate(variable):
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    optimizer.build([variable])
    with keras_private.applying_at_once(optimizer):
        optimizer.apply([tf.ones(2)], [variable])
    np.testing.assert_array_equal(variable.numpy(), [-1, -1])
    assert optimizer.gradient_accumulation_steps == 3
    assert type(optimizer) is keras.optimizers.SGD


def test_applying_at_once_counts_updates(variable):
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    optimizer.build([variable])
    keras_private.step_counter(optimizer).assign(8)
    with keras_private.applying_at_once(optimizer):
        assert int(optimizer.iterations) == 2
        optimizer.apply([tf.ones(2)], [variable])
    assert int(keras_private.step_counter(optimizer)) == 9
    assert int(optimizer.iterations) == 3


def test_applying_at_once_does_not_overwrite_by_averages(variable):
    optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=1)
    optimizer.build([variable])
    with keras_private.applying_at_once(optimizer):
        for _ in range(2):
            optimizer.apply([tf.ones(2)], [variable])
    np.testing.assert_array_equal(variable.numpy(), [-2, -2])
    assert optimizer.ema_overwrite_frequency == 1
    keras_private.overwrite_by_averages(optimizer)
    np.testing.assert_array_equal(variable.numpy(), [-1.5, -1.5])


def test_update_averages(variable):
    optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    optimizer.build([variable])
    optimizer.apply([np.ones(2, "float32")], [variable])
    variable.assign(np.full(2, 3.0))
    keras_private.update_averages(optimizer)
    optimizer.finalize_variable_values([variable])
    np.testing.assert_array_equal(variable.numpy(), np.full(2, (-1.0 + 3.0) / 2))


def test_variable_index(optimizer, variable):
    other = keras.Variable(np.zeros(2, "float32"))
    optimizer.build([other, variable])
    assert keras_private.variable_index(optimizer, variable) == 1
    assert keras_private.variable_index(optimizer, variable.value) == 1


def test_step_counter_counts_accumulating_steps(variable):
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    optimizer.apply([tf.ones(2)], [variable])
    assert int(keras_private.step_counter(optimizer)) == 1
    assert int(optimizer.iterations) == 0


def test_accumulators(variable):
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    optimizer.apply([tf.ones(2)], [variable])
    (total,) = keras_private.accumulators(optimizer)
    np.testing.assert_array_equal(total.numpy(), [1, 1])


def test_apply_scaled(monkeypatch, optimizer, variable):
    seen = []
    replace(monkeypatch, "test_apply_scaled", lambda original, self, *args: seen.append(original))
    scaler = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
    scaler.apply([tf.ones(2)], [variable])
    np.testing.assert_array_equal(variable.numpy(), [0, 0])
    seen[0](scaler, [tf.ones(2)], [variable])
    np.testing.assert_array_equal(variable.numpy(), [-1, -1])


def test_check_finite(monkeypatch, optimizer, variable):
    scaler = keras.optimizers.LossScaleOptimizer(optimizer)
    scaler.check_finite = lambda grads: tf.constant(False)
    scaler.apply([tf.ones(2)], [variable])
    np.testing.assert_array_equal(variable.numpy(), [0, 0])


def test_load_into_scaler(monkeypatch, tmp_path, optimizer):
    model, seen = small_model(), []
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer), "mse")
    model.optimizer.build(model.trainable_variables)
    model.save_weights(tmp_path / "m.weights.h5")
    replace(monkeypatch, "test_load_into_scaler", noting(seen))
    model.load_weights(tmp_path / "m.weights.h5")
    assert seen == [model.optimizer]


def test_swapping_by():
    callback = keras.callbacks.SwapEMAWeights(True)
    model, seen = small_model(), []
    model.compile(keras.optimizers.SGD(use_ema=True), "mse")

    def swap(optimizer, swap_one, original):
        seen.append(optimizer)
        original()

    with keras_private.swapping_by(callback, swap):
        model.fit(np.zeros((1, 1)), np.zeros((1, 1)), verbose=0, callbacks=[callback])
    assert set(seen) == {model.optimizer}


def test_reduce_gradients(monkeypatch, optimizer, variable):
    def twice(original, self, grads_and_vars):
        return [(2 * gradient, variable) for gradient, variable in original(self, grads_and_vars)]

    replace(monkeypatch, "test_reduce_gradients", twice)
    optimizer.apply([tf.ones(2)], [variable])
    np.testing.assert_array_equal(variable.numpy(), [-2, -2])


def test_decay_in_updates(monkeypatch):
    seen = []
    strategy = mirrored(2)
    original = keras.optimizers.Muon._apply_weight_decay

    def noted(self, variables):
        seen.append((self, variables))
        original(self, variables)

    monkeypatch.setattr(keras.optimizers.Muon, "_apply_weight_decay", noted)
    with strategy.scope():
        variable = keras.Variable(np.ones(2, "float32"), name="variable", aggregation="mean")
        muon = keras.optimizers.Muon(0.5, adam_weight_decay=0.5)
        muon.build([variable])
        keras_private.decay_in_updates(muon)
    strategy.run(lambda: muon.apply([tf.zeros(2)], [variable]))
    assert seen == [(muon, [variable])] * 2  # in updates of each replica, without a collective
    np.testing.assert_array_equal(variable.numpy(), [0.75, 0.75])


def test_note_loss(monkeypatch):
    seen = []

    def by(original, values, sample_weight=None, reduction="sum_over_batch_size"):
        seen.append(values.shape.rank)
        return original(values, sample_weight, reduction)

    replace(monkeypatch, "test_note_loss", by)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    x = np.ones((3, 2), "float32")
    for axis, rank in ((-1, 1), (None, 0)):
        seen.clear()
        model.compile("sgd", lambda y, predicted, axis=axis: keras.ops.mean(y - predicted, axis))
        model.evaluate(x, x, verbose=0)
        assert set(seen) == {rank}


def test_float_of_a_variable(monkeypatch, variable):
    replace(monkeypatch, "test_float_of_a_variable", lambda original, self: 5.0)
    assert float(variable) == 5


def test_data_adapter_and_split():
    x = np.ones((6, 1), "float32")
    given = {"y": None, "sample_weight": None, "steps_per_epoch": None}
    arrays = keras_private.data_adapter(x=x, batch_size=4, **given)
    assert keras_private.is_of_arrays(arrays)
    assert (arrays.num_batches, arrays.batch_size, arrays.partial_batch_size) == (2, 4, 2)
    assert isinstance(arrays, ArrayDataAdapter)
    assert isinstance(arrays, keras_private.DataAdapter)
    data = keras_private.data_adapter(x=tf.data.Dataset.from_tensors(x), batch_size=None, **given)
    assert not keras_private.is_of_arrays(data)
    assert keras_private.data_adapter(x=data, batch_size=None, **given) is data
    (train, _, _), (validation, _, _) = keras_private.split((x, x, None), 0.5)
    assert (len(train), len(validation)) == (3, 3)


def test_batch_of_py_dataset():
    class Ones(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.ones((2, 1)), np.ones((2, 1))

    settings = {"batch_size": None, "steps_per_epoch": None, "class_weight": {1: 3.0}}
    adapter = keras_private.data_adapter(x=Ones(), y=None, sample_weight=None, **settings)
    _, _, weights = keras_private.batch_of_py_dataset(adapter, 0)
    assert np.asarray(weights).ravel().tolist() == [3, 3]


def test_building_by_and_build_model():
    strategy, seen = mirrored(1), []
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.zeros((2, 1), "float32")

    def build(data):
        seen.append(data.num_batches)
        keras_private.build_model(model, (x, x))

    with keras_private.building_by(model, build):
        model.fit(x, x, batch_size=1, verbose=0)
    assert seen == [2]
    assert model.built
    assert model.optimizer.built


def test_trace():
    layer = keras.layers.Dense(2)
    keras_private.trace(layer, tf.ones((4, 3)))
    assert layer.built


def test_keep_statistics_of_empty_batches(monkeypatch):
    seen = []
    replace(monkeypatch, "test_keep_statistics_of_empty_batches", noting(seen, self_only=False))
    layer = keras.layers.BatchNormalization()
    layer(np.full((4, 2), 8, "float32"), training=True)
    ((given, inputs, mask),) = seen
    assert (given, inputs.shape, mask) == (layer, (4, 2), None)


def test_local_op_seeds(monkeypatch):
    def by(original, op_seed):
        graph_seed, op_seed = original(op_seed)
        return graph_seed, 5 if op_seed else op_seed

    replace(monkeypatch, "test_local_op_seeds", by)
    tf.random.set_seed(1)
    assert random_seed.get_seed(2) == (1, 5)
    first, second = (tf.random.normal([2], seed=seed).numpy().tolist() for seed in (2, 3))
    tf.random.set_seed(1)
    assert tf.random.normal([2], seed=5).numpy().tolist() == first
    assert second != first  # the second draw with the seeds (1, 5)


def test_next_seed(monkeypatch):
    seen = []
    replace(monkeypatch, "test_next_seed", noting(seen))
    layer = keras.layers.Dropout(0.5, seed=3)
    for _ in range(2):
        layer(np.ones((1, 2)), training=True)
    assert seen == [layer.seed_generator] * 2
    keras.random.normal((1,))
    assert len(seen) == 3


def test_global_generator(monkeypatch):
    made = keras.random.SeedGenerator(4)
    replace(monkeypatch, "test_global_generator", lambda original: made)
    keras.random.normal((1,))
    assert made.state.numpy().tolist() != [4, 0]


def test_lending_generator():
    """The threads of replicas use the global generator of the thread that runs the step."""
    strategy = mirrored(1)

    @tf.function
    def step():
        return strategy.run(lambda: keras.random.normal((2,)))

    draws = []
    for draw in (step, lambda: keras.random.normal((2,))):
        keras.utils.set_random_seed(2)
        with keras_private.lending_generator():
            draws.append([draw().numpy().tolist() for _ in range(2)])
    assert draws[0] == draws[1]


def test_random_states():
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5, seed=3)])
    model.compile("sgd", "mse", metrics=["mae"])
    model.evaluate(np.ones((2, 2)), np.ones((2, 2)), verbose=0)  # creates metrics
    assert keras_private.random_states(model) == [[3, 0], None]
    first = keras.random.normal((2,)).numpy().tolist()
    states = keras_private.random_states(model)
    draws = [keras.random.normal((2,)).numpy().tolist(), model(np.ones((2, 2)), training=True)]
    keras.utils.set_random_seed(5)
    keras_private.set_random_states(model, states)
    assert keras.random.normal((2,)).numpy().tolist() == draws[0] != first
    np.testing.assert_array_equal(model(np.ones((2, 2)), training=True), draws[1])
    keras_private.set_random_states(model, [[1, 1]])  # of another model
    assert keras_private.random_states(model)[0] == [3, 1]


def test_copy_what_python_returns(monkeypatch):
    seen = []

    def by(original, self, token, device, args):
        returned = original(self, token, device, args)
        seen.extend(returned if isinstance(returned, list) else [returned])
        return returned

    replace(monkeypatch, "test_copy_what_python_returns", by)
    x = np.ones(2, "float32")
    tf.function(lambda: tf.numpy_function(lambda: x, [], tf.float32))()
    tf.function(lambda: tf.py_function(lambda: [x, x], [], [tf.float32] * 2))()
    assert [isinstance(value, np.ndarray) for value in seen] == [True, False, False]
    assert all(isinstance(value, tf.Tensor) for value in seen[1:])


def test_optimizer_variables(optimizer, variable):
    optimizer.build([variable])
    assert keras_private.optimizer_variables(optimizer) == [variable]


def test_layers_of():
    inner = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model = keras.Sequential([keras.layers.Input((1,)), inner])
    layers = keras_private.layers_of(model)
    assert layers[0] is model
    assert layers.index(inner) < layers.index(inner.layers[0])


class _Listed(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.events = []

    def set_model(self, model):
        super().set_model(model)
        self.listed = fit_module.callbacks_of_fit()

    def on_epoch_begin(self, epoch, logs=None):
        self.events.append("begin")

    def on_test_begin(self, logs=None):
        self.events.append("test")

    def on_epoch_end(self, epoch, logs=None):
        self.events.append("end")


def wrapped_model():
    model = small_model()
    model.compile(tf_gradcomp.CompressedOptimizer("sgd"), "mse")
    return model


def test_fit(monkeypatch):
    """Our callbacks are called before and after all others, and see each event."""
    callback, events = _Listed(), []
    for name in ("release", "collect_at_epoch_end", "synchronize"):
        monkeypatch.setattr(fit_module.files, name, lambda model, n=name: callback.events.append(n))
    for name in ("compare_settings", "compare_first_step"):
        note = lambda model, n=name: callback.events.append(n)  # noqa: E731
        monkeypatch.setattr(fit_module.equality, name, note)
    monkeypatch.setattr(fit_module, "warn_if_nothing_is_saved", events.append)
    model, x = wrapped_model(), np.zeros((2, 1))
    data = {"validation_data": (x, x), "batch_size": 1, "verbose": 2}
    history = model.fit(x, x, callbacks=[callback], **data)
    assert events == [[callback]]
    assert callback.events == [
        *("release", "begin", "compare_settings", "compare_first_step"),
        *("synchronize", "test", "collect_at_epoch_end", "end"),
    ]
    kinds = [type(one) for one in callback.listed]
    assert kinds[1:4] == [_Listed, keras.callbacks.History, keras.callbacks.ProgbarLogger]
    assert set(history.history) == {"loss", "val_loss"}
    assert not fit_module.callbacks_of_fit()
    callbacks = keras.callbacks.CallbackList([callback], model=model)
    model.fit(x, x, callbacks=callbacks, verbose=0)
    assert callbacks.callbacks == [callback]


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_local_steps_end_before_a_model_is_read(monkeypatch, call):
    seen, x = [], np.zeros((2, 1))
    monkeypatch.setattr(fit_module.files, "synchronize", seen.append)
    model = wrapped_model()
    model.evaluate(x, x, verbose=0) if call == "evaluate" else model.predict(x, verbose=0)
    assert seen == [model]


test_evaluate = test_predict = test_local_steps_end_before_a_model_is_read


def test_initial_position(tmp_path):
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = {"x": np.zeros((1, 1)), "y": np.zeros((1, 1)), "verbose": 0}
    assert keras_private.initial_position(model, 1) == (0, 0)
    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    model.fit(**data, epochs=2, callbacks=[backup])
    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    model.fit(**data, epochs=3, callbacks=[backup])
    assert keras_private.initial_position(model, 1) == (2, 0)


def small_model():
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_save_model_of_keras(tmp_path, monkeypatch):
    seen = []
    replace(monkeypatch, "test_save_model_of_keras", noting(seen, self_only=False))
    model = small_model()
    model.save(tmp_path / "m.keras")
    model.save(tmp_path / "folder", zipped=False)
    keras.saving.save_model(model, tmp_path / "other.keras")
    assert [Path(path).name for _, path, *_ in seen] == ["m.keras", "folder", "other.keras"]


def test_save_weights(tmp_path, monkeypatch):
    seen = []
    replace(monkeypatch, "test_save_weights", noting(seen, self_only=False))
    model = small_model()
    model.save_weights(tmp_path / "m.weights.h5")
    model.save_weights(tmp_path / "m.weights.json", max_shard_size=1)
    assert [Path(path).name for _, path, *_ in seen] == ["m.weights.h5", "m.weights.json"]


def test_a_wrapped_model_is_saved_in_each_format(tmp_path):
    model = wrapped_model()
    model.optimizer.build(model.trainable_variables)
    for _ in range(2):  # the second time over the first
        model.save(tmp_path / "m.keras")
        model.save(tmp_path / "folder", zipped=False)
        model.save_weights(tmp_path / "m.weights.h5")
        model.save_weights(tmp_path / "m.weights.json", max_shard_size=1e-6)
    for path in ("m.keras", "folder"):
        assert keras.models.load_model(tmp_path / path).count_params() == 2
    for path in ("m.weights.h5", "m.weights.json"):
        small_model().load_weights(tmp_path / path)
    assert not list(tmp_path.glob(".*"))


def test_logs_are_written_where_the_chief_does_not_write(monkeypatch, tmp_path):
    monkeypatch.setattr(fit_module.files, "log_path", lambda _, path, *__: f"{path}-elsewhere")
    logs = keras.callbacks.TensorBoard(tmp_path / "logs"), keras.callbacks.CSVLogger(tmp_path / "a")
    wrapped_model().fit(np.zeros((1, 1)), np.zeros((1, 1)), verbose=0, callbacks=logs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-elsewhere", "logs-elsewhere"]


def test_backing_up(tmp_path):
    callback, model, seen = keras.callbacks.BackupAndRestore(tmp_path), small_model(), []

    def save():
        seen.append(keras_private.Backup.of(callback))
        (tmp_path / "own").write_bytes(keras_private.weights_in_hdf5(model).getvalue())

    callback.delete_checkpoint = False
    with keras_private.backing_up(callback, save, lambda: keras_private.start_at(model, 1)):
        x = np.zeros((1, 1))
        model.fit(x, x, epochs=2, verbose=0, callbacks=[callback])
    (saved,) = seen  # of the second epoch only
    assert Path(saved.weights).name == "latest.weights.h5"
    assert Path(saved.former_progress).name == "training_metadata.json.bkp"
    assert saved.trained == {"epoch": 2, "batch": 0}
    other = small_model()
    keras_private.load_hdf5(other, tmp_path / "own")
    for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_write_checkpoint(tmp_path, monkeypatch):
    paths, noted = [], []

    def by(original, self, file_prefix, options=None):
        paths.append(Path(file_prefix).name)
        tf_private.call_after_write(options, file_prefix)
        return file_prefix

    replace(monkeypatch, "test_write_checkpoint", by)
    checkpoint = tf.train.Checkpoint(variable=tf.Variable(1.0))
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=1)
    manager.save()
    callbacks = [noted.append, lambda: noted.append("no argument")]
    manager.save(options=tf.train.CheckpointOptions(experimental_write_callbacks=callbacks))
    assert paths == ["ckpt-1", "ckpt-2"]
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-2")
    assert noted == [str(tmp_path / "ckpt-2"), "no argument"]


def test_save_model(tmp_path, monkeypatch):
    seen = []

    def by(original, obj, export_dir, *args, **kwargs):
        seen.append(str(export_dir))
        return original(obj, export_dir, *args, **kwargs)

    replace(monkeypatch, "test_save_model", by)
    model = small_model()
    model.export(tmp_path / "folder", verbose=False)
    assert seen == [str(tmp_path / "folder")]
    loaded = tf.saved_model.load(tmp_path / "folder")
    np.testing.assert_array_equal(loaded.serve(np.ones((1, 1))), model(np.ones((1, 1))))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_each_patch_has_a_test(patch):
    assert callable(globals().get(patch.test)), patch.test
    assert patch.why


def test_few_functions_are_replaced():
    assert len({patch.target for patch in PATCHES}) == len(PATCHES) < 20


def remove(monkeypatch, target):
    """Removes a function from its module or class, or the class of a function of each class."""
    owner_name, _, name = target.rpartition(".")
    if name.startswith("__"):
        owner_name, _, name = owner_name.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    for one in inspect.getmro(owner) if inspect.isclass(owner) else [owner]:
        if name in vars(one):
            monkeypatch.delattr(one, name)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
@pytest.mark.parametrize("change", ["removes", "changes"])
def test_what_a_release_changes_is_skipped_with_one_line_or_named_in_one_error(
    monkeypatch, patch, change
):
    owner, name, value = part(patch.target)
    monkeypatch.setattr(owner, name, value)
    if change == "removes":
        remove(monkeypatch, patch.target)
    else:
        patch = patch._replace(by=lambda original, self, other_argument: None)
    lines = []
    if patch.essential:
        with pytest.raises(UntestedVersionError) as error:
            patching.apply([patch], "Keras 9.9", "Install Keras 3.", lines.append)
        lines.append(str(error.value))
    else:
        patching.apply([patch], "Keras 9.9", "Install Keras 3.", lines.append)
        assert patch.why in lines[0]
    (text,) = lines
    assert "ith Keras 9.9" in text
    assert patch.target in text
    assert text.endswith("Install Keras 3.")
    if change == "changes":
        assert vars(owner).get(name, value) is value


def test_a_function_that_takes_other_arguments_is_not_replaced():
    class Keras:
        def save(self, path, zipped=True, shard=None):
            pass

    with pytest.raises(ChangedFunctionError, match="self, path, zipped, shard"):
        patching.check_replacement(Keras.save, lambda original, self, path, zipped=True: None)
    patching.check_replacement(Keras.save, lambda original, self, path, *args, **kwargs: path)


_BROKEN = """
import sys

import keras
from keras.src.backend.tensorflow.optimizer import TFOptimizer

if sys.argv[1] == "function":
    del TFOptimizer._all_reduce_sum_gradients
else:
    sys.modules["keras.src.trainers.data_adapters.array_data_adapter"] = None
import tf_gradcomp as gc

try:
    gc.CompressedOptimizer("sgd")
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("missing", ["function", "module"])
def test_a_release_without_what_training_needs_ends_in_one_error_at_construction(missing):
    command = [sys.executable, "-c", _BROKEN, missing]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert text.startswith(f"tf_gradcomp cannot train with Keras {keras.__version__} and Tensor")
    named = "_all_reduce_sum_gradients" if missing == "function" else "array_data_adapter"
    assert named in text
    assert 'It is tested with Keras 3.15, and TensorFlow 2.17 to 2.21: pip install "keras' in text


_WITHOUT_GUARDS = """
    import keras
    import numpy as np

    import tf_gradcomp as gc
    from tests.ranks import digest, report
    from tf_gradcomp import keras_version
    from tf_gradcomp.private import patching

    gc.MultiWorkerMirroredStrategy  # loads what replaces functions
    told, apply = [], patching.apply

    def without_guards(patches, *args):
        changed = [
            patch if patch.essential else patch._replace(target=f"{patch.target}_removed")
            for patch in patches
        ]
        apply(changed, *args[:-1], told.append)

    keras_version.apply = without_guards
    strategy = gc.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(gc.CompressedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.random.RandomState(0).normal(size=(32, 4)).astype("float32")
    data = x, x[:, :1]
    settings = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
    history = model.fit(*data, validation_data=data, **settings)
    model.predict(x, verbose=0)
    report({"told": told, "loss": history.history["loss"], "weights": digest(model.weights)})
"""


def test_two_workers_train_without_any_guard():
    first, second = results(run_workers(_WITHOUT_GUARDS, 2))
    guards = [patch.target for patch in PATCHES if not patch.essential]
    assert len(first["told"]) == len(guards)
    for line in first["told"]:
        assert any(target in line for target in guards)
    assert first["loss"][1] < first["loss"][0]
    assert first["weights"] == second["weights"]


def test_nothing_is_missing_or_changed_here(monkeypatch):
    for patch in PATCHES:
        owner, name, value = part(patch.target)
        monkeypatch.setattr(owner, name, value)
    patching.apply(PATCHES, "these", "", pytest.fail)


_PATCHED_BY_CREATION = """
import keras, tensorflow as tf
from tests.patched import changed, snapshot

before = snapshot()
import tf_gradcomp as gc
gc.CompressedOptimizer, gc.MultiWorkerMirroredStrategy, gc.Autoencoder, gc.callbacks, gc.simulation
assert not (names := changed(before)), names
gc.CompressedOptimizer("sgd")
print(sorted(changed(before)))
"""


def test_only_creation_patches_and_the_table_lists_all():
    """Compares all functions of Keras and TensorFlow before the import, and after each step."""
    command = [sys.executable, "-c", _PATCHED_BY_CREATION]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    seen = set(ast.literal_eval(ended.stdout.splitlines()[-1]))
    listed = {canonical(patch.target) for patch in PATCHES}
    assert sorted(seen - listed) == sorted(listed - seen) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_only_one_folder_touches_private_api(source):
    if source.parent.name == "private":
        return
    for node in ast.walk(ast.parse(source.read_text())):
        for module in imported(node):
            assert not module.startswith(PRIVATE), module
        if isinstance(node, ast.Attribute):
            assert not is_private_of_others(node), ast.unparse(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not node.value.startswith(PRIVATE), node.value


PRIVATE = ("tensorflow.python", "keras.src")


def imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


def is_private_of_others(node):
    """Tells whether it is `value._name` where `value` is no object of the class that uses it."""
    if not node.attr.startswith("_") or node.attr.startswith("__"):
        return False
    owner = ast.unparse(node.value)
    is_own_class = owner in ("self", "cls") or owner.startswith("super(")
    return not is_own_class and node.attr != "_asdict"  # part of a named tuple's interface
