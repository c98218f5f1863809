"""An op that is given an empty list or a tensor without elements does not end the process."""

import contextlib
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tests.compressors.lockstep import Lockstep, specs_of
from tests.compressors.methods import METHODS
from tf_gradcomp import ops
from tf_gradcomp.ops import library

REFUSED = (tf.errors.InvalidArgumentError, TypeError, ValueError)
EMPTY = [(0,), (0, 3), (3, 0)]


@pytest.fixture(scope="module")
def calls():
    """A valid call of each op: its arguments by name."""
    native, seen = library.load(), {}

    def recording(name, function):
        def call(**arguments):
            seen.setdefault(name, arguments)
            return function(**arguments)

        return call

    ours = {name: getattr(native, name) for name in dir(native) if _is_op(native, name)}
    with pytest.MonkeyPatch.context() as patch:
        proxy = {name: recording(name, function) for name, function in ours.items()}
        patch.setattr(library, "load", lambda: SimpleNamespace(**proxy))
        gradients = [[np.ones(shape, np.float32) for shape in [(7, 6), (5,)]]] * 2
        for method in METHODS:
            lockstep = Lockstep(method.compressor, specs_of(gradients[0]), 2)
            for _ in range(2):
                lockstep.step(gradients)
        one, variable = tf.constant([1.0]), tf.Variable([1.0])
        moments = ops.SecondMoments([variable], 1, beta_2=0.9, epsilon=0.1, corrects_epsilon=True)
        ops.precondition(moments, [one])
        for method in [
            name.removesuffix("_put_back") for name in ours if name.endswith("_put_back")
        ]:
            encoded = seen[f"{method}_encode"]
            payload = ours[f"{method}_encode"](**encoded)[0]
            taken = inspect.signature(ours[f"{method}_put_back"]).parameters
            both = {name: value for name, value in encoded.items() if name in taken}
            proxy[f"{method}_put_back"](**both, payload=payload)
        ops.qsgd_errors(one, [4], bucket_size=32)
        ops.pass_if_equal(one, one, one, "they differ")
        accumulated, boosted = ops.residual_accumulate(one, one)
        positions, largest = ops.local_bin_select(accumulated, boosted, bin_size=1)
        ops.ternary_quantize(accumulated, positions, largest)
    missing = set(ours) - set(seen)
    assert not missing
    return [(name, ours[name], arguments) for name, arguments in seen.items()]


def _is_op(native, name):
    return not name.startswith("_") and hasattr(native, f"{name}_eager_fallback")


def test_of_every_op(calls):
    for _name, op, valid in calls:
        for argument, value in valid.items():
            for empty in _without_elements(value):
                with contextlib.suppress(*REFUSED):
                    op(**{**valid, argument: empty})


def _without_elements(value):
    """An argument's value without elements, in several forms; none for a number or a text."""
    if isinstance(value, (list, tuple)):
        tensors = value and all(tf.is_tensor(one) for one in value)
        yield []
        if tensors and value[0].dtype != tf.resource:
            yield from ([tf.zeros(shape, one.dtype) for one in value] for shape in EMPTY)
    elif tf.is_tensor(value) or isinstance(value, np.ndarray):
        dtype = tf.as_dtype(value.dtype)
        if dtype != tf.resource:
            yield from (np.zeros(shape, dtype.as_numpy_dtype) for shape in EMPTY)
