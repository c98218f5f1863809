"""Runs Keras' fit, evaluate and predict with their surroundings: FOLDER WAY,... CHECK,..."""

import contextlib
import copy
import os
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf
from common import Setup, classification_loss, dense_model, digits, linear_model, state_digest

import tf_gradcomp as gc
from tests.ranks import RANK, argument, digest, report
from tf_gradcomp.exchange.exchange import residual_norm

FOLDER = pathlib.Path(argument(1))
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
        "scalars": scalars_in(pathlib.Path(board) / "train"),
        "evaluated": evaluated,
        "loss of outputs": float(classification_loss()(y, outputs)),
        "accuracy of outputs": float(np.mean(np.argmax(outputs, axis=1) == y)),
        "outputs": outputs,
        "predicted": model.predict(x, batch_size=BATCH, verbose=0),
    }


def scalars_in(folder):
    """The values by tag that TensorBoard's event files hold."""
    values = {}
    for path in sorted(pathlib.Path(folder).rglob("events.*")):
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


if __name__ == "__main__":
    seen = {}
    for way in argument(2).split(","):
        setup = Setup(way)
        seen[way] = {check: globals()[check](setup) for check in argument(3).split(",")}
        folder = FOLDER / way
        seen[way]["files"] = sorted(
            os.path.relpath(path, folder) for path in folder.rglob("*.keras")
        )
    report(seen)
