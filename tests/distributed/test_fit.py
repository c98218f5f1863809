"""Keras 3 under our strategy: uncompressed, with `CompressedOptimizer`, with a compressor on it."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.bounds import assert_close, training
from tests.workers import result, run_workers

PROGRAMS = Path(__file__).parent / "programs"
COMPRESSED = ("optimizer", "strategy")
WAYS = ("unwrapped", *COMPRESSED)
MARKS = {
    "optimizer": pytest.mark.oldest,
    "strategy": pytest.mark.quick("compressor on the strategy"),
}

ROWS = 150
SUMS = 8 + 32 + 3  # the terms of all sums in the model
# Adam(0.01) has an epsilon of 0.05, and each of two epochs has 5 batches of at most 32 rows.
TRAINED = training(gain=0.01 / 0.05, terms=32 + SUMS, steps=2 * 5)


def marked(ways):
    """Each way is one job, which is among the quick ones or not."""
    return [pytest.param(way, marks=MARKS.get(way, ())) for way in ways]


compressed_ways = pytest.mark.parametrize("way", marked(COMPRESSED))


# Starting and tracing take seconds each, so not all is checked in every way to train.
TRAINED_ALIKE = ("callbacks_and_metrics", "steps_per_execution")
UNCOMPRESSED = (*TRAINED_ALIKE, "synchronized_batch_normalization")
CHECKS = {
    "unwrapped": (
        "outside_scope",
        *UNCOMPRESSED,
        "mean_of_a_step",
        "values_of_each_class",
        "float8",
        "unknown_sizes",
        "data_of_each",
        "generators",
    ),
    "optimizer": (
        *TRAINED_ALIKE,
        "forms_of_input",
        "mixed_precision",
        "unknown_sizes",
        "loop_in_a_function",
        "batch_normalization",
    ),
    "strategy": (*UNCOMPRESSED, "second_strategy", "eager", "mixed_precision", "two_optimizers"),
}


@functools.cache
def seen(way):
    """Returns the findings of two workers, by check."""
    with tempfile.TemporaryDirectory() as folder:
        args = [folder, way, ",".join(CHECKS[way])]
        workers = run_workers(PROGRAMS / "fit.py", 2, args)
    return [result(worker)[way] for worker in workers]


@pytest.fixture(params=marked(WAYS))
def way(request):
    return request.param


@pytest.mark.parametrize("check", ["callbacks_and_metrics", "steps_per_execution"])
def test_weights_and_slots_are_bit_equal_on_all_workers(way, check):
    assert_equal_state(*(report[check] for report in seen(way)))


@pytest.mark.parametrize(
    ("check", "way"),
    [
        ("batch_normalization", "optimizer"),
        ("loop_in_a_function", "optimizer"),
        ("eager", "strategy"),
    ],
)
def test_weights_and_slots_are_bit_equal_with(check, way):
    assert_equal_state(*(report[check] for report in seen(way)))


@pytest.mark.parametrize("check", ["callbacks_and_metrics", "steps_per_execution"])
def test_both_ways_to_compress_train_to_the_last_bit_alike(check):
    by_optimizer, by_strategy = (seen(way)[0][check] for way in COMPRESSED)
    assert by_optimizer["weights"] == by_strategy["weights"]
    assert by_optimizer["slots"] == by_strategy["slots"]
    assert losses(by_optimizer) == losses(by_strategy)


def test_compressed_training_differs_from_uncompressed():
    # else the tests above would hold for a compressor that is never called
    dense, compressed = (
        seen(way)[0]["callbacks_and_metrics"] for way in ("unwrapped", "optimizer")
    )
    assert dense["weights"] != compressed["weights"]


def test_training_lowers_the_loss(way):
    first, last = seen(way)[0]["callbacks_and_metrics"]["history"]["loss"]
    assert last < first


def test_history_covers_all_workers(way):
    first, second = (report["callbacks_and_metrics"]["history"] for report in seen(way))
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert first[name] == second[name]


def test_steps_per_execution_changes_nothing(way):
    one, three = (seen(way)[0][check] for check in ("callbacks_and_metrics", "steps_per_execution"))
    assert three["weights"] == one["weights"]
    assert three["slots"] == one["slots"]
    assert three["loss"] == one["history"]["loss"]


@pytest.mark.quick("compressor on the strategy")
def test_a_second_strategy_with_equal_settings_is_the_first_and_trains_alike():
    for report in seen("strategy"):
        first, second = report["callbacks_and_metrics"], report["second_strategy"]
        assert second["is first"] == [True, True]
        assert second["loss"] == first["history"]["loss"]
        assert_equal_state(first, second)
        assert "another compressor, two_level; use it again" in second["error"]


def test_a_loop_in_a_function_trains_as_fit_does():
    # its payloads are longer in some steps than in others
    checks = seen("optimizer")[0]
    assert checks["loop_in_a_function"]["weights"] == checks["steps_per_execution"]["weights"]
    assert checks["loop_in_a_function"]["slots"] == checks["steps_per_execution"]["slots"]


def test_all_batches_of_a_generator_are_trained_on_in_step():
    for rank, report in enumerate(seen("unwrapped")):
        rows = [[4.0 * i + 2 * rank, 4.0 * i + 2 * rank + 1] for i in range(5)]
        assert report["generators"] == {"fit": rows, "evaluate": rows, "slow": rows}


def test_float8_layers_are_refused_where_keras_reduces():
    for report in seen("unwrapped"):
        assert "kernel_scale" in report["float8"]
        assert "are new values for these variables" in report["float8"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("model", "each of its 2 workers would train the model alone"),
        ("compile", "'loss/total' of a metric was created outside the strategy's scope"),
        ("metric", "'own/total' of a metric was created outside"),
        ("lora", "lora_kernel_a' was created outside the scope"),
        ("lora, with slots", "lora_kernel_a' was created outside the scope"),
    ],
)
def test_objects_created_outside_the_scope_are_refused(what, message):
    for report in seen("unwrapped"):
        assert message in report["outside_scope"][what]


@pytest.mark.parametrize("way", ["unwrapped", "optimizer"])
def test_nothing_of_a_step_is_done_at_an_end_of_data_that_was_not_known(way):
    for report in seen(way):
        known, unknown = report["unknown_sizes"]
        assert unknown == known
        assert known["iterations"] == (7 if way == "optimizer" else 15)


def test_a_worker_without_data_gets_empty_batches_until_all_have_none():
    first, second = (report["data_of_each"]["rows"] for report in seen("unwrapped"))
    assert first == [4, 4, 4, 0, 0]
    assert second == [4, 4, 4, 4, 4]


def test_a_worker_with_data_does_not_wait_to_hear_whether_others_have_some():
    late, early = (report["data_of_each"] for report in seen("unwrapped"))
    assert early["got"] < late["begun"]


@pytest.mark.quick("compressor on the strategy")
def test_run_eagerly_trains_as_the_graph_does():
    checks = seen("strategy")[0]
    graph, eager = checks["callbacks_and_metrics"], checks["eager"]
    for value, expected in zip(eager["values"], graph["values"], strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=TRAINED)


def test_evaluate_covers_the_data_of_all_workers(way):
    for report in seen(way):
        check = report["callbacks_and_metrics"]
        assert_loss_of_outputs(check["evaluated"]["loss"], check)
        assert_close(check["evaluated"]["accuracy"], check["accuracy of outputs"])


def test_predict_returns_all_rows_in_order_on_every_worker(way):
    for report in seen(way):
        check = report["callbacks_and_metrics"]
        assert len(check["predicted"]) == 150
        assert_close(check["predicted"], check["outputs"], terms=SUMS)


def test_early_stopping_stops_all_workers_at_once(way):
    for report in seen(way):
        assert len(report["callbacks_and_metrics"]["history"]["loss"]) == 2


def test_model_checkpoint_writes_a_file_of_each_worker(way):
    expected = ["1.keras", "2.keras", "worker-1/1.keras", "worker-1/2.keras"]
    assert seen(way)[0]["files"] == expected


def as_float32(values):
    return np.float32(values).tolist()


def test_tensorboard_gets_the_losses(way):
    for report in seen(way):
        check = report["callbacks_and_metrics"]
        assert check["scalars"]["epoch_loss"] == as_float32(check["history"]["loss"])


@compressed_ways
def test_tensorboard_gets_what_the_monitor_measures(way):
    for report in seen(way):
        check = report["callbacks_and_metrics"]
        for name in (
            "payload_bytes",
            "sent_bytes",
            "dense_bytes",
            "compression_ratio",
            "fewer_bytes",
            "skipped_steps",
            "residual_norm",
        ):
            values = check["history"][name]
            assert len(values) == 2
            assert check["scalars"][f"epoch_{name}"] == as_float32(values)


@compressed_ways
def test_monitor_counts_all_bytes_of_a_step(way):
    parameters = 8 * 32 + 32 + 32 * 3 + 3
    for report in seen(way):
        history = report["callbacks_and_metrics"]["history"]
        assert history["dense_bytes"] == [4 * parameters] * 2
        assert history["skipped_steps"] == [0, 0]
        for payload, sent, ratio, wire in zip(
            *(
                history[name]
                for name in ("payload_bytes", "sent_bytes", "compression_ratio", "fewer_bytes")
            ),
            strict=True,
        ):
            assert 48 < payload < 4 * parameters / 2
            assert ratio == pytest.approx(4 * parameters / payload)
            # to the one other worker: the longer of both payloads, and its length
            assert sent >= payload + 4
            assert wire == pytest.approx(4 * parameters / sent)  # 2 (N - 1) / N is 1 for two


@pytest.mark.oldest
def test_dict_and_tuple_and_dataset_inputs_train_alike():
    for report in seen("optimizer"):
        check = report["forms_of_input"]
        assert check["dict"] == check["dataset of tuples"]
        assert check["dict"] == seen("optimizer")[0]["forms_of_input"]["dict"]


def test_dict_and_tuple_inputs_evaluate_and_predict():
    for report in seen("optimizer"):
        check = report["forms_of_input"]
        assert_close(check["predicted"], check["outputs"], terms=SUMS)
        assert_loss_of_outputs(check["evaluated"], check)


def test_the_mean_of_a_nested_structure_is_over_all_workers():
    for report in seen("unwrapped"):
        assert report["mean_of_a_step"] == {"of each class": [5, 5, 5], "loss": 5}


def test_values_of_each_class_keep_their_shape_in_keras_means():
    for report in seen("unwrapped"):
        assert report["values_of_each_class"] == [1.5, 2.5, 4.5]


def test_the_residual_of_one_optimizer_is_not_applied_by_another():
    for report in seen("strategy"):
        assert report["two_optimizers"]["left"] > 1
        assert report["two_optimizers"]["moved"] == 0


def test_synchronized_batch_statistics_are_not_compressed():
    # The weights are constant, so the statistics depend only on the data.
    ways = ("unwrapped", "strategy")
    checks = [report["synchronized_batch_normalization"] for way in ways for report in seen(way)]
    assert len({check["statistics"] for check in checks}) == 1
    for check in checks:
        assert check["weights as before"]
        assert min(check["moved"]) > 0


@pytest.mark.parametrize(
    ("way", "policy"),
    [
        *(pytest.param(way, "mixed_float16", marks=MARKS[way]) for way in COMPRESSED),
        pytest.param("optimizer", "mixed_bfloat16", marks=MARKS["optimizer"]),
    ],
)
def test_mixed_precision_trains_to_bit_equal_weights(way, policy):
    first, second = (report["mixed_precision"][policy] for report in seen(way))
    assert first == second
    assert first["loss"][-1] < first["loss"][0]


@compressed_ways
def test_keras_scales_the_loss_under_mixed_float16(way):
    # the case of the test above that is the hard one
    optimizer = seen(way)[0]["mixed_precision"]["mixed_float16"]["optimizer"]
    assert optimizer == "LossScaleOptimizer"


def test_more_workers_have_bit_equal_weights_and_slots(tmp_path):
    args = [tmp_path, "optimizer", "steps_per_execution"]
    reports = [result(worker) for worker in run_workers(PROGRAMS / "fit.py", 3, args)]
    for report in reports[1:]:
        assert report == reports[0]


def assert_equal_state(first, second):
    assert first["weights"] == second["weights"]
    assert first["slots"] == second["slots"]


def assert_loss_of_outputs(loss, check):
    """The loss of a row is off by at most twice as much as its outputs."""
    largest = np.abs(check["outputs"]).max()
    assert_close(loss, check["loss of outputs"], terms=ROWS + 2 * SUMS, scale=largest)


def losses(check):
    return check["loss"] if "loss" in check else check["history"]["loss"]
