"""The ops as a part of TensorFlow: static shapes, variables, threads."""

import numpy as np
import tensorflow as tf

from tests.ops.adacomp_cases import DTYPES, assert_same_bits, encode, normal
from tests.workers import run_workers
from tf_gradcomp import ops

LAYOUT = {"bin_sizes": [50, 0], "fingerprint": 3}
SHAPES = [(20, 30), (7,)]
SIZE = 3200  # rows of this size are aligned, so that TensorFlow unstacks them without a copy


class ShapeTest(tf.test.TestCase):
    def test_fused_ops_infer_their_shapes(self):
        variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]

        @tf.function(input_signature=[tf.TensorSpec(shape) for shape in SHAPES])
        def step(*gradients):
            payload, tensor_bytes = ops.adacomp_encode(variables, gradients, 0, **LAYOUT)
            gathered = tf.stack([payload, payload])
            reduced, finite = ops.adacomp_decode(gathered, 0, shapes=SHAPES, **LAYOUT)
            shapes = (payload, tensor_bytes, finite, *reduced)
            assert [tensor.shape.as_list() for tensor in shapes] == [
                [None],
                [2],
                [],
                [20, 30],
                [7],
            ]
            return reduced

        reduced = step(*[tf.ones(shape) for shape in SHAPES])
        self.assertAllClose(reduced[0], 2 * tf.ones(SHAPES[0]))

    def test_single_steps_infer_their_shapes(self):
        @tf.function(input_signature=[tf.TensorSpec((20, 30))] * 2)
        def step(residual, gradient):
            accumulated, boosted = ops.residual_accumulate(residual, gradient)
            positions, bin_max = ops.local_bin_select(accumulated, boosted, bin_size=50)
            signs, scale, left = ops.ternary_quantize(accumulated, positions, bin_max)
            shapes = (accumulated, boosted, positions, bin_max, signs, scale, left)
            assert [tensor.shape.as_list() for tensor in shapes] == [
                [20, 30],
                [20, 30],
                [None],
                [12],
                [None],
                [],
                [20, 30],
            ]
            return left

        step.get_concrete_function()

    def test_unknown_shapes_stay_unknown(self):
        @tf.function(input_signature=[tf.TensorSpec(None)] * 2)
        def step(accumulated, boosted):
            positions, bin_max = ops.local_bin_select(accumulated, boosted, bin_size=50)
            assert bin_max.shape.as_list() == [None]
            return positions

        self.assertAllEqual(step(normal(3), np.zeros(3, np.float32)), [])


class VariableTest(tf.test.TestCase):
    def test_a_value_read_before_the_step_stays_as_it_was(self):
        for dtype in DTYPES:
            variable = tf.Variable(normal(1000))
            expected = variable.numpy()
            snapshot = variable.read_value()
            view = tf.identity(snapshot)
            ops.adacomp_encode(
                [variable], [normal(1000, 1, 1, dtype)], 0, bin_sizes=[50], fingerprint=0
            )
            assert_same_bits(snapshot.numpy(), expected)
            assert_same_bits(view.numpy(), expected)
            self.assertNotAllEqual(variable, expected)

    def test_put_back_leaves_a_value_read_before_as_it_was(self):
        variable = tf.Variable(tf.zeros(1000))
        payload, _ = ops.adacomp_encode(
            [variable], [normal(1000)], 0, bin_sizes=[50], fingerprint=0
        )
        snapshot = variable.read_value()
        expected = snapshot.numpy().copy()
        ops.adacomp_put_back([variable], payload, bin_sizes=[50], fingerprint=0)
        assert_same_bits(snapshot.numpy(), expected)
        self.assertNotAllEqual(variable, expected)

    def test_steps_run_in_program_order_in_a_graph(self):
        variable = tf.Variable(tf.zeros(1000))
        gradients = [normal(1000, 1, seed) for seed in range(3)]

        @tf.function
        def steps():
            return [
                ops.adacomp_encode([variable], [g], 0, bin_sizes=[50], fingerprint=0)[0]
                for g in gradients
            ]

        residual = np.zeros(1000, np.float32)
        for payload, gradient in zip(steps(), gradients, strict=True):
            expected = encode([residual], [gradient], [50], step=0, fingerprint=0)
            residual = expected.residuals[0]
            self.assertAllEqual(payload, expected.payload)
        assert_same_bits(variable.numpy(), residual)


class HandedOverTest(tf.test.TestCase):
    """A gradient whose memory nothing else uses becomes the new residual."""

    def setUp(self):
        super().setUp()
        self.layout = {"bin_sizes": [50, 500, 0], "fingerprint": 3}
        self.variables = [tf.Variable(normal(SIZE, 1, seed)) for seed in range(3)]
        self.before = [variable.numpy() for variable in self.variables]
        self.gradients = [normal(SIZE, 0.3, 10 + seed) for seed in range(3)]

    def step(self, parts=lambda gradients: gradients):
        """Encodes copies of the gradients, or parts of the copies, in a graph."""

        @tf.function(autograph=False)
        def run(gradients):
            copies = parts([tf.raw_ops.DeepCopy(x=gradient) for gradient in gradients])
            payload, _ = ops.adacomp_encode(self.variables, copies, 0, **self.layout)
            return payload

        return run([tf.constant(gradient) for gradient in self.gradients])

    def always_moves(self, parts=lambda gradients: gradients):
        """Returns whether all residuals move in every step: a read value can make one move, too."""
        moved = []
        for _ in range(5):
            before = self.addresses()
            self.step(parts)
            moved += [old != new for old, new in zip(before, self.addresses(), strict=True)]
        return all(moved)

    def addresses(self):
        return [variable.read_value()._numpy().ctypes.data for variable in self.variables]

    def assert_encoded(self, payload):
        expected = encode(self.before, self.gradients, step=0, **self.layout)
        self.assertAllEqual(payload, expected.payload)
        for variable, residual in zip(self.variables, expected.residuals, strict=True):
            assert_same_bits(variable.numpy(), residual)

    def test_the_residuals_move_into_the_gradients(self):
        self.assert_encoded(self.step())
        assert self.always_moves()

    def test_values_read_before_stay_as_they_were(self):
        snapshots = [variable.read_value() for variable in self.variables]
        self.assert_encoded(self.step())
        for snapshot, before in zip(snapshots, self.before, strict=True):
            assert_same_bits(snapshot.numpy(), before)

    def test_a_step_that_is_not_finite_changes_nothing(self):
        for bad in (np.nan, np.inf):
            self.gradients[2][-1] = bad
            self.assertLen(self.step(), 14)  # the header
            for variable, residual in zip(self.variables, self.before, strict=True):
                assert_same_bits(variable.numpy(), residual)

    def test_a_gradient_that_is_used_elsewhere_stays_as_it_was(self):
        given = [tf.constant(gradient) for gradient in self.gradients]
        payload, _ = ops.adacomp_encode(self.variables, given, 0, **self.layout)
        self.assert_encoded(payload)
        for tensor, gradient in zip(given, self.gradients, strict=True):
            assert_same_bits(tensor.numpy(), gradient)

    def test_one_gradient_for_all_residuals(self):
        self.gradients = self.gradients[:1] * 3
        self.assert_encoded(self.step(lambda copies: copies[:1] * 3))

    def test_a_part_of_a_larger_tensor_is_not_kept(self):
        self.gradients = [np.zeros(SIZE, np.float32)] * 3

        def first_parts(copies):
            wholes = [tf.raw_ops.DeepCopy(x=tf.stack([copy, copy + 1])) for copy in copies]
            return [tf.unstack(whole)[0] for whole in wholes]

        self.assert_encoded(self.step(first_parts))
        assert not self.always_moves(first_parts)

    def test_the_payload_can_be_put_back(self):
        payload = self.step()
        ops.adacomp_put_back(self.variables, payload, **self.layout)
        for variable, before, gradient in zip(
            self.variables, self.before, self.gradients, strict=True
        ):
            self.assertAllClose(variable, before + gradient, atol=4e-6)


PROGRAM = """
import hashlib, sys
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
from tests.ops.adacomp_cases import decode, encode, normal
sizes, bin_sizes = [1500007, 1500007, 300001, 3], [50, 500, 0, 50]
step = encode([normal(size) for size in sizes], [normal(size, 0.3, 1) for size in sizes], bin_sizes)
reduced, _ = decode([step.payload] * 3, [[size] for size in sizes], bin_sizes)
flagged = [normal(size, 0.3, 1) for size in sizes]
flagged[1][-1] = float("nan")
undone = encode([normal(size) for size in sizes], flagged, bin_sizes)
adam = {"step": 1, "beta_2": 0.999, "epsilon": 1e-7}
moments = [abs(normal(size, 0.1, 2)) for size in sizes]
zeros = [0 * normal(size) for size in sizes]
divided = encode(zeros, [normal(size, 0.3, 1) for size in sizes], bin_sizes, moments, adam)
given_back = encode(zeros, flagged, bin_sizes, moments, adam)
parts = [step.payload, *step.residuals, *[r.numpy() for r in reduced], *undone.residuals]
for of_one in (divided, given_back):
    parts += [of_one.payload, *of_one.residuals, *of_one.moments]
print("digest", hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest())
"""


def test_results_do_not_depend_on_the_number_of_threads():
    digests = set()
    for threads in (1, 4):
        (worker,) = run_workers(PROGRAM, 1, [threads])
        digests.add(worker.stdout.split("digest ")[1])
    assert len(digests) == 1
