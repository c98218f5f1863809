"""State on an accelerator is copied to the host for the exchange, and back; no copy stays."""

from __future__ import annotations

import dataclasses
import gc as garbage
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.replicas import copies, method_names
from tests.test_exchange import Exchanging
from tf_gradcomp.exchange import state
from tf_gradcomp.exchange.setup import Candidate, Setup
from tf_gradcomp.exchange.state import Variables, state_on_op_device

pytestmark = pytest.mark.oldest
SHAPE = (3, 4)


def pretend(monkeypatch):
    """From now on the device CPU:1 counts as an accelerator."""
    monkeypatch.setattr(
        state,
        "_on_host",
        lambda variable: tf.DeviceSpec.from_string(variable.device).device_index != 1,
    )


@pytest.fixture
def _accelerator(monkeypatch):
    pretend(monkeypatch)


def elsewhere(value, shape=SHAPE):
    with tf.device("CPU:1"):
        return tf.Variable(tf.fill(shape, value))


def exchange(*variables):
    """Adds 1, 2, ... to the variables on the host in place, as the ops do."""
    with state_on_op_device({"residual": variables}) as handles:
        for index, handle in enumerate(handles["residual"], 1):
            # A symbolic handle has a device only where it was given one.
            assert not handle.device or "CPU:0" in handle.device
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
            tf.raw_ops.AssignVariableOp(resource=handle, value=value + index)


def assert_is(variable, value):
    np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, value))
    assert variable.device.endswith("CPU:1")


@pytest.mark.usefixtures("_accelerator")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_changes_on_the_host_are_copied_back(graph):
    variable = elsewhere(1.0)
    step = tf.function(lambda: exchange(variable)) if graph else lambda: exchange(variable)
    for after in (2.0, 3.0):
        step()
        assert_is(variable, after)


@pytest.mark.usefixtures("_accelerator")
def test_several_functions_and_branches_each_have_their_own_copies():
    variable = elsewhere(0.0)
    first = tf.function(lambda: exchange(variable))
    second = tf.function(
        lambda also: tf.cond(also, lambda: (exchange(variable), True)[1], lambda: False)
    )
    for function, args, after in (
        (first, (), 1.0),
        (second, (tf.constant(True),), 2.0),
        (first, (), 3.0),
        (second, (tf.constant(False),), 3.0),
        (second, (tf.constant(True),), 4.0),
    ):
        function(*args)
        assert_is(variable, after)


@pytest.mark.usefixtures("_accelerator")
def test_two_variables_never_share_a_copy(monkeypatch):
    # Python gives the id of a variable that is gone to another one.
    monkeypatch.setattr(state, "id", lambda _: 0, raising=False)
    first, second = elsewhere(1.0), elsewhere(10.0)
    exchange(first, second)
    assert_is(first, 2.0)
    assert_is(second, 12.0)


def memory():
    """Returns this process' memory in bytes."""
    garbage.collect()
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.usefixtures("_accelerator")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_no_copy_is_left_over(graph):
    elements = 10 * 2**20  # malloc gives 32 MiB and more back at once
    garbage.freeze()  # else each collection would look through what all tests before have left
    before = 0
    for index in range(24):
        variable = elsewhere(1.0, (elements,))
        step = tf.function(exchange) if graph else exchange
        step(variable)
        step(variable)
        garbage.collect()  # a function refers to itself
        if index == 7:  # TensorFlow keeps some buffers of the first ones
            before = memory()
    assert memory() - before < 5 * 4 * elements


def test_an_exchange_is_the_same_with_state_on_an_accelerator(monkeypatch):
    generator = np.random.default_rng(0)
    gradients = [
        [[generator.normal(size=s).astype("float32") for s in ((20, 30), (30,))] for _ in range(2)]
        for _ in range(3)
    ]

    def residuals():
        exchanging = Exchanging(compressor=gc.compressors.AdaComp(50))
        for step in gradients:
            exchanging.step(step)
        return [copies(exchanging.strategy, r) for r in exchanging.exchange.residuals]

    expected = residuals()
    pretend(monkeypatch)
    for ours, theirs in zip(residuals(), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


ALL = {"residual", "second_moment", "largest_second_moment"}
COPIED = gc.compressors.TopK(momentum=0.9)


@pytest.mark.parametrize(
    ("compressor", "on_gpu"),
    [
        *((one, ALL) for one in map(gc.compressors.get, method_names()) if one.has_gpu_kernels),
        (gc.compressors.ScaleCom(value_bits=8), ALL),
        (COPIED, ALL - {"residual"}),
        (gc.compressors.TopK(clip_norm=1.0), ALL - {"residual"}),
        (gc.compressors.AdaComp(warmup_steps=1), ALL),
        (gc.compressors.QSGD(warmup_steps=1, warmup=gc.compressors.AdaComp()), ALL),
        (gc.compressors.QSGD(warmup_steps=1, warmup=COPIED), ALL - {"residual"}),
        (gc.compressors.AdaComp(warmup_steps=1, warmup=COPIED), set()),
        (gc.compressors.LGC(), ALL - {"residual"}),
        (gc.compressors.LGreCo("qsgd"), ALL),
        (gc.compressors.LGreCo("power_sgd"), ALL),
        (gc.compressors.LGreCo("top_k(momentum=0.9)"), ALL - {"residual"}),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else None,
)
def test_state_stays_on_a_gpu_if_every_op_that_has_it_runs_there(compressor, on_gpu):
    kept = dict.fromkeys(Variables._fields) | {"state": {name: [] for name in ALL}}
    fields = dict.fromkeys(field.name for field in dataclasses.fields(Setup))
    given = {"chosen": Candidate(compressor), "variables": Variables(**kept)}
    setup = Setup(**{**fields, **given})
    assert setup.on_gpu == on_gpu
