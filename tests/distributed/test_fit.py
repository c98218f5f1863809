"""Keras 3 under our strategy: uncompressed, with `CompressedOptimizer`, with a compressor on it."""

import contextlib
import copy
import functools
import os
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close, training
from tests.distributed.common import (
    Setup,
    classification_loss,
    dense_model,
    digits,
    linear_model,
    state_digest,
)
from tests.ranks import RANK, argument, digest, report
from tests.workers import results, run_workers
from tf_gradcomp.exchange.exchange import residual_norm

PROGRAM = Path(__file__)  # each worker runs this file
BATCH = 32
ROWS = 150  # the last batch has 22


def adam(setup):
    return lambda: setup.wrap(keras.optimizers.Adam(1e-2, epsilon=0.05))


def values(model):
    return [np.asarray(variable).tolist() for variable in model.trainable_variables]


def callbacks_and_metrics(setup):
    x, y = digits(ROWS)
    validation = digits(70, seed=2)
    folder = FOLDER / setup.way
    model = setup.model(dense_model, adam(setup), metrics=["accuracy"])
    board = gc.worker_path(folder / "logs")
    callbacks = [
        keras.callbacks.ModelCheckpoint(gc.worker_path(folder / "{epoch}.keras")),
        keras.callbacks.EarlyStopping("val_loss", min_delta=100, patience=1),
        keras.callbacks.TensorBoard(board),
    ]
    if setup.way != "unwrapped":
        callbacks.insert(0, gc.callbacks.CompressionMonitor(table=False))
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=5,
        verbose=0,
        shuffle=False,
        validation_data=validation,
        callbacks=callbacks,
    )
    outputs = np.asarray(model(x))
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    return {
        **state_digest(model),
        "values": values(model),
        "history": history.history,
        "scalars": scalars_in(Path(board) / "train"),
        "evaluated": evaluated,
        "loss of outputs": float(classification_loss()(y, outputs)),
        "accuracy of outputs": float(np.mean(np.argmax(outputs, axis=1) == y)),
        "outputs": outputs,
        "predicted": model.predict(x, batch_size=BATCH, verbose=0),
    }


def scalars_in(folder):
    """The values by tag that TensorBoard's event files hold."""
    values = {}
    for path in sorted(Path(folder).rglob("events.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                if value.HasField("tensor") and value.tensor.dtype == tf.float32.as_datatype_enum:
                    values.setdefault(value.tag, []).append(float(tf.make_ndarray(value.tensor)))
    return values


def steps_per_execution(setup):
    return trained_as_above(setup, steps_per_execution=3)


def second_strategy(setup):
    """As where a notebook's cell runs twice; and a strategy with other settings."""
    try:
        gc.MultiWorkerMirroredStrategy(compressor="cast", two_level=False)
        error = None
    except ValueError as raised:
        error = str(raised)
    first, setup.strategy = setup.strategy, gc.MultiWorkerMirroredStrategy(compressor="adacomp")
    copied = copy.deepcopy(first)
    return {
        **trained_as_above(setup),
        "error": error,
        "is first": [setup.strategy is first, copied is first],
    }


def eager(setup):
    return trained_as_above(setup, run_eagerly=True)


def loop_in_a_function(setup):
    x, y = digits(ROWS)
    model = setup.model(dense_model, adam(setup))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    batches = setup.strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def train(batches):
        for batch in batches:
            setup.strategy.run(model.train_step, [batch])

    for _ in range(2):
        train(batches)
    return state_digest(model)


def data_of_each(setup):
    """Rows of each step, of batches of 4, where worker 0 has 3 of them and worker 1 has 5."""
    rows = tf.data.Dataset.range(12 if RANK == 0 else 20)
    batches = rows.filter(lambda _: True).batch(4)  # so that nobody knows how many there are
    data = iter(setup.strategy.distribute_datasets_from_function(lambda _: batches))
    last = tf.Variable(0.0, dtype=tf.float64)

    @tf.function
    def step():
        rows = tf.size(setup.strategy.experimental_local_results(data.get_next())[0])
        with tf.control_dependencies([rows]):
            last.assign(tf.timestamp())
        return rows

    seen = [int(step())]
    if RANK == 0:
        time.sleep(3)
    before = time.time()
    with contextlib.suppress(tf.errors.OutOfRangeError):
        while True:
            seen.append(int(step()))
            if len(seen) == 2:
                second = {"begun": before, "got": float(last)}
    return {"rows": seen, **second}


def unknown_sizes(setup):
    """Trains a model by data whose end is known, and by data whose end is not."""
    data = tf.data.Dataset.from_tensor_slices(digits(5 * BATCH)).batch(BATCH)
    steps = 2 if setup.way == "optimizer" else None
    seen = []
    for batches in (data, data.filter(lambda *_: True)):
        inner = lambda: keras.optimizers.AdamW(  # noqa: E731
            1e-2, weight_decay=0.1, gradient_accumulation_steps=steps
        )
        model = setup.model(linear_model, lambda inner=inner: setup.wrap(inner()))
        model.fit(batches, epochs=3, verbose=0)
        seen.append(
            {**state_digest(model), "iterations": int(np.array(model.optimizer.iterations))}
        )
        if setup.way == "optimizer":
            seen[-1]["exchanges"] = model.optimizer.exchange.exchanges
            seen[-1]["traffic"] = str(model.optimizer.exchange.traffic())
    return seen


class Spy(keras.layers.Layer):
    """Notes what rows it is given."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def call(self, x):
        tf.numpy_function(lambda rows: self.note(rows[:, 0].tolist()), [x], [])
        return x


def generators(setup):
    """The rows of each step; the second generator is still at work when the program ends."""
    rows = []

    def batches(count, seconds=0.0):
        for i in range(count):
            time.sleep(seconds)
            x = np.arange(4 * i, 4 * i + 4, dtype="float32")[:, np.newaxis]
            yield x, x

    def spied():
        return keras.Sequential([keras.layers.Input((1,)), Spy(rows.append), keras.layers.Dense(1)])

    model = setup.model(spied, lambda: keras.optimizers.SGD(1e-6), loss="mse")
    seen = {}
    for name, run in {
        "fit": lambda: model.fit(batches(5), verbose=0),
        "evaluate": lambda: model.evaluate(batches(5), verbose=0),
        "slow": lambda: model.fit(batches(100, 0.1 * RANK), steps_per_epoch=5, verbose=0),
    }.items():
        run()
        seen[name] = [*rows]
        rows.clear()
    return seen


def float8(setup):
    try:
        setup.model(narrow, adam(setup)).fit(*digits(ROWS), batch_size=BATCH, verbose=0)
    except ValueError as error:
        return str(error)


def narrow():
    hidden = keras.layers.Dense(4, dtype="float8_from_float32")
    return keras.Sequential([keras.layers.Input((8,)), hidden, keras.layers.Dense(3)])


def outside_scope(setup):
    """Returns the errors of models, optimizers or metrics that are created outside the scope."""

    def model():
        return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])

    def compiled(model, metric=None):
        model.compile("sgd", classification_loss(), metrics=[metric] if metric else [])
        return model

    scope = setup.strategy.scope
    metric = keras.metrics.SparseCategoricalAccuracy(name="own")
    with scope():
        inside, inside_with_metric = model(), compiled(model(), metric)
        changed, with_slots = compiled(model()), model()
    changed.layers[0].enable_lora(2)
    with_slots.layers[0].enable_lora(2)
    with scope():
        with_slots.compile(keras.optimizers.Adam(), classification_loss())
    models = {
        "model": compiled(model()),
        "compile": compiled(inside),
        "metric": inside_with_metric,
        "lora": changed,
        "lora, with slots": with_slots,
    }
    seen = {}
    for name, out in models.items():
        try:
            out.fit(*digits(ROWS), batch_size=BATCH, verbose=0)
        except ValueError as error:
            seen[name] = str(error)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        alone = compiled(model())
    alone.fit(*digits(ROWS), batch_size=BATCH, verbose=0)
    return seen


def trained_as_above(setup, **compile_args):
    x, y = digits(ROWS)
    model = setup.model(dense_model, adam(setup), **compile_args)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    return {**state_digest(model), "values": values(model), "loss": history.history["loss"]}


def forms_of_input(setup):
    x, y = digits(ROWS)
    a, b = x[:, :4], x[:, 4:]
    dataset = tf.data.Dataset.from_tensor_slices(((a, b), y)).batch(BATCH)
    seen = {}
    for form in ("dict", "dataset of tuples"):
        model = setup.model(two_inputs, adam(setup))
        if form == "dict":
            data = {"x": {"a": a, "b": b}, "y": y, "batch_size": BATCH, "shuffle": False}
        else:
            data = {"x": dataset}
        history = model.fit(**data, epochs=1, verbose=0)
        seen[form] = {**state_digest(model), "loss": history.history["loss"]}
    predicted = model.predict({"a": a, "b": b}, batch_size=BATCH, verbose=0)
    seen["predicted"] = predicted
    seen["outputs"] = np.asarray(model((a, b)))
    seen["evaluated"] = model.evaluate((a, b), y, batch_size=BATCH, verbose=0)
    seen["loss of outputs"] = float(classification_loss()(y, seen["outputs"]))
    return seen


def two_inputs():
    inputs = {name: keras.Input((4,), name=name) for name in ("a", "b")}
    joined = keras.layers.Concatenate()(list(inputs.values()))
    hidden = keras.layers.Dense(16, activation="relu")(joined)
    return keras.Model(list(inputs.values()), keras.layers.Dense(3)(hidden))


def batch_normalization(setup):
    x, y = digits(ROWS)

    def build():
        return keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(3),
            ]
        )

    model = setup.model(build, adam(setup))
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    return {**state_digest(model), "loss": history.history["loss"]}


def synchronized_batch_normalization(setup):
    """Has constant weights of the same shapes as its statistics."""
    x, y = digits(128, classes=8)

    def build():
        layers = [keras.layers.BatchNormalization(synchronized=True) for _ in range(2)]
        return keras.Sequential([keras.layers.Input((8,)), *layers])

    model = setup.model(build, lambda: setup.wrap(keras.optimizers.SGD(0.0)))
    before = digest(model.trainable_variables)
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    return {
        "weights as before": digest(model.trainable_variables) == before,
        "statistics": digest(model.non_trainable_variables),
        "moved": [float(np.abs(np.asarray(v)).max()) for v in model.non_trainable_variables],
    }


def mean_of_a_step(setup):
    def step():
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        return {"of each class": tf.fill([3], 10.0 * float(rank)), "loss": 10.0 * float(rank)}

    mean = setup.strategy.reduce("MEAN", setup.strategy.run(step), axis=None)
    return {name: value.numpy().tolist() for name, value in mean.items()}


class EachClass(keras.Sequential):
    """Returns a value of each class from its steps, as metrics may do."""

    def test_step(self, data):
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        return {"of each class": tf.constant([1.0, 2.0, 4.0]) + tf.cast(rank, tf.float32)}


def values_of_each_class(setup):
    with setup.strategy.scope():
        model = EachClass([keras.layers.Input((8,)), keras.layers.Dense(3)])
        model.compile()
    logs = model.test_on_batch(*digits(BATCH), return_dict=True)
    return np.asarray(logs["of each class"]).tolist()


def two_optimizers(setup):
    """Returns the moves by zero gradients, after another optimizer has sent only a part."""
    with setup.strategy.scope():
        shared, local = (keras.Variable(np.zeros((40, 40), "float32"), name=n) for n in "ab")
        both, one = keras.optimizers.SGD(1e-6), keras.optimizers.SGD(1.0)
        both.build([shared, local])
        one.build([shared])
    gradient = tf.constant(np.random.default_rng(0).normal(size=(40, 40)).astype("float32"))

    @tf.function
    def train_both():
        setup.strategy.run(lambda: both.apply([gradient, gradient], [shared, local]))

    @tf.function
    def train_one():
        setup.strategy.run(lambda: one.apply([tf.zeros_like(gradient)], [shared]))

    train_both()
    before = np.array(shared)
    for _ in range(3):
        train_one()
    left = residual_norm(setup.strategy.gradient_exchange([shared, local]))
    return {"left": left, "moved": float(np.abs(np.array(shared) - before).max())}


def mixed_precision(setup):
    x, y = digits(ROWS)
    seen, policies = {}, ["mixed_float16"]
    if setup.way == "optimizer":
        policies.append("mixed_bfloat16")
    for policy in policies:
        model = setup.model(dense_model, adam(setup), policy=policy)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
        seen[policy] = {
            **state_digest(model),
            "optimizer": type(model.optimizer).__name__,
            "loss": history.history["loss"],
        }
    return seen


COMPRESSED = ("optimizer", "strategy")
WAYS = ("unwrapped", *COMPRESSED)
MARKS = {
    "optimizer": pytest.mark.oldest,
    "strategy": pytest.mark.quick("compressor on the strategy"),
}
SUMS = 8 + 32 + 3  # the terms of all sums in the model
# Adam(0.01) has an epsilon of 0.05, and each of two epochs has 5 batches of at most 32 rows.
TRAINED = training(gain=0.01 / 0.05, terms=32 + SUMS, steps=2 * 5)


def marked(ways):
    """Each way is one job, which is among the quick ones or not."""
    return [pytest.param(way, marks=MARKS.get(way, ())) for way in ways]


compressed_ways = pytest.mark.parametrize("way", marked(COMPRESSED))
# Starting and tracing take seconds each, so not all is checked in every way to train.
TRAINED_ALIKE = ("callbacks_and_metrics", "steps_per_execution")
UNCOMPRESSED = (*TRAINED_ALIKE, "synchronized_batch_normalization")
CHECKS = {
    "unwrapped": (
        "outside_scope",
        *UNCOMPRESSED,
        "mean_of_a_step",
        "values_of_each_class",
        "float8",
        "unknown_sizes",
        "data_of_each",
        "generators",
    ),
    "optimizer": (
        *TRAINED_ALIKE,
        "forms_of_input",
        "mixed_precision",
        "unknown_sizes",
        "loop_in_a_function",
        "batch_normalization",
    ),
    "strategy": (*UNCOMPRESSED, "second_strategy", "eager", "mixed_precision", "two_optimizers"),
}


@functools.cache
def seen(way):
    """Returns the findings of two workers, by check."""
    with tempfile.TemporaryDirectory() as folder:
        args = [folder, way, ",".join(CHECKS[way])]
        workers = run_workers(PROGRAM, 2, args)
    return results(workers)


@pytest.fixture(params=marked(WAYS))
def way(request):
    return request.param


@pytest.mark.parametrize("check", ["callbacks_and_metrics", "steps_per_execution"])
def test_weights_and_slots_are_bit_equal_on_all_workers(way, check):
    assert_equal_state(*(worker[check] for worker in seen(way)))


@pytest.mark.parametrize(
    ("check", "way"),
    [
        ("batch_normalization", "optimizer"),
        ("loop_in_a_function", "optimizer"),
        ("eager", "strategy"),
    ],
)
def test_weights_and_slots_are_bit_equal_with(check, way):
    assert_equal_state(*(worker[check] for worker in seen(way)))


@pytest.mark.parametrize("check", ["callbacks_and_metrics", "steps_per_execution"])
def test_both_ways_to_compress_train_to_the_last_bit_alike(check):
    by_optimizer, by_strategy = (seen(way)[0][check] for way in COMPRESSED)
    assert by_optimizer["weights"] == by_strategy["weights"]
    assert by_optimizer["slots"] == by_strategy["slots"]
    assert losses(by_optimizer) == losses(by_strategy)


def test_compressed_training_differs_from_uncompressed():
    # else the tests above would hold for a compressor that is never called
    dense, compressed = (
        seen(way)[0]["callbacks_and_metrics"] for way in ("unwrapped", "optimizer")
    )
    assert dense["weights"] != compressed["weights"]


def test_training_lowers_the_loss(way):
    first, last = seen(way)[0]["callbacks_and_metrics"]["history"]["loss"]
    assert last < first


def test_history_covers_all_workers(way):
    first, second = (worker["callbacks_and_metrics"]["history"] for worker in seen(way))
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert first[name] == second[name]


def test_steps_per_execution_changes_nothing(way):
    one, three = (seen(way)[0][check] for check in ("callbacks_and_metrics", "steps_per_execution"))
    assert three["weights"] == one["weights"]
    assert three["slots"] == one["slots"]
    assert three["loss"] == one["history"]["loss"]


@pytest.mark.quick("compressor on the strategy")
def test_a_second_strategy_with_equal_settings_is_the_first_and_trains_alike():
    for worker in seen("strategy"):
        first, second = worker["callbacks_and_metrics"], worker["second_strategy"]
        assert second["is first"] == [True, True]
        assert second["loss"] == first["history"]["loss"]
        assert_equal_state(first, second)
        assert "another compressor, two_level; use it again" in second["error"]


def test_a_loop_in_a_function_trains_as_fit_does():
    # its payloads are longer in some steps than in others
    checks = seen("optimizer")[0]
    assert checks["loop_in_a_function"]["weights"] == checks["steps_per_execution"]["weights"]
    assert checks["loop_in_a_function"]["slots"] == checks["steps_per_execution"]["slots"]


def test_all_batches_of_a_generator_are_trained_on_in_step():
    for rank, worker in enumerate(seen("unwrapped")):
        rows = [[4.0 * i + 2 * rank, 4.0 * i + 2 * rank + 1] for i in range(5)]
        assert worker["generators"] == {"fit": rows, "evaluate": rows, "slow": rows}


def test_float8_layers_are_refused_where_keras_reduces():
    for worker in seen("unwrapped"):
        assert "kernel_scale" in worker["float8"]
        assert "are new values for these variables" in worker["float8"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("model", "each of its 2 workers would train the model alone"),
        ("compile", "'loss/total' of a metric was created outside the strategy's scope"),
        ("metric", "'own/total' of a metric was created outside"),
        ("lora", "lora_kernel_a' was created outside the scope"),
        ("lora, with slots", "lora_kernel_a' was created outside the scope"),
    ],
)
def test_objects_created_outside_the_scope_are_refused(what, message):
    for worker in seen("unwrapped"):
        assert message in worker["outside_scope"][what]


@pytest.mark.parametrize("way", ["unwrapped", "optimizer"])
def test_nothing_of_a_step_is_done_at_an_end_of_data_that_was_not_known(way):
    for worker in seen(way):
        known, unknown = worker["unknown_sizes"]
        assert unknown == known
        assert known["iterations"] == (7 if way == "optimizer" else 15)


def test_a_worker_without_data_gets_empty_batches_until_all_have_none():
    first, second = (worker["data_of_each"]["rows"] for worker in seen("unwrapped"))
    assert first == [4, 4, 4, 0, 0]
    assert second == [4, 4, 4, 4, 4]


def test_a_worker_with_data_does_not_wait_to_hear_whether_others_have_some():
    late, early = (worker["data_of_each"] for worker in seen("unwrapped"))
    assert early["got"] < late["begun"]


@pytest.mark.quick("compressor on the strategy")
def test_run_eagerly_trains_as_the_graph_does():
    checks = seen("strategy")[0]
    graph, eager = checks["callbacks_and_metrics"], checks["eager"]
    for value, expected in zip(eager["values"], graph["values"], strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=TRAINED)


def test_evaluate_covers_the_data_of_all_workers(way):
    for worker in seen(way):
        check = worker["callbacks_and_metrics"]
        assert_loss_of_outputs(check["evaluated"]["loss"], check)
        assert_close(check["evaluated"]["accuracy"], check["accuracy of outputs"])


def test_predict_returns_all_rows_in_order_on_every_worker(way):
    for worker in seen(way):
        check = worker["callbacks_and_metrics"]
        assert len(check["predicted"]) == 150
        assert_close(check["predicted"], check["outputs"], terms=SUMS)


def test_early_stopping_stops_all_workers_at_once(way):
    for worker in seen(way):
        assert len(worker["callbacks_and_metrics"]["history"]["loss"]) == 2


def test_model_checkpoint_writes_a_file_of_each_worker(way):
    expected = ["1.keras", "2.keras", "worker-1/1.keras", "worker-1/2.keras"]
    assert seen(way)[0]["files"] == expected


def as_float32(values):
    return np.float32(values).tolist()


def test_tensorboard_gets_the_losses(way):
    for worker in seen(way):
        check = worker["callbacks_and_metrics"]
        assert check["scalars"]["epoch_loss"] == as_float32(check["history"]["loss"])


@compressed_ways
def test_tensorboard_gets_what_the_monitor_measures(way):
    for worker in seen(way):
        check = worker["callbacks_and_metrics"]
        for name in (
            "payload_bytes",
            "sent_bytes",
            "dense_bytes",
            "compression_ratio",
            "fewer_bytes",
            "skipped_steps",
            "residual_norm",
        ):
            values = check["history"][name]
            assert len(values) == 2
            assert check["scalars"][f"epoch_{name}"] == as_float32(values)


@compressed_ways
def test_monitor_counts_all_bytes_of_a_step(way):
    parameters = 8 * 32 + 32 + 32 * 3 + 3
    for worker in seen(way):
        history = worker["callbacks_and_metrics"]["history"]
        assert history["dense_bytes"] == [4 * parameters] * 2
        assert history["skipped_steps"] == [0, 0]
        for payload, sent, ratio, wire in zip(
            *(
                history[name]
                for name in ("payload_bytes", "sent_bytes", "compression_ratio", "fewer_bytes")
            ),
            strict=True,
        ):
            assert 48 < payload < 4 * parameters / 2
            assert ratio == pytest.approx(4 * parameters / payload)
            # to the one other worker: the longer of both payloads, and its length
            assert sent >= payload + 4
            assert wire == pytest.approx(4 * parameters / sent)  # 2 (N - 1) / N is 1 for two


@pytest.mark.oldest
def test_dict_and_tuple_and_dataset_inputs_train_alike():
    for worker in seen("optimizer"):
        check = worker["forms_of_input"]
        assert check["dict"] == check["dataset of tuples"]
        assert check["dict"] == seen("optimizer")[0]["forms_of_input"]["dict"]


def test_dict_and_tuple_inputs_evaluate_and_predict():
    for worker in seen("optimizer"):
        check = worker["forms_of_input"]
        assert_close(check["predicted"], check["outputs"], terms=SUMS)
        assert_loss_of_outputs(check["evaluated"], check)


def test_the_mean_of_a_nested_structure_is_over_all_workers():
    for worker in seen("unwrapped"):
        assert worker["mean_of_a_step"] == {"of each class": [5, 5, 5], "loss": 5}


def test_values_of_each_class_keep_their_shape_in_keras_means():
    for worker in seen("unwrapped"):
        assert worker["values_of_each_class"] == [1.5, 2.5, 4.5]


def test_the_residual_of_one_optimizer_is_not_applied_by_another():
    for worker in seen("strategy"):
        assert worker["two_optimizers"]["left"] > 1
        assert worker["two_optimizers"]["moved"] == 0


def test_synchronized_batch_statistics_are_not_compressed():
    # The weights are constant, so the statistics depend only on the data.
    ways = ("unwrapped", "strategy")
    checks = [worker["synchronized_batch_normalization"] for way in ways for worker in seen(way)]
    assert len({check["statistics"] for check in checks}) == 1
    for check in checks:
        assert check["weights as before"]
        assert min(check["moved"]) > 0


@pytest.mark.parametrize(
    ("way", "policy"),
    [
        *(pytest.param(way, "mixed_float16", marks=MARKS[way]) for way in COMPRESSED),
        pytest.param("optimizer", "mixed_bfloat16", marks=MARKS["optimizer"]),
    ],
)
def test_mixed_precision_trains_to_bit_equal_weights(way, policy):
    first, second = (worker["mixed_precision"][policy] for worker in seen(way))
    assert first == second
    assert first["loss"][-1] < first["loss"][0]


@compressed_ways
def test_keras_scales_the_loss_under_mixed_float16(way):
    # the case of the test above that is the hard one
    optimizer = seen(way)[0]["mixed_precision"]["mixed_float16"]["optimizer"]
    assert optimizer == "LossScaleOptimizer"


def test_more_workers_have_bit_equal_weights_and_slots(tmp_path):
    args = [tmp_path, "optimizer", "steps_per_execution"]
    reports = results(run_workers(PROGRAM, 3, args))
    for worker in reports[1:]:
        assert worker == reports[0]


def assert_equal_state(first, second):
    assert first["weights"] == second["weights"]
    assert first["slots"] == second["slots"]


def assert_loss_of_outputs(loss, check):
    """The loss of a row is off by at most twice as much as its outputs."""
    largest = np.abs(check["outputs"]).max()
    assert_close(loss, check["loss of outputs"], terms=ROWS + 2 * SUMS, scale=largest)


def losses(check):
    return check["loss"] if "loss" in check else check["history"]["loss"]


if __name__ == "__main__":
    FOLDER, WAY = Path(argument(1)), argument(2)
    setup, folder = Setup(WAY), FOLDER / WAY
    found = {check: globals()[check](setup) for check in argument(3).split(",")}
    files = sorted(os.path.relpath(path, folder) for path in folder.rglob("*.keras"))
    report({**found, "files": files})
