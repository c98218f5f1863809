"""Ranks that differ in a setting all get an error that says in which."""

import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import keras
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.horovod.common import compiled, fit, told
from tests.horovod.jobs import needs_horovod, run_ranks
from tests.ranks import RANK, compressed, data, report
from tests.workers import results
from tf_gradcomp.advice.cost_model import Kind
from tf_gradcomp.advice.probe import Collectives
from tf_gradcomp.compressors import requests
from tf_gradcomp.exchange import saving
from tf_gradcomp.groups import agreement

pytestmark = needs_horovod
PROGRAM = Path(__file__)  # each rank runs this file


def variables_of(*shapes):
    return [keras.Variable(tf.zeros(s), name=f"kernel_{i}") for i, s in enumerate(shapes)]


def other_variables():
    shape = (3, 2) if RANK == 0 else (2, 3)
    compressed(keras.optimizers.SGD(0.1)).build(variables_of(shape))


def other_settings():
    method = gc.compressors.TopK(0.5 if RANK == 0 else 0.25)
    compressed(keras.optimizers.SGD(0.1), method).build(variables_of((3,)))


def other_versions():
    versions = agreement.package_versions
    agreement.package_versions = lambda: {**versions(), "keras": f"3.{RANK}"}
    try:
        compressed(keras.optimizers.SGD(0.1)).build(variables_of((3,)))
    finally:
        agreement.package_versions = versions


def other_weights():
    model = compiled(lambda: compressed(keras.optimizers.SGD(0.1)), seed=RANK)
    fit(model, *data(2))


def other_steps():
    """Loads the files of a job only on rank 0."""
    model = compiled(lambda: compressed(keras.optimizers.SGD(0.1)))
    model.optimizer.build(model.trainable_variables)
    if RANK == 0:
        model.optimizer.exchange.step.assign(7)
    fit(model, *data(2), callbacks=[gc.callbacks.BroadcastInitialState()])


def other_learning_rates():
    """As after a callback that changed it by the metric of one rank."""
    optimizer = compressed(keras.optimizers.SGD(0.1))
    variables = variables_of((3,))
    optimizer.apply([tf.ones(3)], variables)
    optimizer.collect_state()
    optimizer.learning_rate = 0.1 if RANK == 0 else 0.01
    optimizer.collect_state()


def other_gradients():
    first, second = variables = variables_of((3,), (3,))
    optimizer = compressed(keras.optimizers.SGD(0.1))
    optimizer.build(variables)
    given = [tf.ones(3), None] if RANK == 0 else [None, tf.ones(3)]
    optimizer.apply(given, [first, second])


def other_actions():
    optimizer = compressed(keras.optimizers.SGD(0.1))
    variables = variables_of((3,))
    optimizer.build(variables)
    if RANK == 0:
        optimizer.collect_state()
    else:
        optimizer.apply([tf.ones(3)], variables)


def timed_collective(wish):
    """Advice times a collective that is of another dtype on each rank, and fails if it is run."""
    kind = Kind(wish, "float32" if RANK == 0 else "int32", same_length=wish == "AllGather")
    group = gc.HorovodGroup()
    with mock.patch.object(requests, "check_tensor"):  # which refuses one of the dtypes
        Collectives(group, group.communicators()).curves({kind: 1.0}, enough=1e-3)


def other_data():
    model = compiled(lambda: compressed(keras.optimizers.SGD(0.1)))
    fit(model, *data(2 + RANK), callbacks=[gc.callbacks.BroadcastInitialState()])


class Unbuilt(keras.Model):
    def call(self, x):
        return x


def no_variables():
    """All ranks alike: Keras takes it for built after `build`, though it has made no variables."""
    model = Unbuilt()
    model.build((None, 4))
    gc.broadcast_initial_state(model)


def synchronized_layers():
    """All ranks alike."""
    layers = [keras.Input((4,)), keras.layers.BatchNormalization(synchronized=True)]
    model = compiled(
        lambda: compressed(keras.optimizers.SGD(0.1)),
        build=lambda: keras.Sequential([*layers, keras.layers.Dense(3)]),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(model, *data(2), callbacks=[gc.callbacks.BroadcastInitialState()])


def other_numbers_of_batches():
    """Rank 0 runs out of batches and saves, while rank 1 continues, and needs rank 0 for its
    step."""
    saving.COLLECT_SECONDS = 2.0
    batches = 2 + RANK
    fit(
        compiled(lambda: compressed("sgd")), *data(batches), callbacks=[gc.callbacks.CollectState()]
    )


WISHES = ["AllReduce", "AllGather", "Broadcast"]
ACTIONS = [
    other_variables,
    other_settings,
    other_versions,
    other_weights,
    other_steps,
    other_learning_rates,
    other_gradients,
    other_actions,
    other_data,
    no_variables,
    synchronized_layers,
    other_numbers_of_batches,  # last, because Horovod continues to wait
]


@pytest.fixture(scope="module")
def disagreeing():
    return results(run_ranks(PROGRAM))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("other_variables", "shape=(3, 2)"),
        ("other_settings", "compressor: worker 0 has"),
        ("other_versions", "keras: worker 0 has '3.0', worker 1 has '3.1'"),
        ("other_weights", "gc.callbacks.BroadcastInitialState()"),
        ("other_steps", "exchanges so far: worker 0 has 7, worker 1 has 0"),
        ("other_learning_rates", "as ReduceLROnPlateau does if its metric differs"),
        ("other_gradients", "gradient of 'kernel_0': worker 0 has 'dense', worker 1 has nothing"),
        ("other_actions", "next action: worker 0 has 'collecting state to save'"),
        ("other_data", "all workers): worker 0 has 2, worker 1 has 3"),
    ],
)
def test_ranks_report_their_differences(disagreeing, what, message):
    for rank in disagreeing:
        assert rank[what].startswith("WorkersDisagreeError: ")
        assert message in rank[what]


def test_a_model_without_variables_and_layers_unaware_of_ranks_are_reported(disagreeing):
    for rank in disagreeing:
        assert "'unbuilt' has no variables yet" in rank["no_variables"]
        assert "'batch_normalization' should have the statistics" in rank["synchronized_layers"]


@pytest.mark.parametrize("wish", ["AllReduce", "AllGather", "Broadcast"])
def test_a_collective_that_is_timed_is_run(disagreeing, wish):
    for rank in disagreeing:
        assert "Mismatched data types" in rank["timed"][wish]


def test_a_rank_with_fewer_batches_does_not_wait_for_the_others_without_an_end(disagreeing):
    first, second = (rank["other_numbers_of_batches"] for rank in disagreeing)
    assert first.startswith("WorkersDisagreeError: This worker has waited 2.0 seconds")
    assert "collecting state to save" in first
    assert "Horovod" in second


if __name__ == "__main__":
    timed = {wish: told(partial(timed_collective, wish)) for wish in WISHES}
    report({"timed": timed, **{action.__name__: told(action) for action in ACTIONS}})
