"""The path of a gradient is short: few frames and files to the encoder and to a collective."""

from pathlib import Path

import pytest

from tests.workers import result, run_workers

PROGRAM = Path(__file__).parent / "programs/frames.py"
# Frames and files.
MOST = {
    "adacomp": (8, 6),
    "power_sgd(rank=1)": (8, 6),
    "adacomp on the strategy": (8, 7),
    "reduce_gradients": (8, 6),
}


def path(frames):
    return "\n".join(f"{file}: {name}" for file, name in frames)


@pytest.fixture(scope="module")
def found():
    return result(run_workers(PROGRAM, 2)[0])


@pytest.mark.parametrize("method", MOST)
def test_the_path_of_a_gradient_has_few_frames(found, method):
    longest = max(found[method], key=len)
    frames, files = MOST[method]
    assert len(longest) <= frames, path(longest)
    assert len({file for file, _ in longest}) <= files, path(longest)


@pytest.mark.parametrize("method", ["adacomp", "top_k"])
def test_a_variable_adds_no_more_nodes_to_a_step_than_without_compression(found, method):
    assert found["nodes"][method] <= found["nodes"]["dense"]


def test_a_new_job_hands_no_second_moments_over(found):
    assert found["handed over"] == 0
