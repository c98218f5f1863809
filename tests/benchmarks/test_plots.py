"""Labels of plots are near their lines, and not over each other."""

import output
import pytest


@pytest.mark.parametrize(
    ("places", "apart"),
    [
        ([0.1, 0.5, 0.9], [0.1, 0.5, 0.9]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.2, 0.5, 0.52, 0.54], [0.2, 0.42, 0.52, 0.62]),
        ([0.5, 0.5, 0.6], [13 / 30, 16 / 30, 19 / 30]),
        ([0.0, 0.0, 0.96, 0.97], [0.0, 0.1, 0.9, 1.0]),
        ([], []),
    ],
)
def test_labels_are_spaced_by_the_smallest_moves(places, apart):
    assert output.spaced(places, 0.1) == pytest.approx(apart)
