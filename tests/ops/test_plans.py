"""Settings as tensors that change between steps, and payloads that follow another plan."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import assert_close
from tests.ops.adacomp_cases import assert_same_bits, normal, rows
from tests.reference import adacomp, qsgd, sign_sgd, top_k
from tests.reference import payload as payload_format
from tf_gradcomp import ops

pytestmark = [pytest.mark.oldest, pytest.mark.quick]
SHAPES = [(70, 31), (1001,), (5,)]


@dataclasses.dataclass(frozen=True)
class Method:
    name: str  # names of the ops, without their verbs
    setting: str
    plans: list[list[int]]
    common: dict[str, int] = dataclasses.field(default_factory=dict)
    rounding: dict[str, int] = dataclasses.field(default_factory=dict)

    def op(self, what: str) -> Callable:
        more = {**self.common, **(self.rounding if what == "encode" else {})}
        return functools.partial(getattr(ops, f"{self.name}_{what}"), fingerprint=7, **more)


METHODS = [
    Method("adacomp", "bin_sizes", [[50, 500, 0], [50, 501, 0], [0, 0, 0]]),
    Method("top_k", "entries", [[20, 9, 0], [20, 10, 0], [0, 0, 0]]),
    Method(
        "qsgd",
        "bits",
        [[4, 3, 0], [4, 5, 0], [0, 0, 0]],
        {"bucket_size": 96},
        {"replica": 1},
    ),
]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


def gradients_of(seed):
    return [normal(shape, 0.3, seed + i) for i, shape in enumerate(SHAPES)]


def encode(method, plan):
    """A payload of step 3, and the variables that keep the rest."""
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    settings = {method.setting: plan}
    payload, _ = method.op("encode")(variables, gradients_of(0), 3, **settings)
    return payload.numpy(), variables


@every_method
def test_a_payload_of_another_plan_is_refused_and_the_replica_named(method):
    local, other = (encode(method, plan)[0] for plan in method.plans[:2])
    decode = functools.partial(method.op("decode"), shapes=SHAPES)
    settings = {method.setting: method.plans[0]}
    decode(rows([local, local]), 3, **settings)
    message = "payload of replica 1: plan .* follows another plan"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        decode(rows([local, other]), 3, **settings)


@every_method
def test_put_back_refuses_another_plan_and_leaves_the_residuals(method):
    payload, variables = encode(method, method.plans[0])
    before = [variable.numpy() for variable in variables]
    with pytest.raises(tf.errors.InvalidArgumentError, match="follows another plan"):
        method.op("put_back")(variables, payload, **{method.setting: method.plans[1]})
    for variable, value in zip(variables, before, strict=True):
        assert_same_bits(variable.numpy(), value)


def test_velocities_are_not_masked_by_a_payload_of_another_plan():
    method = METHODS[1]
    payload, variables = encode(method, method.plans[0])
    keep = functools.partial(method.op("keep_velocity"), variables, gradients_of(0), payload, True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="follows another plan"):
        keep(entries=method.plans[1])
    keep(entries=method.plans[0])


@every_method
def test_settings_that_change_need_no_new_trace(method):
    settings = tf.Variable(method.plans[0], dtype=tf.int64)
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]

    @tf.function(autograph=False)
    def step(gradients):
        in_force = {method.setting: settings.read_value()}
        payload, tensor_bytes = method.op("encode")(variables, gradients, 3, **in_force)
        reduced, _ = method.op("decode")(payload[tf.newaxis], 3, shapes=SHAPES, **in_force)
        return payload, tensor_bytes, reduced

    left = [np.zeros(shape, np.float32) for shape in SHAPES]
    reference = {"adacomp": adacomp, "top_k": top_k, "qsgd": qsgd}[method.name]
    for seed, plan in enumerate([*method.plans, method.plans[0]]):
        settings.assign(plan)
        before, gradients = left, gradients_of(10 * seed)
        payload, tensor_bytes, reduced = step([tf.constant(g) for g in gradients])
        more = {**method.common, **method.rounding, method.setting: plan}
        expected, left, counted = reference.encode_payload(
            before, gradients, 3, fingerprint=7, **more
        )
        np.testing.assert_array_equal(payload, expected)
        assert tensor_bytes.numpy().tolist() == counted
        for i, variable in enumerate(variables):
            assert_same_bits(variable.numpy(), left[i])
            assert_close(reduced[i] + left[i], before[i] + gradients[i], terms=4)
    assert step.experimental_get_tracing_count() == 1


@every_method
def test_settings_that_change_are_checked_in_each_step(method):
    settings = tf.Variable(method.plans[0], dtype=tf.int64, shape=[None])
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]

    @tf.function(autograph=False)
    def step():
        in_force = {method.setting: settings.read_value()}
        return method.op("encode")(variables, gradients_of(0), 3, **in_force)[0]

    step()
    settings.assign([0, 0, -1])
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{method.setting}\[2\] is -1; exp"):
        step()
    settings.assign([0, 0])
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{method.setting} has 2 entries; ex"):
        step()


@every_method
def test_settings_that_are_no_vector(method):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=rf"{method.setting} has shape \[1,3\]"
    ):
        encode(method, tf.constant([method.plans[0]], tf.int64))


def test_a_method_without_settings_follows_the_plan_of_none():
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    payload, _ = ops.sign_sgd_encode(variables, gradients_of(0), 3, fingerprint=7)
    zeros = [np.zeros(shape, np.float32) for shape in SHAPES]
    expected, _, _ = sign_sgd.encode_payload(zeros, gradients_of(0), 3, fingerprint=7)
    np.testing.assert_array_equal(payload, expected)
    assert payload_format.read(payload.numpy())[0].plan == payload_format.plan_of([])


@pytest.mark.parametrize(
    ("settings", "plan"),
    [([], -3065025357580258199), ([4, 0, 8], -5272987995569992037)],
    ids=str,
)
def test_a_plan_is_the_same_number_in_every_release_with_this_format(settings, plan):
    assert payload_format.plan_of(settings) == plan
