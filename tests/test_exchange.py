"""Tests `GradientExchange` without an optimizer: its counts, refusals and state."""

from __future__ import annotations

import gc as gc_module
import re
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close, rounding
from tests.replicas import collective, copies, mirrored, stepper
from tf_gradcomp.advice.probe import choose
from tf_gradcomp.compressors import AdaComp, LGreCo, NoCompression, ScaleCom, TopK
from tf_gradcomp.exchange.exchange import GradientExchange, residual_norm
from tf_gradcomp.exchange.setup import Candidate, Method
from tf_gradcomp.exchange.state import Traffic
from tf_gradcomp.groups import messages
from tf_gradcomp.groups.communicator import dense_ring_bytes
from tf_gradcomp.groups.current import current_group
from tf_gradcomp.simulation import Learners
from tf_gradcomp.tf_config import make_tf_config

WHOLE = AdaComp(dict.fromkeys(["dense", "vector", "embedding"]))


def exchange_by(compressor, policy=None):
    return GradientExchange(Method(repr(compressor), [Candidate(compressor)], choose), policy)


class Exchanging:
    """An exchange of plain `tf.Variable`s under a strategy, with its latest reduced gradients."""

    def __init__(
        self, replicas=2, compressor=WHOLE, policy=None, shapes=((20, 30), (30,)), dtype="float32"
    ):
        self.strategy = mirrored(replicas)
        with self.strategy.scope():
            self.variables = [
                tf.Variable(tf.zeros(shape, dtype), name=f"v{i}") for i, shape in enumerate(shapes)
            ]
            self.exchange = exchange_by(compressor, policy)
            self.exchange.build(self.variables)
        self.reduced = {}

    def reduce(self, gradients, variables=None):
        communicator = current_group().communicator()
        self.reduced[communicator.local_replica], self.finite, *_ = self.exchange.reduce(
            gradients, variables or self.variables
        )

    def reduce_nothing(self):
        communicator = current_group().communicator()
        self.reduced[communicator.local_replica], *_ = self.exchange.reduce([], [])

    def step(self, gradients):
        stepper(self.strategy, self.reduce)(gradients)


def ones(factor, shapes=((20, 30), (30,))):
    return [np.full(shape, factor, "float32") for shape in shapes]


def test_every_replica_gets_the_sum():
    exchanging = Exchanging(3)
    exchanging.step([ones(1), ones(2), ones(4)])
    assert len(exchanging.reduced) == 3
    for reduced in exchanging.reduced.values():
        for tensor in reduced:
            np.testing.assert_array_equal(tensor.numpy(), np.full(tensor.shape, 7.0))


@pytest.mark.parametrize("replicas", [2, 3])
def test_counts_the_traffic(replicas):
    exchanging = Exchanging(replicas)
    for _ in range(2):
        exchanging.step([ones(1)] * replicas)
    first = 8 + 4 * 600
    second = 8 + 4 * 30
    payload = 56 + first + second
    assert exchanging.exchange.traffic() == Traffic(
        exchanges=2,
        payload_bytes=2 * payload,
        sent_bytes=2 * (replicas - 1) * (payload + 4),
        dense_bytes=2 * 4 * 630,
        tensor_bytes={"v0": 2 * first, "v1": 2 * second},
    )


def test_traffic_since():
    later = Traffic(5, 50, 60, 500, {"a": 40, "b": 10})
    assert later.since(Traffic(2, 20, 25, 200, {"a": 20})) == Traffic(
        3, 30, 35, 300, {"a": 20, "b": 10}
    )


def test_a_dense_ring_passes_all_on_twice_but_its_own_share():
    assert dense_ring_bytes(2, 100) == 100
    assert dense_ring_bytes(4, 100) == 150
    assert dense_ring_bytes(1, 100) == 0


def test_each_replica_has_its_own_residual():
    exchanging = Exchanging(compressor=AdaComp(50))
    generator = np.random.default_rng(0)
    gradients = [
        [generator.normal(size=(20, 30)).astype("float32"), np.zeros(30, "float32")]
        for _ in range(2)
    ]
    exchanging.step(gradients)
    residuals = copies(exchanging.strategy, exchanging.exchange.residuals[0])
    assert (residuals[0] != residuals[1]).any()
    saved = exchanging.exchange.residuals[0].numpy()
    np.testing.assert_array_equal(saved, sum(residuals))
    norm = np.linalg.norm(residuals[0])
    assert residual_norm(exchanging.exchange) == pytest.approx(norm, rel=rounding(1, terms=20 * 30))


def test_some_of_the_variables_use_their_own_residuals():
    exchanging = Exchanging(compressor=AdaComp(50), shapes=((600,), (20, 30)))
    generator = np.random.default_rng(0)
    gradient = generator.normal(size=(20, 30)).astype("float32")
    step = stepper(
        exchanging.strategy,
        lambda grads: exchanging.reduce(grads, [exchanging.variables[1]]),
    )
    step([[gradient], [gradient]])
    first, second = (copies(exchanging.strategy, r) for r in exchanging.exchange.residuals)
    assert not any(copy.any() for copy in first)
    assert all(copy.any() for copy in second)
    assert exchanging.exchange.traffic().tensor_bytes["v0"] == 0


def test_counts_steps_and_skipped_steps():
    exchanging = Exchanging()
    assert not exchanging.exchange.facts.has_residual.numpy().any()
    exchanging.step([ones(1), ones(1)])
    exchanging.step([ones(1), ones(np.nan)])
    assert not exchanging.finite.numpy()
    assert exchanging.exchange.step.numpy() == 2
    assert exchanging.exchange.skipped_steps.numpy() == 1
    assert exchanging.exchange.facts.has_residual.numpy().any()


def test_large_tables_stay_sparse():
    exchanging = Exchanging(policy=gc.Policy(max_dense_elements=599))

    def reduce(grads):
        rows = tf.IndexedSlices(grads[0][:2], tf.constant([3, 5]), tf.constant([20, 30]))
        exchanging.reduce([rows, grads[1]])

    stepper(exchanging.strategy, reduce)([ones(1), ones(2)])
    table, bias = exchanging.reduced[0]
    assert isinstance(table, tf.IndexedSlices)
    expected = np.zeros((20, 30))
    expected[[3, 5]] = 3
    np.testing.assert_array_equal(tf.convert_to_tensor(table).numpy(), expected)
    np.testing.assert_array_equal(bias.numpy(), np.full(30, 3))
    assert exchanging.exchange.traffic().tensor_bytes == {
        "v0": 4 * 2 * (1 + 30),
        "v1": 8 + 4 * 30,
    }


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("single", [False, True], ids=["beside others", "single"])
@pytest.mark.parametrize("index", [tf.int32, tf.int64], ids=lambda dtype: dtype.name)
def test_counts_what_travels_sparse(replicas, single, index):
    exchanging = Exchanging(replicas, policy=gc.Policy(max_dense_elements=599))

    def reduce(grads):
        rows = tf.IndexedSlices(grads[0][:2], tf.constant([3, 5], index), tf.constant([20, 30]))
        if single:
            exchanging.reduce([rows], exchanging.variables[:1])
        else:
            exchanging.reduce([rows, grads[1]])

    step = stepper(exchanging.strategy, reduce)
    for _ in range(2):
        step([ones(1)] * replicas)
    table, bias = 4 * 2 * (1 + 30), 0 if single else 8 + 4 * 30
    apart = 8 + table  # with a tag and the number of slices
    whole = 0 if single else 56 + bias
    lengths = 4 if single else 8  # gathered ahead
    assert exchanging.exchange.traffic() == Traffic(
        exchanges=2,
        payload_bytes=2 * (apart + whole),
        sent_bytes=2 * (replicas - 1) * (apart + whole + lengths),
        dense_bytes=2 * 4 * (600 if single else 630),
        tensor_bytes={"v0": 2 * table, "v1": 2 * bias},
    )


def test_small_tables_travel_dense_and_come_back_as_slices():
    exchanging = Exchanging(policy=gc.Policy(max_dense_elements=600))

    def reduce(grads):
        rows = tf.IndexedSlices(grads[0][:2], tf.constant([3, 3]), tf.constant([20, 30]))
        exchanging.reduce([rows, grads[1]])

    stepper(exchanging.strategy, reduce)([ones(1), ones(2)])
    table = exchanging.reduced[0][0]
    np.testing.assert_array_equal(table.indices, [3])
    np.testing.assert_array_equal(table.values, np.full((1, 30), 6))


def test_is_saved_and_restored_with_a_checkpoint(tmp_path):
    before, after = Exchanging(compressor=AdaComp(50)), Exchanging(3, compressor=AdaComp(50))
    generator = np.random.default_rng(0)
    before.step(
        [[generator.normal(size=s).astype("float32") for s in ((20, 30), (30,))] for _ in range(2)]
    )
    path = tf.train.Checkpoint(exchange=before.exchange).save(tmp_path / "exchange")
    tf.train.Checkpoint(exchange=after.exchange).restore(path).assert_consumed()
    for old, new in zip(before.exchange.residuals, after.exchange.residuals, strict=True):
        shares = copies(after.strategy, new)
        assert_close(sum(shares), sum(copies(before.strategy, old)), terms=2 * 3)
        np.testing.assert_array_equal(shares[0], shares[2])
    assert after.exchange.step.numpy() == 1
    assert after.exchange.facts.has_residual.numpy().any()


def test_traffic_is_no_part_of_a_checkpoint():
    exchange = Exchanging().exchange
    kept = [exchange.step, exchange.skipped_steps, *exchange.facts.all, *exchange.residuals]
    assert {id(variable) for variable in exchange.variables} == set(map(id, kept))


def test_building_twice_changes_nothing():
    exchanging = Exchanging()
    residuals = list(exchanging.exchange.residuals)
    exchanging.exchange.build(exchanging.variables[:1])
    assert [id(r) for r in exchanging.exchange.residuals] == [id(r) for r in residuals]


def test_knows_the_variables_it_was_built_for():
    exchanging = Exchanging()
    assert exchanging.exchange.indices.include(exchanging.variables)
    assert exchanging.exchange.indices.include(exchanging.variables[1:])
    assert not exchanging.exchange.indices.include([tf.Variable(0.0)])


def test_takes_keras_variables_and_their_values_for_the_same():
    variable = keras.Variable(np.zeros(3, "float32"), name="kernel")
    exchange = exchange_by(WHOLE)
    exchange.build([variable])
    assert exchange.indices.include([variable.value])


def test_a_variable_it_was_not_built_for_is_refused():
    exchanging = Exchanging()
    stranger = tf.Variable(tf.zeros(3), name="stranger")
    step = stepper(exchanging.strategy, lambda grads: exchanging.reduce(grads, [stranger]))
    with pytest.raises(ValueError, match=r"'stranger' is not among.*: v0, v1\. .*build the"):
        step([[np.zeros(3, "float32")]] * 2)


def slices(rows, width, shape):
    return tf.IndexedSlices(tf.ones([rows, width]), tf.range(rows), tf.constant(shape))


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (lambda: tf.ones([30, 20]), "(30, 20)"),
        (lambda: tf.ones([600]), "(600,)"),
        (lambda: slices(5, 20, [30, 20]), "(30, 20)"),
        (lambda: slices(5, 15, [20, 30]), "(None, 15)"),
    ],
    ids=["turned", "flat", "slices of another table", "slices of another width"],
)
def test_a_gradient_of_another_shape_than_its_variable_is_refused(given, shape):
    exchanging = Exchanging()
    step = stepper(exchanging.strategy, lambda grads: exchanging.reduce([given(), grads[1]]))
    message = f"variable 'v0' has shape {shape}; expected (20, 30), the shape of the variable. Pass"
    with pytest.raises(ValueError, match=re.escape(message)):
        step([ones(1)] * 2)


def test_a_gradient_whose_shape_turns_out_to_be_another_ends_the_step():
    exchanging = Exchanging()
    rows = tf.Variable([30, 20])
    step = stepper(
        exchanging.strategy, lambda grads: exchanging.reduce([tf.ones(rows), grads[1]]), graph=True
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="30,20"):
        step([ones(1)] * 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("large", [False, True], ids=["made dense", "summed whole"])
def test_many_slices_of_one_row_are_added_up_exactly(dtype, large):
    """4,992 fits into bfloat16, and is more than it can count to one by one."""
    strategy, many = collective(), 4992
    with strategy.scope():
        table = tf.Variable(tf.zeros((4, 2), dtype), name="table")
        exchange = exchange_by(WHOLE, gc.Policy(max_dense_elements=7 if large else 8))
        exchange.build([table])
    reduced = tf.Variable(tf.zeros((4, 2)))

    def reduce(grads):
        values = tf.cast(tf.ones([many, 2]) * grads[0], dtype)
        one = tf.IndexedSlices(values, tf.ones([many], tf.int32), tf.constant([4, 2]))
        (total,), *_ = exchange.reduce([one], [table])
        reduced.assign(tf.cast(tf.convert_to_tensor(total), tf.float32))

    stepper(strategy, reduce, graph=True)([[np.float32(1)], [np.float32(0)]])
    expected = np.zeros((4, 2))
    expected[1] = many
    np.testing.assert_array_equal(reduced.numpy(), expected)


@pytest.mark.parametrize("dtype", ["float64", "complex64", "int32"])
def test_gradients_of_other_dtypes_are_refused_where_there_is_something_to_exchange(dtype):
    message = rf"'wide' is {dtype}.*expected one of float32, float16"
    with mirrored(2).scope():
        wide, used = tf.Variable(tf.zeros(3, dtype), name="wide"), tf.Variable(tf.zeros(3))
        exchange = exchange_by(WHOLE)
        exchange.build([wide, used])
    exchange.indices.check([used])
    with pytest.raises(ValueError, match=message):
        exchange.indices.check([wide])


def test_one_replica_takes_any_dtype():
    wide = tf.Variable(tf.zeros(3, tf.float64), name="wide")
    exchange = exchange_by(WHOLE)
    exchange.build([wide])
    (given,) = exchange.flush([tf.ones(3, tf.float64)], [wide])
    assert given.dtype == tf.float64


def test_without_a_strategy_the_group_is_one_replica():
    assert current_group().size == 1


def test_the_exchange_is_described_once(caplog):
    messages.forget()
    Exchanging(2)
    Exchanging(2)
    message = "2 replicas exchange gradients compressed by adacomp"
    assert len([text for text in caplog.messages if re.search(message, text)]) == 1


PLAN = "L-GreCo uses the settings of its method until a plan is made"


def test_an_exchange_gives_its_notices_when_it_is_built(caplog):
    messages.forget()
    Exchanging(2, LGreCo(TopK(0.05)))
    assert caplog.text.count(PLAN) == 1


def test_neither_a_single_replica_nor_a_simulation_gives_notices_of_a_job(caplog):
    messages.forget()
    Exchanging(1, LGreCo(TopK(0.05)))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(), "mse")
    learners = Learners(model, 2, LGreCo(TopK(0.05)))
    assert learners.exchange.built
    assert not caplog.messages


def test_a_single_replica_logs_a_notice_in_its_first_step(caplog):
    messages.forget()
    single = Exchanging(1)  # as where a model is only loaded
    assert not caplog.messages
    for _ in range(2):
        single.exchange.flush(ones(1), single.variables)
    assert caplog.messages == ["There is one worker, so gradients are not exchanged."]


def warned_of_lost_residuals(monkeypatch):
    """Returns the warnings about residuals that nothing can take."""
    said = []

    def warn(text, *args):
        if "NoCompression() keeps none" in text % args:
            said.append(text)

    monkeypatch.setattr(tf.get_logger(), "warning", warn)
    return said


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_lost_residuals_are_reported_when_restored_after_the_first_step(
    monkeypatch, replicas, graph
):
    said = warned_of_lost_residuals(monkeypatch)
    exchanging = Exchanging(replicas, compressor=NoCompression())

    def reduce(grads):
        if replicas == 1:
            exchanging.exchange.flush(grads, exchanging.variables)
        else:
            exchanging.reduce(grads)

    step = stepper(exchanging.strategy, reduce, graph=graph)
    step([ones(1)] * replicas)
    assert not said
    for restores in (1, 2):
        exchanging.exchange.facts.has_residual.assign([True, False])
        for _ in range(2):
            step([ones(1)] * replicas)
        assert len(said) == restores


@pytest.mark.parametrize(("worker", "times"), [(0, 1), (1, 0)])
def test_only_the_chief_of_several_workers_reports_lost_residuals(monkeypatch, worker, times):
    said = warned_of_lost_residuals(monkeypatch)
    exchanging = Exchanging(1, compressor=NoCompression())
    exchanging.exchange.facts.has_residual.assign([True, False])
    monkeypatch.setenv("TF_CONFIG", make_tf_config(["a:1", "b:1"], worker))
    exchanging.exchange.flush(ones(1), exchanging.variables)
    assert len(said) == times
    assert not any(exchanging.exchange.facts.has_residual.numpy())


def test_lost_residuals_are_reported_when_xla_compiles_the_step(monkeypatch):
    said = warned_of_lost_residuals(monkeypatch)
    variable = tf.Variable(tf.zeros(3), name="kernel")
    exchange = exchange_by(NoCompression())
    exchange.build([variable])
    exchange.facts.has_residual.assign([True])
    step = tf.function(lambda g: exchange.flush([g], [variable]), jit_compile=True, autograph=False)
    for _ in range(2):
        np.testing.assert_array_equal(step(tf.ones(3))[0], np.ones(3))
    assert len(said) == 1


@pytest.mark.parametrize("xla", [False, True])
def test_divided_residuals_without_their_second_moments_are_refused_also_by_xla(xla):
    """XLA itself drops assertions."""
    variable = tf.Variable(tf.zeros(3), name="kernel")
    exchange = exchange_by(TopK())
    exchange.build([variable])
    exchange.facts.moments_taken.assign([True])
    step = tf.function(lambda g: exchange.flush([g], [variable]), jit_compile=xla, autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="residuals that are divided by their"):
        step(tf.ones(3))


@pytest.mark.parametrize("compressor", [AdaComp(50), ScaleCom(beta=0.25)], ids=["1", "0.25"])
def test_slices_that_are_summed_separately_take_the_residual_of_their_table(compressor):
    exchanging = Exchanging(policy=gc.Policy(max_dense_elements=599), compressor=compressor)
    exchange = exchanging.exchange
    exchange.residuals[0].assign(np.full((20, 30), 6.0))  # three for each replica
    exchange.facts.has_residual.assign([True, False])

    def reduce(grads):
        rows = tf.IndexedSlices(grads[0][:1], tf.constant([3]), tf.constant([20, 30]))
        exchanging.reduce([rows, grads[1]])

    step = stepper(exchanging.strategy, reduce)
    for expected in (6.0, 0.0):
        step([ones(1), ones(1)])
        total = tf.convert_to_tensor(exchanging.reduced[0][0]).numpy()
        np.testing.assert_array_equal(total[3], np.full(30, expected + 2))
        np.testing.assert_array_equal(total[4], np.full(30, expected))
    np.testing.assert_array_equal(exchange.facts.has_residual.numpy(), [False, True])


def test_the_residual_of_a_float16_table_is_sent_in_parts_that_float16_can_hold():
    exchanging = Exchanging(
        shapes=[(2, 3)], policy=gc.Policy(max_dense_elements=5), dtype="float16"
    )
    exchange = exchanging.exchange
    exchange.residuals[0].assign(np.full((2, 3), 1.5e5))
    exchange.facts.has_residual.assign([True])

    def reduce(grads):
        exchanging.reduce([tf.IndexedSlices(grads[0], tf.constant([1]), tf.constant([2, 3]))])

    step = stepper(exchanging.strategy, reduce)
    sent = np.zeros((2, 3), "float32")
    while exchange.facts.has_residual.numpy().any():
        assert exchange.step.numpy() < 5
        step([[np.zeros((1, 3), "float16")]] * 2)
        rows = tf.convert_to_tensor(exchanging.reduced[0][0])  # added up in float16
        sent += rows.numpy()
        left = np.sum(copies(exchanging.strategy, exchange.residuals[0]), 0)
        steps = int(exchange.step.numpy())
        assert_close(sent + left, 1.5e5, terms=2, steps=steps, scale=65504, dtype="float16")
    assert exchange.skipped_steps.numpy() == 0
    assert not left.any()


@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_a_warm_up_sends_the_residual_in_any_units(beta):
    strategy = collective()
    with strategy.scope():
        variable = tf.Variable(tf.zeros((20, 30)), name="kernel")
        exchange = exchange_by(ScaleCom(beta=beta, warmup_steps=2))
        exchange.build([variable])
    exchange.residuals[0].assign(np.full((20, 30), 6.0))  # three for each replica
    exchange.facts.has_residual.assign([True])
    reduced = tf.Variable(tf.zeros((20, 30)))

    def reduce(grads):
        communicator = current_group().communicator()
        (total,), *_ = exchange.reduce(grads, [variable])
        if communicator.local_replica == 0:
            reduced.assign(total)

    step = stepper(strategy, reduce, graph=True)
    for expected in (8.0, 2.0):
        step([[np.ones((20, 30), "float32")]] * 2)
        np.testing.assert_array_equal(reduced.numpy(), np.full((20, 30), expected))
    assert not exchange.residuals[0].numpy().any()


@pytest.mark.parametrize("rows", [1, 5], ids=["gathered", "summed whole"])
def test_replicas_that_sum_slices_of_different_tables_end_with_an_error(rows):
    strategy = collective()
    with strategy.scope():
        tables = [tf.Variable(tf.zeros((4, 2)), name=name) for name in "ab"]
        exchange = exchange_by(AdaComp(50), gc.Policy(max_dense_elements=7))
        exchange.build(tables)

    def reduce(grads):
        communicator = current_group().communicator()
        slices = tf.IndexedSlices(grads[0], tf.range(rows) % 4, tf.constant([4, 2]))
        exchange.reduce([slices], [tables[communicator.local_replica]])

    with pytest.raises(tf.errors.InvalidArgumentError, match="sum different vectors"):
        stepper(strategy, reduce, graph=True)([[np.ones((rows, 2), "float32")]] * 2)


def test_no_gradients_are_no_step():
    exchanging = Exchanging()
    stepper(exchanging.strategy, lambda grads: exchanging.reduce_nothing())([ones(1), ones(1)])
    assert exchanging.reduced == {0: [], 1: []}
    assert exchanging.exchange.step.numpy() == 0


def test_a_variable_that_is_gone_leaves_its_place_to_none():
    exchange, variable = exchange_by(WHOLE), tf.Variable(tf.zeros(3), name="kernel")
    exchange.build([variable])
    gone = weakref.ref(variable)
    del variable
    gc_module.collect()
    assert gone() is None
