"""Tests the ops of LGC's steps: results compared with NumPy, shapes, and wrong arguments."""

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.adacomp_cases import DTYPES, assert_same_bits, normal
from tests.reference import lgc as reference
from tf_gradcomp import ops

WRONG = (tf.errors.InvalidArgumentError, ValueError)  # in eager execution, in a graph
SHAPES = ([40, 60], [], [0], [9, 3], [5], [2000])
ENTRIES = (24, 1, 0, 0, 5, 1)
WORDS = 9 + 1 + 1 + 1  # 24 places of 12 bits, 1 of 1, 5 of 3 and 1 of 11


@pytest.fixture(params=["eager", "graph"])
def call(request):
    return tf.function if request.param == "graph" else lambda function: function


class Replica:
    """A replica, with its state also in NumPy."""

    def __init__(self, dtype=tf.float32):
        self.residuals = [
            tf.Variable(normal(shape, 0.1, seed)) for seed, shape in enumerate(SHAPES)
        ]
        self.gradients = [
            tf.constant(normal(shape, 1, 10 + seed, dtype)) for seed, shape in enumerate(SHAPES)
        ]
        self.selection = ops.LeaderSelection(self.residuals, self.gradients, ENTRIES)
        self.sums = [
            (residual.numpy() + gradient.numpy().astype(np.float32)).reshape(-1)
            for residual, gradient in zip(self.residuals, self.gradients, strict=True)
        ]

    def chosen(self, order="value"):
        """Returns the reference's places; for a tensor that is sent whole, all places."""
        return [
            reference.largest(values, count, order) if count else np.arange(values.size)
            for values, count in zip(self.sums, ENTRIES, strict=True)
        ]

    def spread(self, values, kept):
        """Dense tensors that have the values at the chosen places, and else are `kept`."""
        positions = self.chosen()
        parts = np.split(values, np.cumsum([len(p) for p in positions])[:-1])
        dense = [array.copy() for array in kept]
        for array, where, part in zip(dense, positions, parts, strict=True):
            array[where] = part
        return [array.reshape(shape) for array, shape in zip(dense, SHAPES, strict=True)]


def sent_places(indices):
    return np.concatenate(
        [
            reference.packed(index, int(np.prod(shape)))
            for index, shape, count in zip(indices, SHAPES, ENTRIES, strict=True)
            if count
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["value", "index", "magnitude"])
def test_the_leader_chooses_the_largest_and_others_nothing(order, dtype, call):
    replica = Replica(dtype)
    select = call(lambda lead: ops.leader_select(replica.selection, lead, order=order))
    indices, finite = select(tf.constant(True))
    np.testing.assert_array_equal(indices, sent_places(replica.chosen(order)))
    others, others_finite = select(tf.constant(False))
    np.testing.assert_array_equal(others, np.zeros(WORDS))
    assert finite
    assert others_finite
    assert indices.shape == [WORDS]


@pytest.mark.parametrize("dtype", DTYPES)
def test_unsent_values_stay_in_the_residual(dtype, call):
    replica = Replica(dtype)
    indices, finite = ops.leader_select(replica.selection, True, order="value")
    given = call(lambda: ops.leader_take(replica.selection, indices, finite))()
    expected = [s[p] for s, p in zip(replica.sums, replica.chosen(), strict=True)]
    assert_same_bits(given, np.concatenate(expected))
    totals = 2 * given
    rests = given[:24] / 4
    before = [residual.numpy() for residual in replica.residuals]

    @call
    def apply(finite):
        return ops.leader_apply(replica.selection, indices, totals, rests, True, finite)

    *skipped, taken = tf.nest.flatten(apply(False))
    assert not taken
    for residual, values, reduced in zip(replica.residuals, replica.sums, skipped, strict=True):
        assert_same_bits(residual, values.reshape(residual.shape))
        assert not reduced.numpy().any()
    for residual, array in zip(replica.residuals, before, strict=True):
        residual.assign(array)
    *reduced, taken = tf.nest.flatten(apply(True))
    assert taken
    nothing = [np.zeros_like(values) for values in replica.sums]
    kept = np.concatenate([rests, np.zeros(len(given) - 24, np.float32)])
    for total, array in zip(reduced, replica.spread(totals.numpy(), nothing), strict=True):
        assert_same_bits(total, array)
    for residual, array in zip(replica.residuals, replica.spread(kept, replica.sums), strict=True):
        assert_same_bits(residual, array)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 3])
def test_non_finite_values_are_neither_chosen_nor_sent_nor_stored(place, bad):
    replica = Replica()
    wrong = replica.gradients[place].numpy()
    wrong.reshape(-1)[-1] = bad
    replica.gradients[place] = tf.constant(wrong)
    for lead in (True, False):
        indices, finite = ops.leader_select(replica.selection, lead, order="value")
        assert not finite
        np.testing.assert_array_equal(indices, np.zeros(WORDS))
    given = ops.leader_take(replica.selection, indices, finite)
    assert not given.numpy().any()
    before = [residual.numpy() for residual in replica.residuals]
    *reduced, taken = tf.nest.flatten(
        ops.leader_apply(replica.selection, indices, given + bad, tf.zeros([0]), finite, True)
    )
    assert not taken
    for residual, array, total in zip(replica.residuals, before, reduced, strict=True):
        assert_same_bits(residual, array)
        assert not total.numpy().any()


def test_a_residual_that_was_read_keeps_its_value():
    replica = Replica()
    indices, finite = ops.leader_select(replica.selection, True, order="value")
    read = [residual.read_value() for residual in replica.residuals]
    copies = [value.numpy().copy() for value in read]
    given = ops.leader_take(replica.selection, indices, finite)
    ops.leader_apply(replica.selection, indices, given, tf.zeros([0]), True, True)
    for value, copy in zip(read, copies, strict=True):
        assert_same_bits(value, copy)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (ENTRIES[:-1], "entries has 5 numbers"),
        ((2401, *ENTRIES[1:]), r"entries\[0\] is 2401; expected 1 to 2400"),
        ((-1, *ENTRIES[1:]), r"entries\[0\] is -1"),
    ],
)
def test_wrong_numbers_of_entries_are_refused(entries, message, call):
    selection = Replica().selection._replace(entries=list(entries))
    with pytest.raises(WRONG, match=message):
        call(lambda: ops.leader_select(selection, True, order="value"))()


def test_wrong_places_totals_and_rests_are_refused():
    replica = Replica()
    indices, finite = ops.leader_select(replica.selection, True, order="value")
    given = ops.leader_take(replica.selection, indices, finite)
    for word, bad, message in (
        (0, 2400, "tensor 0: place 2400 of entry 0; expected one below 2400"),
        (WORDS - 1, -1, "tensor 5: place 2047 of entry 0; expected one below 2000"),
        (WORDS - 1, 1 << 11, "tensor 5: the bits behind the last code are not 0"),
    ):
        wrong = tf.concat([indices[:word], [bad], indices[word + 1 :]], 0)
        with pytest.raises(WRONG, match=message):
            ops.leader_take(replica.selection, wrong, True)
    with pytest.raises(WRONG, match="places has 11 words; expected 12"):
        ops.leader_take(replica.selection, indices[1:], True)
    for totals, rests, message in (
        (given[1:], tf.zeros([0]), "totals has"),
        (given, tf.concat([given, [0.0]], 0), "rests has"),
    ):
        with pytest.raises(WRONG, match=message):
            ops.leader_apply(replica.selection, indices, totals, rests, True, True)


def test_shapes_are_known_while_a_graph_is_built():
    replica = Replica()

    @tf.function
    def step():
        indices, finite = ops.leader_select(replica.selection, True, order="value")
        assert indices.shape == [WORDS]
        given = ops.leader_take(replica.selection, indices, finite)
        assert given.shape == [31 + 27]
        reduced, _ = ops.leader_apply(replica.selection, indices, given, tf.zeros([0]), True, True)
        assert [list(total.shape) for total in reduced] == [list(shape) for shape in SHAPES]

    step()
