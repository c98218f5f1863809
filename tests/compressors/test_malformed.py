"""A malformed request or result is refused when a step is traced, by the name of its field."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.compressors.lockstep import Lockstep, specs_of
from tf_gradcomp.compressors import Compressor
from tf_gradcomp.compressors.aggregation import sum_payloads
from tf_gradcomp.compressors.base import Reduced
from tf_gradcomp.compressors.requests import AllGather, AllReduce, Broadcast

pytestmark = pytest.mark.quick
GRADIENTS = [[np.ones((2, 3), np.float32), np.ones(4, np.float32)]] * 2
WORDS = tf.zeros([3], tf.int32)
GOOD = Reduced([tf.zeros([2, 3]), tf.zeros([4])], tf.constant(True), tf.zeros([2], tf.int64))


@dataclasses.dataclass(eq=False)
class Asks(Compressor, registered=False):
    """Yields one request and returns one result; None in place of the request: yields nothing."""

    request: Any
    result: Any = GOOD
    name = "asks"
    warmup = None

    def reduce(self, inputs):
        request = self.request(inputs) if callable(self.request) else self.request
        if request is not None:
            yield request
        return self.result

    def get_config(self):
        return {}


class Returns(Asks, registered=False):
    def reduce(self, inputs):
        return self.result


def step(method, *, graph=False):
    return Lockstep(method, specs_of(GRADIENTS[0]), 2, graph=graph).step(GRADIENTS)


def rank_inputs(inputs):
    return AllGather(tf.zeros([1 + inputs.rank], tf.int32), same_length=True)


@pytest.mark.parametrize(
    "request_",
    [
        None,
        AllGather(WORDS),
        AllGather(WORDS, same_length=True),
        lambda inputs: AllGather(tf.zeros([inputs.rank], tf.int32)),
        AllReduce(tf.zeros([2], tf.bfloat16)),
        AllReduce(tf.zeros([2], tf.int64)),
        Broadcast(WORDS, tf.constant(0)),
    ],
    ids=["nothing", "gather", "equal", "different", "sum", "whole numbers", "broadcast"],
)
def test_well_formed_ones_pass(request_):
    assert step(Asks(request_)).finite == [True, True]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (lambda _: AllGather(tf.zeros([3])), r"AllGather\.payload .*int32.*float32"),
        (lambda _: AllGather(tf.zeros([1, 3], tf.int32)), r"AllGather\.payload .*\(1, 3\)"),
        (lambda _: AllGather(np.zeros(3, np.int32)), r"AllGather\.payload must be a tensor"),
        (lambda _: AllGather(WORDS, tf.constant(True)), r"AllGather\.same_length must be a bool"),
        (lambda _: AllReduce(tf.zeros([3], tf.int32)), r"AllReduce\.values .*float32.*int32"),
        (lambda _: AllReduce(tf.zeros([3], tf.float64)), r"AllReduce\.values .*float64"),
        (lambda _: AllReduce(tf.zeros([0])), r"AllReduce\.values must not be empty"),
        (lambda _: AllReduce(tf.zeros([3]), tf.zeros([1])), r"AllReduce\.metadata must be None"),
        (lambda _: Broadcast(tf.zeros([3]), tf.constant(0)), r"Broadcast\.payload .*int32"),
        (lambda _: Broadcast(WORDS[:0], tf.constant(0)), r"Broadcast\.payload must not be empty"),
        (lambda _: Broadcast(WORDS, 0), r"Broadcast\.root must be a tensor"),
        (lambda _: Broadcast(WORDS, tf.constant(0, tf.int64)), r"Broadcast\.root .*int64"),
        (WORDS, "must yield an AllGather, AllReduce or Broadcast"),
    ],
)
@pytest.mark.parametrize("graph", [False, True])
def test_requests_that_a_job_cannot_answer_are_refused(request_, field, graph):
    with pytest.raises((TypeError, ValueError), match=field):
        step(Asks(request_), graph=graph)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"gradients": GOOD.gradients[:1]}, r"gradients must have a tensor for each of 2 .* 1\."),
        ({"gradients": GOOD.gradients[::-1]}, r"gradients\[0\] .*\(2, 3\); .*\(4,\)"),
        (
            {"gradients": [GOOD.gradients[0], tf.zeros([4], tf.float16)]},
            r"gradients\[1\] .*float16",
        ),
        ({"finite": True}, "finite must be a tensor of bool"),
        ({"finite": tf.constant([True])}, r"finite .*\(1,\)"),
        ({"finite": tf.constant(1.0)}, "finite .*float32"),
        ({"tensor_bytes": tf.zeros([2], tf.int32)}, "tensor_bytes .*int64.*int32"),
        ({"tensor_bytes": tf.zeros([], tf.int64)}, r"tensor_bytes .*\(2,\)"),
    ],
)
@pytest.mark.parametrize("graph", [False, True])
def test_results_that_the_exchange_cannot_use_are_refused(change, field, graph):
    with pytest.raises((TypeError, ValueError), match=rf"asks: Reduced\.{field}"):
        step(Asks(None, GOOD._replace(**change)), graph=graph)


def test_a_reduce_without_yield_is_refused():
    with pytest.raises(TypeError, match="asks: reduce must be a generator"):
        step(Returns(None))


def test_anything_but_a_reduced_is_refused():
    with pytest.raises(TypeError, match="asks: reduce must return a Reduced; received None"):
        step(Asks(None, None))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    "request_",
    [
        rank_inputs,
        lambda inputs: AllReduce(tf.zeros([1 + inputs.rank])),
        lambda inputs: Broadcast(tf.zeros([1 + inputs.rank], tf.int32), tf.constant(0)),
        lambda inputs: AllGather(tf.range(1 + tf.cast(inputs.step, tf.int32) + inputs.rank), True),
    ],
    ids=["gather", "sum", "broadcast", "of unknown length"],
)
def test_replicas_in_lockstep_may_not_give_vectors_of_different_lengths(request_, graph):
    with pytest.raises(tf.errors.InvalidArgumentError, match="vectors must have equal lengths"):
        step(Asks(request_), graph=graph)


def test_replicas_in_lockstep_must_agree_on_lengths_being_equal():
    with pytest.raises(RuntimeError, match="make different requests"):
        step(Asks(lambda inputs: AllGather(WORDS, same_length=inputs.rank == 0)))


@pytest.mark.parametrize("graph", [False, True])
def test_a_function_that_puts_back_may_return_nothing(graph):
    class PutsBack(Asks, registered=False):
        def reduce(self, inputs):
            def decode(payloads, step, shapes):
                return GOOD.gradients, tf.constant(False)

            def put_back(residuals, payload):
                for residual, gradient in zip(residuals, inputs.gradients, strict=True):
                    tf.raw_ops.AssignVariableOp(resource=residual, value=gradient)

            payload = tf.zeros([20], tf.int32) + 1
            payloads = yield AllGather(payload, same_length=True)
            return sum_payloads(inputs, payload, payloads, GOOD.tensor_bytes, decode, put_back)

    for kept in step(PutsBack(None), graph=graph).residuals:
        for residual, gradient in zip(kept, GRADIENTS[0], strict=True):
            np.testing.assert_array_equal(residual, gradient)
