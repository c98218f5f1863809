"""A value passes where what travelled with it is as expected."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tf_gradcomp import ops

pytestmark = [pytest.mark.oldest, pytest.mark.quick]


class PassIfEqualTest(tf.test.TestCase):
    def test_a_value_of_any_kind_passes_where_both_are_equal(self):
        for value in (tf.constant([[1, 2]]), tf.constant("text"), tf.zeros([0], tf.bfloat16)):
            passed = ops.pass_if_equal(value, [4.0, -0.0], [4.0, 0.0], "never said")
            self.assertAllEqual(passed, value)

    def test_any_difference_is_an_error_with_the_message(self):
        for actual in ([4.0, 1.0], [4.0, float("nan")], [4.0], [[4.0, 0.0]]):
            with pytest.raises(tf.errors.InvalidArgumentError, match="not what was sent"):
                ops.pass_if_equal(tf.constant(1), actual, [4.0, 0.0], "not what was sent")

    def test_other_replicas_do_not_wait_for_it(self):
        """As they would for an op with a side effect."""

        @tf.function
        def two_replicas(tags):
            values = [ops.pass_if_equal(tf.constant(1), tags, [1.0], "differ") for _ in range(2)]
            return tf.add_n(values)

        graph = two_replicas.get_concrete_function(tf.TensorSpec([1])).graph
        checks = [op for op in graph.get_operations() if op.type == "PassIfEqual"]
        self.assertLen(checks, 2)
        assert [list(op.control_inputs) for op in checks] == [[], []]
        self.assertAllEqual(two_replicas([1.0]), 2)
