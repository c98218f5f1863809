"""Settings of the inner optimizer act as in one process with the whole batch.

The oracle is the bare Keras optimizer in one process. With every gradient sent whole, as float32,
two workers must train as it does.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.bounds import training
from tests.workers import result, run_workers

PROGRAMS = Path(__file__).parent / "programs"
STEPS = 6
FEATURES = [
    "momentum, schedule and class_weight",
    "AdamW and sample_weight",
    "clipnorm",
    "EMA",
    "accumulation",
    "accumulation and clipping",
    "loss scaler inside",
    "loss scaler around",
    "Embedding made dense",
    "Embedding left sparse",
    "means and accumulation",
    "means and loss scaler around",
    "frozen layer and variable without gradient",
]
# No optimizer moves a weight by more than half of its gradient's size: rates go up to 0.5, with
# momentum up to 0.05 / (1 - 0.9), and Adam has an epsilon of 0.05. Sums are over up to 32 rows, 40
# words, 30 inputs of a layer and 3 classes.
TRAINED = training(gain=0.5, terms=32 + 40 + 30 + 3, steps=STEPS)
EXCHANGES = {
    "accumulation": STEPS // 3,
    "means and accumulation": STEPS // 3,
    "accumulation and clipping": STEPS // 2,
}


@pytest.fixture(scope="module")
def workers():
    return reports("features.py", 2, "optimizer", "/".join(FEATURES))


@pytest.fixture(scope="module")
def alone():
    return reports("features.py", 1, "alone", "/".join([*FEATURES, "not clipped"]))[0]


@pytest.mark.parametrize("feature", FEATURES)
def test_two_workers_train_as_one_process_with(workers, alone, feature):
    for worker in workers:
        assert_close(worker[feature]["values"], alone[feature]["values"])
        assert_close(worker[feature]["averages"], alone[feature]["averages"])
        assert worker[feature]["loss"] == pytest.approx(alone[feature]["loss"], abs=TRAINED)
        assert worker[feature]["iterations"] == alone[feature]["iterations"]
        assert worker[feature]["learning rate"] == alone[feature]["learning rate"]


@pytest.mark.parametrize("feature", FEATURES)
def test_weights_and_slots_are_bit_equal_with(workers, feature):
    first, second = (worker[feature] for worker in workers)
    assert first["weights"] == second["weights"]
    assert first["slots"] == second["slots"]


@pytest.mark.parametrize("feature", FEATURES)
def test_exchanges_on_update_steps_only(workers, feature):
    expected = EXCHANGES.get(feature, STEPS)
    assert [worker[feature]["exchanges"] for worker in workers] == [expected] * 2
    assert [worker[feature]["skipped"] for worker in workers] == [0, 0]


@pytest.mark.parametrize("feature", ["loss scaler inside", "loss scaler around"])
def test_loss_scale_grows_as_in_one_process(workers, alone, feature):
    assert alone[feature]["scale"] > 8
    assert [worker[feature]["scale"] for worker in workers] == [alone[feature]["scale"]] * 2


def test_loss_scaler_inside_and_around_are_bit_equal(workers):
    inside, around = (workers[0][f"loss scaler {index}"] for index in ("inside", "around"))
    assert inside["weights"] == around["weights"]
    assert inside["slots"] == around["slots"]


@pytest.mark.parametrize("feature", ["clipnorm", "accumulation and clipping"])
def test_clipping_clips(alone, feature):
    # else the comparisons above would say nothing about it
    assert distance(alone[feature], alone["not clipped"]) > 1e-2


@pytest.fixture(scope="module", params=["stock", "strategy", "mirrored", "mirrored ops"])
def loop(request):
    """Returns the findings of a loop under the strategy, on each worker."""
    return reports("loops.py", 1 if "mirrored" in request.param else 2, request.param)


@pytest.fixture(scope="module")
def loop_alone():
    return reports("loops.py", 1, "alone")[0]


def test_training_loop_trains_as_one_process(loop, loop_alone):
    for worker in loop:
        assert_close(worker["by_optimizer"]["values"], loop_alone["by_optimizer"]["values"])
        assert worker["by_optimizer"]["digest"] == loop[0]["by_optimizer"]["digest"]


def test_two_models_with_an_optimizer_each_train_as_in_one_process(loop, loop_alone):
    for worker in loop:
        for model, seen in worker["two_models"].items():
            assert_close(seen["values"], loop_alone["two_models"][model]["values"])
            assert seen["digest"] == loop[0]["two_models"][model]["digest"]


def test_loop_that_updates_by_itself_trains_as_one_process(loop, loop_alone):
    if "by_hand" not in loop[0]:
        return  # only CompressedAllReduce reduces gradients for such a loop
    for worker in loop:
        assert_close(worker["by_hand"]["values"], loop_alone["by_hand"]["values"])
        assert worker["by_hand"]["digest"] == loop[0]["by_hand"]["digest"]


def test_two_collectives_a_step_for_any_number_of_variables(loop):
    if loop[0]["workers"] == 1:
        return  # MirroredStrategy uses none
    for worker in loop:
        assert worker["many_variables"]["variables"] == 20
        for check in ("by_optimizer", "many_variables", "by_hand"):
            if check in worker:
                assert worker[check]["collectives"] == ["CollectiveGatherV2"] * 2


def reports(program, n, *args):
    return [result(worker) for worker in run_workers(PROGRAMS / program, n, args)]


def assert_close(values, expected):
    assert len(values) == len(expected)
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=TRAINED)


def distance(seen, other):
    return max(
        np.abs(np.subtract(a, b)).max()
        for a, b in zip(seen["values"], other["values"], strict=True)
    )
