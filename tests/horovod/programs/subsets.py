"""Ranks 0 and 2 train together, and rank 1 alone, by sets of processes."""

import keras
import numpy as np
import tensorflow as tf
from common import compiled, fit

import tf_gradcomp as gc
from tests.ranks import RANK, argument, data, digest, hvd, report

sets = [hvd.add_process_set(ranks) for ranks in ([0, 2], [1])]
own = next(one for one in sets if one.included())
variable = keras.Variable(np.zeros(4, "float32"), name="kernel")


def trained(method):
    group = gc.HorovodGroup(own)
    optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0), method, group=group)
    variable.assign(tf.zeros(4))
    optimizer.apply([tf.constant([1.0, 2, 3, 4]) * (RANK + 1)], [variable])
    return variable.numpy().tolist()


seen = {method: trained(method) for method in ("no_compression", "scalecom", "adacomp")}
try:
    gc.HorovodGroup(next(one for one in sets if not one.included()))
except ValueError as error:
    seen["not in it"] = str(error)


def backed_up(folder):
    """Returns the state of wrappers in a `MultiOptimizer` at the start and once restored."""

    def new_model(seed):
        keras.utils.set_random_seed(seed)
        wrap = lambda: gc.CompressedOptimizer("sgd", group=gc.HorovodGroup(own))  # noqa: E731
        by_name = keras.optimizers.OptimizerMap(wrap(), {".*bias": wrap()})
        return compiled(lambda: keras.optimizers.MultiOptimizer(by_name), seed)

    def trained(model, *callbacks):
        backup = gc.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        return fit(model, *data(2), epochs=1, callbacks=[*callbacks, backup])

    model, again = new_model(RANK), new_model(7)
    gc.broadcast_initial_state(model)
    begun = digest(model.weights)
    trained(model)
    epochs = trained(again).epoch
    return {
        "begun": begun,
        "trained": digest(model.weights),
        "restored": digest(again.weights),
        "epochs after": epochs,
    }


seen["backed up"] = backed_up(argument(1))
hvd.allreduce(tf.zeros([1]))  # Horovod ends for all when the first rank does
report(seen)
