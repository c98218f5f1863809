"""Sets of processes train separately."""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc
from tests import ranks
from tests.horovod.common import compiled, fit
from tests.horovod.jobs import largest_difference, needs_horovod, run_ranks
from tests.ranks import RANK, argument, data, digest, report
from tests.workers import results

pytestmark = needs_horovod
PROGRAM = Path(__file__)  # each rank runs this file


def trained(method):
    group = gc.HorovodGroup(own)
    optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0), method, group=group)
    variable.assign(tf.zeros(4))
    optimizer.apply([tf.constant([1.0, 2, 3, 4]) * (RANK + 1)], [variable])
    return variable.numpy().tolist()


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


def test_process_sets_train_separately(tmp_path):
    env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    seen = results(run_ranks(PROGRAM, 3, [tmp_path / "backup"], env=env))
    gradient = np.arange(1.0, 5)  # times rank + 1
    two_mean = one_gradient = [-2 * gradient]
    assert largest_difference([seen[0]["no_compression"]], two_mean) == 0
    for method in ("no_compression", "scalecom", "adacomp"):
        assert largest_difference([seen[1][method]], one_gradient) == 0
        assert seen[0][method] == seen[2][method]
    assert seen[0]["adacomp"] != seen[1]["adacomp"]
    assert "is not in" in seen[0]["not in it"]

    def by_set(what):
        first, apart, third = (rank["backed up"][what] for rank in seen)
        assert first == third
        return first, apart

    assert len(set(by_set("begun"))) == 2
    assert by_set("restored") == by_set("trained")
    assert len(set(by_set("trained"))) == 2
    assert by_set("epochs after") == ([], [])


if __name__ == "__main__":
    sets = [ranks.hvd.add_process_set(members) for members in ([0, 2], [1])]
    own = next(one for one in sets if one.included())
    variable = keras.Variable(np.zeros(4, "float32"), name="kernel")
    seen = {method: trained(method) for method in ("no_compression", "scalecom", "adacomp")}
    try:
        gc.HorovodGroup(next(one for one in sets if not one.included()))
    except ValueError as error:
        seen["not in it"] = str(error)
    seen["backed up"] = backed_up(argument(1))
    ranks.hvd.allreduce(tf.zeros([1]))  # Horovod ends for all when the first rank does
    report(seen)
