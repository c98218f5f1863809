"""Tests each private name that `tf_private*` and `keras_private` use; no other module uses any.

When a test here fails, a release of TensorFlow or Keras has changed what its name says.
"""

import ast
import contextlib
import inspect
import logging
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
from keras.src.backend.tensorflow import trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.callbacks import callback_list
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random import seed_generator
from keras.src.saving import saving_lib
from keras.src.trainers.data_adapters import generator_data_adapter
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.data.util import random_seed as data_random_seed
from tensorflow.python.distribute import collective_all_reduce_strategy, input_lib
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import script_ops
from tensorflow.python.saved_model import save as saved_model

import tf_gradcomp
from tests.patched import canonical
from tests.replicas import mirrored
from tests.workers import result, run_workers
from tf_gradcomp import tf_private, tf_private_data, tf_private_files, tf_private_random
from tf_gradcomp.keras.common import hooks
from tf_gradcomp.keras.keras3 import keras_private, patches
from tf_gradcomp.keras.keras3.hooks import files as on_files
from tf_gradcomp.keras.keras3.hooks import optimizers as on_optimizers
from tf_gradcomp.keras.keras3.hooks import training as on_training
from tf_gradcomp.replacements import ChangedFunctionError
from tf_gradcomp.strategy import undivided_means
from tf_gradcomp.strategy.patches import UntestedVersionError, apply

pytestmark = [pytest.mark.oldest, pytest.mark.quick]
PROGRAM = Path(__file__).parent / "distributed/programs/private.py"
SOURCES = sorted(Path(tf_gradcomp.__file__).parent.rglob("*.py"))


@pytest.fixture(scope="module")
def workers():
    return [result(worker) for worker in run_workers(PROGRAM, 2)]


@pytest.fixture
def optimizer():
    return keras.optimizers.SGD(1.0)


@pytest.fixture
def variable():
    return keras.Variable(np.zeros(2, "float32"), name="variable")


def test_is_collective(workers):
    assert [worker["is_collective"] for worker in workers] == [True, True]
    assert not tf_private.is_collective(tf.distribute.get_strategy())


def test_in_multi_worker_mode(workers):
    assert [worker["in_multi_worker_mode"] for worker in workers] == [True, True]


def test_host_all_gather(workers):
    assert [worker["host_all_gather"] for worker in workers] == [[0, 1]] * 2


def test_timeout_seconds(workers):
    assert [worker["timeout_seconds"] for worker in workers] == [0, 0]


def test_launcher_and_all_gather_of(workers):
    assert [worker["all_gather_of"] for worker in workers] == [[0, 10, 1, 10]] * 2


def test_coordinating(workers):
    assert [worker["coordinating"] for worker in workers] == [20500] * 2


def test_launcher_of_workers(workers):
    assert [worker["launcher_of_workers"] for worker in workers] == [[3, 20]] * 2


def test_sum_over_workers(workers):
    assert [worker["sum_over_workers"] for worker in workers] == [[3, 16]] * 2


@pytest.mark.parametrize("from_function", [False, True])
def test_drop_iterators_in_background(monkeypatch, from_function):
    for class_ in (input_lib.DistributedDataset, input_lib.DistributedDatasetsFromFunction):
        monkeypatch.setattr(class_, "__iter__", class_.__iter__)
    strategy = mirrored(2)
    tf_private_data.drop_iterators_in_background(lambda other: other is strategy)
    taken, dropped, seen = threading.Event(), threading.Event(), queue.SimpleQueue()

    def batch(number):
        if number == 6:  # taken ahead
            taken.set()
            seen.put(dropped.wait(300))
        return number

    def numbers(_=None):
        pause = lambda x: tf.numpy_function(batch, [x], tf.int64)  # noqa: E731
        return tf.data.Dataset.range(8).map(pause).batch(2).prefetch(2)

    if from_function:
        made = strategy.distribute_datasets_from_function(numbers)
    else:
        made = strategy.experimental_distribute_dataset(numbers())
    iterator = iter(made)
    next(iterator)
    assert taken.wait(300)  # else it may never be
    del iterator
    dropped.set()
    assert seen.get(timeout=300)


def test_begin_steps_with_own_data(workers):
    assert [worker["begin_steps_with_own_data"] for worker in workers] == [2, 2]


def test_undistributed_and_shared_by_workers():
    rows = tf.data.Dataset.range(4)
    names = tf.data.Dataset.from_tensor_slices(["a", "b"])
    read = names.interleave(lambda name: tf.data.TextLineDataset(name).skip(1)).shuffle(2)

    def of(dataset, policy=None):
        options = tf.data.Options()
        if policy:
            options.experimental_distribute.auto_shard_policy = policy
        strategy = mirrored(2)
        made = strategy.experimental_distribute_dataset(dataset.batch(2).with_options(options))
        assert tf_private_data.undistributed(made).element_spec.shape.rank == 1
        shared = tf_private_data.shared_by_workers(made)
        return shared and [np.array(item).tolist() for item in shared.as_numpy_iterator()]

    policies = tf.data.experimental.AutoShardPolicy
    assert of(rows) == of(rows, policies.DATA) == [[0, 1], [2, 3]]
    assert of(rows, policies.OFF) is of(rows, policies.FILE) is None
    assert of(read) == of(read, policies.FILE) == [b"a", b"b"]
    for reader in (tf.data.TFRecordDataset, tf.data.TextLineDataset):
        assert of(reader(["a", "b"])) == [b"a", b"b"]
    assert of(tf.data.FixedLengthRecordDataset(["a", "b"], 1)) == [b"a", b"b"]
    from_function = mirrored(2).distribute_datasets_from_function(lambda _: rows)
    assert tf_private_data.shared_by_workers(from_function) is None


def test_built_again():
    tf_private_data.record_constructors()
    graphs, added = [], 1

    def drawn(x):
        graphs.append(tf.compat.v1.get_default_graph())
        return x + added

    rows = tf.data.Dataset.range(8).map(lambda x: 2 * x)
    twice = tf.data.Dataset.zip((rows.batch(4).map(drawn), rows.batch(4)))
    dataset = twice.with_options(tf.data.Options()).prefetch(1)
    assert tf_private_data.built_again(dataset, lambda graph: False) is dataset
    source = tf.data.Dataset.from_tensor_slices(np.ones(4))
    assert not hasattr(source, "gradcomp_arguments")  # which would keep the array
    added = 3
    again = tf_private_data.built_again(dataset, lambda graph: graph is graphs[0])
    for one, step in ((dataset, 1), (again, 3)):
        first, second = next(iter(one))
        assert (first - second).numpy().tolist() == [step] * 4
    assert len(graphs) == 2


def test_use_logical_cpus():
    # The tests of two levels use its result.
    ours = collective_all_reduce_strategy.CollectiveAllReduceExtended._initialize_local_devices
    assert list(inspect.signature(ours).parameters) == ["self", "cluster_resolver", "worker_device"]


def test_all_reduce_of(workers):
    assert [worker["all_reduce_of"] for worker in workers] == [[3, 20]] * 2


def test_rank(workers):
    assert [worker["rank"] for worker in workers] == [0, 1]


def test_exchange_no_empty_tensors(workers):
    shapes = [[0, 3], [0, 3], [0, 3], [3, 3]]
    assert [worker["exchange_no_empty_tensors"] for worker in workers] == [shapes] * 2


def test_broadcast_no_empty_variables(workers):
    assert [worker["broadcast_no_empty_variables"] for worker in workers] == [[[0, 3], 5]] * 2


def test_broadcasting_no_variables(workers):
    assert [worker["broadcasting_no_variables"] for worker in workers] == [[5, 5], [6, 5]]


def test_let_variables_become_numbers(workers):
    assert [worker["let_variables_become_numbers"] for worker in workers] == [[2.5, 2, 0]] * 2


def test_launch_broadcast(workers):
    from_each = [[0, 10], [1, 11], [0, 10]]
    assert [worker["launch_broadcast"] for worker in workers] == [from_each] * 2


def test_allow_collectives_in_loops(workers):
    assert [worker["allow_collectives_in_loops"] for worker in workers] == [6, 6]


def test_on_initial_values(workers):
    assert [worker["on_initial_values"] for worker in workers] == [[11], [11]]


def test_stock_keras_still_fails_under_the_stock_strategy(workers):
    # keras-team/keras#20585. When this fails, our strategy no longer needs its patch of `reduce`.
    for worker in workers:
        assert worker["stock_fit"] is not None
        assert "unsupported type" in worker["stock_fit"]


def test_cross_device_ops_of_a_strategy_without():
    assert tf_private.cross_device_ops(tf.distribute.get_strategy()) is None


_RUNNING = """
import tensorflow as tf
from tf_gradcomp import tf_private

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
    for number, handle in enumerate(handles):
        tf.raw_ops.AssignVariableOp(resource=handle, value=number)
    values = [tf.raw_ops.ReadVariableOp(resource=h, dtype=tf.int32).numpy() for h in handles]
    assert values == [0, 1]


def test_counting_replicas():
    strategy = tf.distribute.get_strategy()
    with tf_private.counting_replicas(3):
        assert strategy.num_replicas_in_sync == 3
    assert strategy.num_replicas_in_sync == 1


def test_save_as(tmp_path):
    variable, read = tf.Variable([1.0, 2.0]), []
    tf_private_files.save_as(variable, lambda: 2 * variable.read_value(), read.append)
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


def test_applying_at_once_does_not_accumulate(variable):
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    optimizer.build([variable])
    with keras_private.applying_at_once(optimizer):
        optimizer.apply([tf.ones(2)], [variable])
    np.testing.assert_array_equal(variable.numpy(), [-1, -1])
    assert optimizer.gradient_accumulation_steps == 3
    assert type(optimizer) is keras.optimizers.SGD


def test_applying_at_once_counts_updates(monkeypatch, variable):
    monkeypatch.setattr(BaseOptimizer, "iterations", BaseOptimizer.iterations)
    on_optimizers.on_iterations(keras_private.batches_of_update)
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    optimizer.build([variable])
    keras_private.step_counter(optimizer).assign(8)
    with keras_private.applying_at_once(optimizer):
        assert int(optimizer.iterations) == 2
    assert int(keras_private.step_counter(optimizer)) == 8


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


def test_on_loss_scaled_apply(monkeypatch, optimizer, variable):
    scaler = keras.optimizers.LossScaleOptimizer
    monkeypatch.setattr(scaler, "apply", scaler.apply)  # put back at the end
    seen = []
    on_optimizers.on_loss_scaled_apply(
        lambda self, grads, variables, original: seen.append((grads, original))
    )
    scaler(optimizer, initial_scale=1.0).apply([tf.ones(2)], [variable])
    ((gradients, original),) = seen
    np.testing.assert_array_equal(variable.numpy(), [0, 0])
    original(gradients, [variable])
    np.testing.assert_array_equal(variable.numpy(), [-1, -1])


def test_on_check_finite(monkeypatch, variable):
    scaler = keras.optimizers.LossScaleOptimizer
    monkeypatch.setattr(scaler, "check_finite", scaler.check_finite)
    seen = []

    def agree(scaler, finite):
        seen.append(scaler)
        return tf.logical_and(finite, False)

    on_optimizers.on_check_finite(agree)
    around = scaler(keras.optimizers.SGD(1.0))
    around.apply([tf.ones(2)], [variable])
    assert seen == [around]
    np.testing.assert_array_equal(variable.numpy(), [0, 0])


def test_on_scaler_load(monkeypatch, tmp_path, optimizer):
    scaler = keras.optimizers.LossScaleOptimizer
    monkeypatch.setattr(scaler, "load_own_variables", scaler.load_own_variables)
    model = small_model()
    model.compile(scaler(optimizer), "mse")
    model.optimizer.build(model.trainable_variables)
    model.save_weights(tmp_path / "m.weights.h5")
    seen = []
    on_optimizers.on_scaler_load(lambda self, store, original: seen.append(self) or original(store))
    model.load_weights(tmp_path / "m.weights.h5")
    assert seen == [model.optimizer]


def test_on_averages_swapped(monkeypatch):
    class_ = keras.callbacks.SwapEMAWeights
    name = "_apply_to_ema_optimizers"
    monkeypatch.setattr(class_, name, getattr(class_, name))
    seen = []
    on_optimizers.on_averages_swapped(lambda optimizer, swap_one, original: seen.append(optimizer))
    model = small_model()
    model.compile(keras.optimizers.SGD(use_ema=True), "mse")
    model.fit(np.zeros((1, 1)), np.zeros((1, 1)), verbose=0, callbacks=[class_(True)])
    assert set(seen) == {model.optimizer}


def test_on_train_function(monkeypatch):
    name = "make_train_function"
    monkeypatch.setattr(keras.Model, name, getattr(keras.Model, name))
    seen = []
    hooks.on_train_function(
        seen.append, lambda model: seen.append(model.optimizer.iterations.numpy())
    )
    model = small_model()
    model.fit(np.zeros((2, 1)), np.zeros((2, 1)), batch_size=1, verbose=0)
    assert seen == [model, 1]


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
def test_on_multi_optimizer(monkeypatch, optimizer, variable):
    multi = keras.optimizers.MultiOptimizer
    monkeypatch.setattr(multi, "build", multi.build)
    seen = []
    on_optimizers.on_multi_optimizer(seen.append)
    multi(keras.optimizers.OptimizerMap(optimizer, {})).build([variable])
    assert seen == [optimizer]
    assert optimizer.built


def test_on_reduce_gradients(monkeypatch, optimizer, variable):
    name = "_all_reduce_sum_gradients"
    monkeypatch.setattr(TFOptimizer, name, vars(TFOptimizer)[name])
    seen = []

    def reduce(self, grads_and_vars, original):
        seen.append(self)
        return [(2 * gradient, variable) for gradient, variable in original(self, grads_and_vars)]

    on_optimizers.on_reduce_gradients(reduce)
    optimizer.apply([tf.ones(2)], [variable])
    assert seen == [optimizer]
    np.testing.assert_array_equal(variable.numpy(), [-2, -2])


def test_on_loss_of_one_number(monkeypatch):
    monkeypatch.setattr(loss_module, "reduce_values", loss_module.reduce_values)
    seen = []
    on_optimizers.on_loss_of_one_number(seen.append, lambda loss: None)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    x = np.ones((3, 2), "float32")
    for axis, told in ((-1, 0), (None, 1)):
        model.compile("sgd", lambda y, predicted, axis=axis: keras.ops.mean(y - predicted, axis))
        model.evaluate(x, x, verbose=0)
        assert len(seen) == told


def test_on_means_of_steps(monkeypatch):
    monkeypatch.setattr(trainer, "reduce_per_replica", trainer.reduce_per_replica)
    seen = []

    def mean(strategy, outputs, original):
        seen.append(strategy)
        return {name: value + 1 for name, value in original().items()}

    on_training.on_means_of_steps(mean)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((2, 1), "float32")
    assert np.isclose(model.test_on_batch(x, model(x)), 1)
    model.predict(x, verbose=0)  # its outputs are put together
    assert seen == [tf.distribute.get_strategy()]


def test_on_data(monkeypatch):
    class_ = trainer.TFEpochIterator
    monkeypatch.setattr(class_, "__init__", class_.__init__)
    seen = []
    on_training.on_data(lambda *facts: seen.append(facts))
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((5, 1), "float32")
    model.fit(x, x, batch_size=2, verbose=0, validation_data=(x, x), validation_batch_size=5)
    model.evaluate(tf.data.Dataset.from_tensors((x, x)).filter(lambda *_: True), verbose=0)
    model.predict(x, batch_size=1, steps=4, verbose=0)
    strategy = tf.distribute.get_strategy()
    assert seen == [(strategy, 3), (strategy, 1), (strategy, None), (strategy, 4)]


def test_on_batch_to_build_with(monkeypatch):
    strategy = tf_gradcomp.MultiWorkerMirroredStrategy()
    class_ = keras.Model
    stock = inspect.unwrap(class_._maybe_symbolic_build)
    monkeypatch.setattr(class_, "_maybe_symbolic_build", stock)
    x = np.zeros((2, 1), "float32")
    taken = []
    on_training.on_batch_to_build_with(lambda *facts: taken.append(facts) or (x, x))
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(tf.data.Dataset.from_tensors((x, x)), verbose=0)
    ((seen, data),) = taken
    assert seen is strategy
    assert tf_private_data.undistributed(data) is not None


def test_on_build_that_fails(monkeypatch):
    class_ = keras.Model
    monkeypatch.setattr(class_, "_symbolic_build", inspect.unwrap(class_._symbolic_build))
    traced = []

    def build(model, batch, error, trace):
        assert "automatically build" in str(error)
        trace(model.dense, batch)
        traced.append(batch.shape)
        return True

    class Model(keras.Model):  # without `call`
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def train_step(self, data):
            return {"sum": tf.reduce_sum(self.dense(data))}

    on_training.on_build_that_fails(build)
    with mirrored(1).scope():
        model = Model()
        model.compile("sgd")
    model.fit(tf.ones((4, 3)), batch_size=4, verbose=0)
    assert traced == [(4, 3)]
    assert model.dense.built


def test_on_arrays(monkeypatch):
    class_ = trainer.TFEpochIterator
    monkeypatch.setattr(class_, "__init__", class_.__init__)
    seen = []
    on_training.on_arrays(lambda strategy, rows: seen.append(rows))
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for rows in (4, 5):
        model.predict(np.ones((rows, 1), "float32"), batch_size=2, verbose=0)
    model.predict(tf.data.Dataset.from_tensors(np.ones((1, 1))), verbose=0)
    assert seen == [2, 1]


def test_keep_statistics_of_empty_batches(monkeypatch):
    class_ = keras.layers.BatchNormalization
    monkeypatch.setattr(class_, "_moments", class_._moments)
    on_training.keep_statistics_of_empty_batches(lambda inputs: tf.equal(tf.size(inputs), 0))
    layer = class_(momentum=0.5)
    layer(np.full((4, 2), 8, "float32"), training=True)
    before = [np.array(v) for v in layer.non_trainable_variables]
    layer(np.zeros((0, 2), "float32"), training=True)
    assert np.array_equal(before, layer.non_trainable_variables)
    assert before[0].tolist() == [4, 4]


def test_on_tape_gradient(monkeypatch):
    monkeypatch.setattr(tf.GradientTape, "gradient", inspect.unwrap(tf.GradientTape.gradient))
    monkeypatch.setattr(undivided_means, "_record", lambda *given: recorded.append(given))
    undivided_means.on_tape_gradient()
    recorded, variable = [], tf.Variable(2.0)
    with tf.GradientTape(persistent=True) as tape:
        data = tf.constant(3.0)
        tape.watch(data)
        loss = variable * data
    gradients = tape.gradient(loss, [variable])
    tape.gradient(loss, data)  # of no variable
    assert [(target is loss, given is gradients) for target, given in recorded] == [(True, True)]


def test_on_op_seeds(monkeypatch):
    for module in (random_seed, data_random_seed):
        monkeypatch.setattr(module, "get_seed", module.get_seed)
    tf_private_random.on_op_seeds(lambda seeds: (seeds[0], 5) if seeds[1] else seeds)
    tf.random.set_seed(1)
    assert random_seed.get_seed(2) == (1, 5)
    assert [int(seed) for seed in data_random_seed.get_seed(2)] == [1, 2]  # of `shuffle`
    tf.random.set_seed(1)
    first, second = (tf.random.normal([2], seed=seed).numpy().tolist() for seed in (2, 3))
    tf.random.set_seed(1)
    assert tf.random.normal([2], seed=5).numpy().tolist() == first
    assert second != first  # the second draw with the seeds (1, 5)


def test_on_generator_keys(monkeypatch):
    class_ = tf.random.Generator
    monkeypatch.setattr(class_, "_preprocess_key", class_._preprocess_key)
    keys = []
    tf_private_random.on_generator_keys(lambda key, algorithm: keys.append(algorithm) or key + 1)
    draws = [class_.from_seed(1).normal([2]).numpy().tolist()]
    tf_private_random.on_generator_keys(lambda key, algorithm: key)
    draws.append(class_.from_seed(1).normal([2]).numpy().tolist())
    assert len(keys) == 1
    assert draws[0] != draws[1]


def test_on_seeds(monkeypatch):
    monkeypatch.setattr(keras.random.SeedGenerator, "next", keras.random.SeedGenerator.next)
    seeds = []
    on_training.on_seeds(lambda seed, generator: seeds.append(seed.numpy().tolist()) or seed)
    layer = keras.layers.Dropout(0.5, seed=3)
    for _ in range(2):
        layer(np.ones((1, 2)), training=True)
    keras.random.normal((1,))
    assert seeds[:2] == [[3, 0], [3, 1]]
    assert len(seeds) == 3


def test_on_global_generator(monkeypatch):
    monkeypatch.setattr(
        seed_generator, "global_seed_generator", seed_generator.global_seed_generator
    )
    made = keras.random.SeedGenerator(4)
    on_training.on_global_generator(lambda original: made)
    keras.random.normal((1,))
    assert made.state.numpy().tolist() != [4, 0]


def test_lending_generator(monkeypatch):
    """The threads of replicas use the global generator of the thread that runs the step."""
    monkeypatch.setattr(
        seed_generator, "global_seed_generator", seed_generator.global_seed_generator
    )
    on_training.on_global_generator(keras_private.global_generator)
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


def test_read_py_datasets(monkeypatch):
    class Numbers(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return np.full((2, 1), index, "float32"), np.zeros((2, 1), "float32")

    class Backwards:
        start = stop = begin_epoch = lambda self, *_: calls.append("other")
        get = lambda self: (data[i] for i in range(3, -1, -1))  # noqa: E731

    class_ = trainer.TFEpochIterator
    monkeypatch.setattr(class_, "__init__", class_.__init__)
    made, calls = [], []
    on_training.read_py_datasets(lambda *facts: made.append(facts) or Backwards())
    data = Numbers(workers=2)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Identity()])
    model.compile("sgd", "mse")
    assert model.predict(data, verbose=0)[:, 0].tolist() == [3, 3, 2, 2, 1, 1, 0, 0]
    model.fit(data, verbose=0)
    strategy = tf.distribute.get_strategy()
    assert made == [(strategy, data, False), (strategy, data, True)]
    assert calls


def test_read_generators(monkeypatch):
    class Reader:
        def __init__(self, generator):
            self.read = lambda: generator
            calls.append("made")

        def __iter__(self):
            return iter([(x, x)])

        def new_iterator(self):
            calls.append("iterator")

        def use(self, batches):
            calls.append(batches)

    adapter, class_ = generator_data_adapter.GeneratorDataAdapter, trainer.TFEpochIterator
    monkeypatch.setattr(adapter, "__init__", inspect.unwrap(adapter.__init__))
    for name in ("_get_iterator", "_enumerate_iterator"):
        monkeypatch.setattr(class_, name, inspect.unwrap(getattr(class_, name)))
    calls, x = [], np.zeros((2, 1), "float32")
    on_training.read_generators(Reader)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(((x, x) for _ in range(9)), verbose=0, steps_per_epoch=3)
    assert calls == ["made", "iterator", 1, 2, 3]


def test_create_iterators_on_demand(monkeypatch):
    class_ = trainer.TFEpochIterator
    for name in ("_get_iterator", "_enumerate_iterator"):
        monkeypatch.setattr(class_, name, inspect.unwrap(getattr(class_, name)))
    on_training.create_iterators_on_demand()
    with mirrored(1).scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    made = []
    distributed = input_lib.DistributedDataset
    create = distributed.__iter__
    monkeypatch.setattr(distributed, "__iter__", lambda self: made.append(1) or create(self))
    x = np.ones((4, 1), "float32")
    model.train_on_batch(x, x)  # builds all there is
    model.fit(x, x, batch_size=2, epochs=3, verbose=0)
    assert len(made) == 1 + 3  # Keras builds with the first; without the patch, 4 more


def test_on_built_and_generators(monkeypatch):
    class_ = keras.Model
    monkeypatch.setattr(class_, "_maybe_symbolic_build", class_._maybe_symbolic_build)
    built = []

    @contextlib.contextmanager
    def building(model):
        yield
        built.append(model)

    on_training.on_built(building)
    x = np.zeros((2, 1), "float32")
    with tf_gradcomp.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(((x, x) for _ in range(5)), verbose=0)
    assert built == [model]
    assert keras.ops.convert_to_numpy(model.optimizer.iterations) == 5


def test_on_returned_by_python(monkeypatch):
    class_ = script_ops.FuncRegistry
    monkeypatch.setattr(class_, "__call__", class_.__call__)
    seen = []
    tf_private_data.on_returned_by_python(lambda value: (seen.append(value), value + 1)[1])
    x = np.ones(2, "float32")
    array = tf.function(lambda: tf.numpy_function(lambda: x, [], tf.float32))
    tensors = tf.function(lambda: tf.py_function(lambda: [x, x], [], [tf.float32] * 2))
    np.testing.assert_array_equal(array(), [2, 2])
    np.testing.assert_array_equal(tensors(), [[2, 2]] * 2)
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
    listed = None

    def set_model(self, model):
        self.listed = hooks.callbacks_of_fit()


def test_know_callbacks_of_fit(monkeypatch):
    class_ = callback_list.CallbackList
    monkeypatch.setattr(class_, "set_model", class_.set_model)
    hooks.record_callbacks_of_fit()
    callback, other = _Listed(), keras.callbacks.Callback()
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.zeros((1, 1)), np.zeros((1, 1)), verbose=0, callbacks=[other, callback])
    assert callback.listed[:2] == [other, callback]
    assert not hooks.callbacks_of_fit()


def test_on_train_begin(monkeypatch):
    class_, seen, callback = callback_list.CallbackList, [], keras.callbacks.Callback()
    monkeypatch.setattr(class_, "on_train_begin", class_.on_train_begin)
    hooks.on_train_begin(seen.append)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = np.zeros((1, 1))
    model.fit(data, data, verbose=0, callbacks=[callback])
    model.evaluate(data, data, verbose=0)
    assert len(seen) == 1
    assert callback in seen[0]


def test_initial_place(tmp_path):
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = {"x": np.zeros((1, 1)), "y": np.zeros((1, 1)), "verbose": 0}
    assert keras_private.initial_place(model, 1) == (0, 0)
    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    model.fit(**data, epochs=2, callbacks=[backup])
    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    model.fit(**data, epochs=3, callbacks=[backup])
    assert keras_private.initial_place(model, 1) == (2, 0)


def small_model():
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_on_save(tmp_path, monkeypatch):
    for module, name in (
        (saving_lib, "save_model"),
        (saving_lib, "save_weights_only"),
        (legacy_h5_format, "save_model_to_hdf5"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    seen = []

    def save(model, path, write, original):
        seen.append(Path(path).name)
        write()

    on_files.on_save(save, lambda *_: False)
    model = small_model()
    model.save(tmp_path / "m.keras")
    model.save(tmp_path / "new/m.h5")
    model.save_weights(tmp_path / "m.weights.h5")
    model.save_weights(tmp_path / "m.weights.json", max_shard_size=1)
    model.save(tmp_path / "folder", zipped=False)
    assert seen == ["m.keras", "m.h5", "m.weights.h5", "m.weights.json", "folder"]
    assert keras.models.load_model(tmp_path / "m.keras").count_params() == 2
    assert keras.models.load_model(tmp_path / "folder").count_params() == 2
    assert keras.models.load_model(tmp_path / "new/m.h5", compile=False).count_params() == 2
    for path in ("m.weights.h5", "m.weights.json"):
        small_model().load_weights(tmp_path / path)


def test_remember_attributes_to_skip(tmp_path, monkeypatch):
    made, init = [], BaseOptimizer.__init__
    original = inspect.unwrap(saving_lib.get_attr_skipset)
    monkeypatch.setattr(saving_lib, "get_attr_skipset", original)
    monkeypatch.setattr(
        BaseOptimizer, "__init__", lambda *args, **kwargs: made.append(1) or init(*args, **kwargs)
    )
    strategy = mirrored(2)
    scopes = []

    def out_of_scope(make):
        scopes.append(tf.distribute.has_strategy())
        return make()

    model = small_model()
    made.clear()
    model.save_weights(tmp_path / "m.weights.h5")
    model.save_weights(tmp_path / "m.weights.h5")
    assert len(made) == 2, "Keras now remembers itself"
    on_files.remember_attributes_to_skip(out_of_scope)
    with strategy.scope():
        model.save_weights(tmp_path / "m.weights.h5")
    assert len(made) == 3
    found = len(scopes)
    model.save_weights(tmp_path / "m.weights.h5")
    small_model().load_weights(tmp_path / "m.weights.h5")
    assert len(scopes) == found


def test_on_epochs(monkeypatch):
    for name in ("on_epoch_begin", "on_epoch_end", "on_test_begin", "on_predict_begin"):
        monkeypatch.setattr(
            callback_list.CallbackList, name, getattr(callback_list.CallbackList, name)
        )
    seen = []
    hooks.on_epochs(
        lambda _: seen.append("begin"),
        lambda _: seen.append("end"),
        lambda _: seen.append("begun"),
        lambda _: seen.append("read"),
    )
    late = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: seen.append("callback"),
        on_epoch_end=lambda *_: seen.append("callback"),
    )
    data = np.zeros((1, 1)), np.zeros((1, 1))
    model = small_model()
    model.fit(*data, verbose=0, callbacks=[late], validation_data=data)
    assert seen == ["begin", "callback", "begun", "read", "end", "callback"]
    model.predict(data[0], verbose=0)
    assert seen[6:] == ["read"]


def test_on_logs(monkeypatch, tmp_path):
    for class_, name in (
        (keras.callbacks.TensorBoard, "set_model"),
        (keras.callbacks.CSVLogger, "on_train_begin"),
    ):
        monkeypatch.setattr(class_, name, getattr(class_, name))
    hooks.on_logs(lambda callback, path, *_: f"{path}-elsewhere")
    logs = keras.callbacks.TensorBoard(tmp_path / "logs"), keras.callbacks.CSVLogger(tmp_path / "a")
    small_model().fit(np.zeros((1, 1)), np.zeros((1, 1)), verbose=0, callbacks=logs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-elsewhere", "logs-elsewhere"]


def test_on_backups(tmp_path, monkeypatch):
    class_ = keras.callbacks.BackupAndRestore
    for name in ("_save_model", "on_train_begin", "on_train_end"):
        monkeypatch.setattr(class_, name, getattr(class_, name))
    seen = []

    def save(callback, original):
        seen.append(keras_private.Backup.of(callback))
        (tmp_path / "own").write_bytes(keras_private.weights_in_hdf5(callback.model).getvalue())

    def restore(callback, original):
        keras_private.start_at(callback.model, 1)

    on_files.on_backups(save, restore, lambda callback, original: seen.append("deleted"))
    model = small_model()
    backup = class_(tmp_path)
    model.fit(np.zeros((1, 1)), np.zeros((1, 1)), epochs=2, verbose=0, callbacks=[backup])
    saved, deleted = seen  # of the second epoch only
    assert Path(saved.weights).name == "latest.weights.h5"
    assert Path(saved.former_place).name == "training_metadata.json.bkp"
    assert saved.trained == {"epoch": 2, "batch": 0}
    assert deleted == "deleted"
    other = small_model()
    keras_private.load_hdf5(other, tmp_path / "own")
    for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_on_checkpoint_write(tmp_path, monkeypatch):
    monkeypatch.setattr(tf.train.Checkpoint, "_write", tf.train.Checkpoint._write)
    for name in ("update_checkpoint_state_internal", "_delete_file_if_exists"):
        original = getattr(checkpoint_management, name)
        monkeypatch.setattr(checkpoint_management, name, original)
    tf_private_files.on_checkpoint_write(lambda *arguments: arguments[-1](False))
    checkpoint = tf.train.Checkpoint(variable=tf.Variable(1.0))
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=1)
    manager.save()
    noted = []
    options = tf.train.CheckpointOptions(
        experimental_write_callbacks=[noted.append, lambda: noted.append("no argument")]
    )
    manager.save(options=options)
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-2")
    assert noted == [str(tmp_path / "ckpt-2"), "no argument"]
    assert not list(tmp_path.iterdir())


def test_on_saved_model(tmp_path, monkeypatch):
    original = saved_model.save_and_return_nodes
    monkeypatch.setattr(saved_model, "save_and_return_nodes", original)
    seen = []

    def save(root, path, original):
        seen.append(path)
        original(path)

    tf_private_files.on_saved_model(save)
    model = small_model()
    model.export(tmp_path / "folder", verbose=False)
    assert seen == [str(tmp_path / "folder")]
    loaded = tf.saved_model.load(tmp_path / "folder")
    np.testing.assert_array_equal(loaded.serve(np.ones((1, 1))), model(np.ones((1, 1))))


def test_announce_withdraw_and_all_come(workers):
    for worker in workers:
        told, come, nothing = worker["announced"].values()
        assert (told, come, nothing) == (["by 0", "by 1"], [True, False, True], [None, None])


def test_on_collectives(workers):
    assert [worker["on_collectives"] for worker in workers] == [[1] * 8] * 2


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.replaces[0])
def test_each_patch_has_a_test(patch):
    assert callable(globals().get(patch.test)), patch.test
    assert patch.why


def remove(monkeypatch, name):
    """Removes a function from its module or class; the class of a function that each class has."""
    owner_name, _, attribute = name.rpartition(".")
    if attribute.startswith("__"):
        owner_name, _, attribute = owner_name.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    for one in inspect.getmro(owner) if inspect.isclass(owner) else [owner]:
        if attribute in vars(one):
            monkeypatch.delattr(one, attribute)


def restored(monkeypatch, names):
    """Returns the owners, names and values of functions, which the end of the test restores."""
    found = []
    for name in names:
        owner_name, _, attribute = name.rpartition(".")
        owner = pkgutil.resolve_name(owner_name)
        value = vars(owner).get(attribute)
        if value is not None:
            monkeypatch.setattr(owner, attribute, value)
            found.append((owner, attribute, value))
    return found


# The first adds methods that TensorFlow lacks. MultiOptimizer is absent in some releases.
REMOVED = [patch for patch in patches.PATCHES[1:] if patch.test != "test_on_multi_optimizer"]


@pytest.mark.parametrize("patch", REMOVED, ids=lambda patch: patch.replaces[-1])
def test_what_a_release_removes_is_skipped_with_one_line_or_named_in_one_error(
    monkeypatch, caplog, patch
):
    monkeypatch.setattr(logging.getLogger("tf_gradcomp"), "propagate", True)
    before = restored(monkeypatch, patch.replaces)
    target = next((one for one in patch.replaces if ".__" not in one), patch.replaces[-1])
    remove(monkeypatch, target)
    if patch.essential:
        with pytest.raises(UntestedVersionError, match=target) as error:
            apply([patch], "Keras 9.9", "Install Keras 3.")
        text = str(error.value)
    else:
        apply([patch], "Keras 9.9", "Install Keras 3.")
        (record,) = caplog.records
        text = record.getMessage()
        assert patch.why in text
    assert "With Keras 9.9" in text or "with Keras 9.9" in text
    assert target in text
    assert text.endswith("Install Keras 3.")
    for owner, name, value in before:
        assert vars(owner).get(name, value) is value


def test_a_function_that_takes_other_arguments_is_not_replaced():
    class Keras:
        def save(self, path, zipped=True, shard=None):
            pass

    with pytest.raises(ChangedFunctionError, match="self, path, zipped, shard"):
        hooks.replace(Keras, "save", lambda original, self, path, zipped=True: None)
    hooks.replace(Keras, "save", lambda original, self, path, *args, **kwargs: path)
    assert Keras().save(1) == 1


_BROKEN = """
    import json, os, sys

    import keras
    from keras.src.backend.tensorflow import trainer

    import tf_gradcomp as gc

    if sys.argv[1] == "function":
        del trainer.reduce_per_replica
    else:
        sys.modules["keras.src.trainers.data_adapters.array_data_adapter"] = None
    try:
        gc.CompressedOptimizer("sgd")
    except ImportError as error:
        json.dump(str(error), open(os.environ["RESULT_PATH"] + ".json", "w"))
"""


@pytest.mark.parametrize("missing", ["function", "module"])
def test_a_release_without_what_training_needs_ends_in_one_error_at_construction(missing):
    (worker,) = run_workers(_BROKEN, 1, [missing])
    text = result(worker)
    assert text.startswith(f"tf_gradcomp cannot train with Keras {keras.__version__} and Tensor")
    assert ("reduce_per_replica" if missing == "function" else "array_data_adapter") in text
    assert 'It is tested with Keras 3.15, and TensorFlow 2.17 to 2.21: pip install "keras' in text


def test_nothing_is_missing_or_changed_here(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("tf_gradcomp"), "propagate", True)
    for patch in patches.PATCHES:
        restored(monkeypatch, patch.replaces)
    apply(patches.PATCHES, "these", "")
    assert not caplog.records


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
    listed = {canonical(name) for patch in patches.PATCHES for name in patch.replaces}
    assert sorted(seen - listed) == sorted(listed - seen) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_only_one_module_touches_private_api(source):
    if source.name.startswith("tf_private") or source.name == "keras_private.py":
        return
    if source.parent.name == "hooks":
        return
    for node in ast.walk(ast.parse(source.read_text())):
        for module in imported(node):
            assert not module.startswith(("tensorflow.python", "keras.src")), module
        if isinstance(node, ast.Attribute):
            assert not is_private_of_others(node), ast.unparse(node)


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
    of_own_class = owner in ("self", "cls") or owner.startswith("super(")
    return not of_own_class and node.attr != "_asdict"  # part of a named tuple's interface
