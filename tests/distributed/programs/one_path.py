"""Saves by one path on all workers, and on the chief alone: FOLDER."""

import csv
import io
import os
import pathlib
import zipfile

import h5py
import keras
import numpy as np
import tensorflow as tf
from common import Setup, dense_model, digits

import tf_gradcomp as gc
from tests.ranks import RANK, argument, exchange_of, report
from tf_gradcomp.strategy.coordinated import coordinated

os.chdir(argument(1))
setup = Setup("optimizer")
x, y = digits(48)


def new_model():
    adam = lambda: setup.wrap(keras.optimizers.Adam(1e-2), precondition="auto")  # noqa: E731
    model = setup.model(dense_model, adam)
    with setup.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model


model = new_model()
exchange = exchange_of(model)
NAMES = ("residual", "second_moment")


def fit(*callbacks, model=model):
    model.fit(x, y, batch_size=24, verbose=0, shuffle=False, callbacks=list(callbacks))


def sums():
    """Sums the state of all workers, by a collective."""
    return {name: [np.asarray(v).tolist() for v in exchange.state[name]] for name in NAMES}


def own():
    return {name: [v.values[0].numpy().tolist() for v in exchange.state[name]] for name in NAMES}


def held(path):
    """Reads the content of a Keras file."""
    content = pathlib.Path(path).read_bytes()
    if path.endswith(".keras"):
        content = zipfile.ZipFile(io.BytesIO(content)).read("model.weights.h5")
    with h5py.File(io.BytesIO(content)) as file:
        stored = file["optimizer/vars"]
        return {n: [stored[f"{n}_{i}"][()].tolist() for i in range(4)] for n in NAMES}


def held_by_checkpoint(path):
    reader = tf.train.load_checkpoint(path)
    shapes = reader.get_variable_to_shape_map()
    return sorted(
        np.abs(reader.get_tensor(name)).sum().tolist()
        for name in shapes
        if "/residual/" in name or "/second_moment/" in name
    )


def on_all():
    """Keras' callbacks with one path, each on all workers."""
    callbacks = [
        keras.callbacks.ModelCheckpoint("{epoch}.keras"),
        keras.callbacks.ModelCheckpoint("batch.weights.h5", save_weights_only=True, save_freq=1),
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.TensorBoard("logs"),
    ]
    fit(*callbacks)
    with setup.strategy.scope():
        model.save("m.keras")
    seen = {"m.keras": held("m.keras"), "1.keras": held("1.keras"), "sums": sums()}
    seen["batch.weights.h5"] = held("batch.weights.h5")
    with open("log.csv") as file:
        seen["log"] = list(csv.DictReader(file))
    manager = tf.train.CheckpointManager(checkpoint(), "checkpoints", max_to_keep=2)
    for _ in range(3):
        manager.save()
    names = os.listdir("checkpoints")  # TensorFlow may just now replace its own file of the state
    seen["checkpoints"] = sorted(name for name in names if not name.startswith("checkpoint.tmp"))
    seen["latest"] = manager.latest_checkpoint
    seen["in checkpoint"] = held_by_checkpoint(manager.latest_checkpoint)
    for _ in range(2):  # the second time over the first
        checkpoint().write("prefix")
        model.save("folder", zipped=False)
        model.save_weights("shards.weights.json", max_shard_size=1e-6)
        model.export("served", verbose=False)
    seen["prefix"] = held_by_checkpoint("prefix")
    served = tf.saved_model.load("served")
    seen["served"] = served.serve(x).numpy().tolist()
    seen["predicted"] = model.predict(x, verbose=0).tolist()
    model.save_weights(f"temporary-{RANK}.weights.h5")
    seen["paths of their own"] = os.path.exists(f"temporary-{RANK}.weights.h5")
    return seen


def checkpoint():
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def without_the_exchange():
    """Saves residuals by their variables alone, then by a save that does not know of them."""
    step()
    wanted = sums()["residual"]
    tf.train.Checkpoint(left=list(exchange.residuals)).write("left")
    names = [f"left/{i}/.ATTRIBUTES/VARIABLE_VALUE" for i in range(len(wanted))]
    seen = {"wanted": wanted, "held": [tf.train.load_variable("left", n) for n in names]}
    step()
    with coordinated([], "incomplete"):
        try:
            exchange.saving.read(exchange.residuals[0])
        except ValueError as error:
            seen["error"] = str(error)
    return seen


def on_the_chief():
    """Saves on the chief alone, as in programs for Horovod and DDP, while other workers
    continue."""
    seen = {}
    if RANK == 0:
        fit(keras.callbacks.ModelCheckpoint("best.keras"))
        model.save("chief.keras")
        model.export("chief-served", verbose=False)
        seen = {"best.keras": held("best.keras"), "chief.keras": held("chief.keras")}
    else:
        fit()
    seen["sums"] = sums()
    step()
    setup.strategy.saves._wait = 3.0
    seen["own"] = own()
    if RANK == 0:
        model.save_weights("own.weights.h5")
        seen["own.weights.h5"] = held("own.weights.h5")
        checkpoint().write("own/checkpoint")
        seen["own checkpoint"] = held_by_checkpoint("own/checkpoint")
    step()
    model.optimizer.collect_state()
    if RANK == 0:
        model.save_weights("collected.weights.h5")
        seen["collected.weights.h5"] = held("collected.weights.h5")
    seen["sums of collected"] = sums()
    step()
    model.save_weights("after.weights.h5")  # all workers again
    seen["after.weights.h5"], seen["sums after"] = held("after.weights.h5"), sums()
    return seen


@tf.function
def step():
    @tf.autograph.experimental.do_not_convert
    def on_replica():
        rows = tf.constant(x[RANK * 8 : RANK * 8 + 8])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(rows) ** 2)
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)

    setup.strategy.run(on_replica)


def errors():
    """Collects the errors that all workers raise for unwritable and unreadable paths."""
    seen = {}
    try:
        model.save_weights("missing/m.weights.h5")
    except OSError as error:
        seen["no folder"] = str(error)
    if RANK == 0:
        with h5py.File("m.weights.h5", "w") as torn, h5py.File("after.weights.h5") as whole:
            for name in set(whole) - {"optimizer"}:
                whole.copy(name, torn)
    setup.strategy.reduce("SUM", tf.ones([]), axis=None)
    new_model().load_weights("m.weights.h5")
    return seen


if __name__ == "__main__":
    seen = {"all": on_all(), "alone": without_the_exchange()}
    seen |= {"chief": on_the_chief(), "errors": errors()}
    report({**seen, "is chief": gc.is_chief()})
