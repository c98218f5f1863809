"""Results of a step are averaged over the replicas, or refused, or left alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.replicas import mirrored
from tests.workers import run_workers
from tf_gradcomp.groups.means import means_over_replicas, sums_over_replicas

pytestmark = pytest.mark.quick


def test_sums_and_means_cover_all_replicas_in_their_dtypes():
    strategy = mirrored(2)
    values = {"float": [1.5, 2.0], "whole": [[1], [4]], "flag": [True, False]}

    def own(context):
        return {name: pair[context.replica_id_in_sync_group] for name, pair in values.items()}

    values_by_dtype = {
        name: strategy.experimental_distribute_values_from_function(
            lambda context, name=name: tf.constant(own(context)[name])
        )
        for name in values
    }
    means = means_over_replicas(strategy, values_by_dtype)
    assert {name: mean.numpy().tolist() for name, mean in means.items()} == {
        "float": 1.75,
        "whole": [2.5],
        "flag": 0.5,
    }
    sums = sums_over_replicas(strategy, [values_by_dtype["float"], values_by_dtype["whole"]])
    assert [(s.numpy().tolist(), s.dtype) for s in sums] == [(3.5, tf.float32), ([5], tf.int32)]


@pytest.mark.parametrize(
    "value", [tf.constant("text"), tf.constant(1 + 2j), tf.ragged.constant([[1], [2, 3]])]
)
def test_results_without_a_mean_are_refused(value):
    with pytest.raises(ValueError, match="expected tensors of real numbers"):
        means_over_replicas(mirrored(2), {"loss": tf.constant(1.0), "other": value})


class Returning(keras.Sequential):
    """Has a `train_step` that returns a value without a mean."""

    def train_step(self, data):
        return {"text": tf.constant("text"), "whole": tf.constant([1, 2]), "nothing": None}


def test_with_one_replica_it_is_left_alone():
    seen = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(logs))
    with gc.MultiWorkerMirroredStrategy().scope():
        model = Returning([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[watch])
    (logs,) = seen
    assert logs["text"] == b"text"
    assert logs["nothing"] is None
    np.testing.assert_array_equal(logs["whole"], [1, 2])


XLA = """
    import keras
    import numpy as np
    import tf_gradcomp as gc

    with gc.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(gc.CompressedOptimizer("sgd"), "mse", jit_compile=True)
    try:
        model.evaluate(np.ones((4, 2)), np.ones((4, 1)), batch_size=4, verbose=0)
    except ValueError as error:
        print("refused:", error)
"""


def test_xla_is_refused_also_in_evaluate():
    for worker in run_workers(XLA, 2, check=False):
        assert "use jit_compile=False in model.compile" in worker.stdout
