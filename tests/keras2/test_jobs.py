"""Tests jobs with Keras 2: equal to one process, bit-equal on all workers, saved and resumed."""

import contextlib
import functools
import importlib.util
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.bounds import rounding, training
from tests.delays import assert_cosines
from tests.workers import result, run_workers
from tf_gradcomp.launch import horovod_ranks

PROGRAMS = Path(__file__).parent / "programs"
WRAPPED = [
    *("EMA", "loss scale"),
    *("legacy clipnorm", "legacy loss scale"),
    *("tfa AdamW", "RectifiedAdam", "SWA of Lookahead", "MultiOptimizer"),
]
BY_STRATEGY = ["LazyAdam", "MovingAverage"]
BY_HOROVOD = ["AdamW", "clipnorm", "EMA", "LazyAdam", "MovingAverage", "Lookahead"]
# Methods do not see which Keras calls them. These cases have the kinds of optimizers, and of what
# these are given.
METHODS = [
    *("Adam:adacomp", "legacy Adam:adacomp", "legacy Nadam:adacomp"),
    *("MovingAverage:adacomp", "Lookahead:scalecom", "MultiOptimizer:adacomp"),
    *("SGD:adacomp:scaled", "legacy SGD:top_k:scaled"),
]
METHODS_BY_HOROVOD = ["Adam:adacomp", "MovingAverage:adacomp", "SGD:adacomp:scaled"]
AS_THEY_ARE = ["SGD::scaled", "legacy SGD::scaled", "MovingAverage"]
SIMULATED = ["Nadam:adacomp", "MovingAverage:scalecom"]
SAVED = ["Adam", "MovingAverage"]
FORMATS = ["h5", "keras", "tf", "checkpoint"]
# Adam moves a weight by up to 0.01 / 0.05 of its gradient. Sums are over 24 rows, 20 words, and 16
# and 3 units.
SUMS = 24 + 20 + 16 + 3
TRAINED = training(gain=0.2, terms=SUMS, steps=8)
# Outputs after six steps of SGD(0.01) are sums over 16 units.
MEASURED = 16 * training(gain=0.01, terms=SUMS, steps=6)
# A third of each residual, three times, and a sum over at most 20 * 16 of them.
RESTORED = rounding(1, terms=3 + 1 + 20 * 16)
HAS_HOROVOD = importlib.util.find_spec("horovod") is not None
HAS_ADDONS = importlib.util.find_spec("tensorflow_addons") is not None
if not HAS_ADDONS:  # tf_keras: a few, as its code is that of Keras 2.15
    WRAPPED = ["legacy Adam"]
    BY_STRATEGY = ["EMA"]
    BY_HOROVOD = ["AdamW", "clipnorm", "EMA"]
    METHODS_BY_HOROVOD = ["Adam:adacomp", "SGD:adacomp:scaled", "SGD:scalecom", "SGD:power_sgd"]
    METHODS = [*METHODS_BY_HOROVOD, "legacy Adam:adacomp"]
    AS_THEY_ARE = ["legacy SGD::scaled"]
    SIMULATED = ["Nadam:adacomp"]
    SAVED = ["Adam"]

needs_horovod = pytest.mark.skipif(
    not HAS_HOROVOD,
    reason="Horovod is not installed; `python3 dev.py test --keras2` builds it",
)
# Some are run with the newest TensorFlow and tf_keras, too.
tf_keras = pytest.mark.tf_keras
quick = pytest.mark.quick("tf_keras")


def by_strategy(program, *args):
    return [result(worker) for worker in run_workers(PROGRAMS / program, 2, args)]


@contextlib.contextmanager
def horovod_workers(n):
    """Returns a function that runs a program on so many ranks."""
    with horovod_ranks(n) as each:
        yield functools.partial(run_workers, n=n, per_worker_env=each)


def by_horovod(program, *args, n=2):
    with horovod_workers(n) as run:
        return [result(worker) for worker in run(PROGRAMS / program, args=args)]


def largest_difference(left, right):
    return max(np.abs(np.array(a) - np.array(b)).max() for a, b in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def alone():
    names = dict.fromkeys(["AdamW", *WRAPPED, *BY_STRATEGY, *(BY_HOROVOD if HAS_HOROVOD else [])])
    (worker,) = run_workers(PROGRAMS / "exact.py", 1, ["alone", ",".join(names)])
    return result(worker)


@pytest.fixture(scope="module")
def metrics():
    """By two workers, and by one process on whole batches."""
    first, second = by_strategy("metrics.py")
    assert first == second
    (single,) = (result(worker) for worker in run_workers(PROGRAMS / "metrics.py", 1))
    return first, single


@pytest.mark.parametrize("model", ["few", "many", "own", "eager"])
def test_metrics_and_predictions_equal_one_process(metrics, model):
    seen, single = (logged[model] for logged in metrics)
    assert largest_difference(seen["predict"], single["predict"]) <= MEASURED
    logs = [[*logged["batches"], logged["fit"], logged["evaluate"]] for logged in (seen, single)]
    assert len(logs[0]) == 2 * 3 + 2
    for ours, expected in zip(*logs, strict=True):
        assert ours == pytest.approx(expected, rel=MEASURED)


def test_one_collective_of_a_step_sums_all_metrics(metrics):
    assert metrics[0]["many"]["collectives"] == metrics[0]["few"]["collectives"]


@pytest.fixture(scope="module")
def wrapped():
    return by_strategy("exact.py", "wrapped", ",".join(WRAPPED))


@pytest.fixture(scope="module")
def as_they_are():
    return by_strategy("exact.py", "strategy", ",".join(BY_STRATEGY))


@pytest.fixture(scope="module")
def ranks():
    return by_horovod("exact.py", "wrapped", ",".join(BY_HOROVOD))


@pytest.mark.parametrize(
    ("job", "name"),
    [
        *(pytest.param("wrapped", name, marks=[tf_keras, quick]) for name in WRAPPED),
        *(("as_they_are", name) for name in BY_STRATEGY),
        *(
            pytest.param("ranks", name, marks=[needs_horovod, tf_keras, quick])
            for name in BY_HOROVOD
        ),
    ],
)
def test_dense_training_equals_one_process_on_whole_batches(request, alone, job, name):
    first, second = (worker[name] for worker in request.getfixturevalue(job))
    expected = alone[name]
    assert first == second
    assert largest_difference(first["values"], expected["values"]) <= TRAINED
    assert first["iterations"] == expected["iterations"]


@pytest.fixture(scope="module")
def methods():
    return by_strategy("methods.py", ",".join(METHODS))


@tf_keras
@pytest.mark.parametrize("case", METHODS)
def test_workers_stay_equal_and_skip_a_step_together(methods, case):
    first, second = (worker[case] for worker in methods)
    for name in ("weights", "slots", "iterations"):
        assert first[name] == second[name]
    assert first["skipped"] == second["skipped"] == 1
    assert first["unchanged"]
    assert first["finite"]
    assert second["finite"]
    assert first["residual"] != second["residual"]
    if case.endswith("scaled"):
        assert first["scale"] == second["scale"] == 2**14


@pytest.fixture(scope="module")
def methods_of_the_strategy():
    return by_strategy("methods.py", ",".join(AS_THEY_ARE), "adacomp")


@pytest.mark.parametrize("case", AS_THEY_ARE)
def test_workers_stay_equal_with_a_method_of_the_strategy(methods_of_the_strategy, case):
    """A loss scaler sees the bad gradient, leaves the weights alone, and halves the scale."""
    first, second = (worker[case] for worker in methods_of_the_strategy)
    for name in ("weights", "slots", "iterations"):
        assert first[name] == second[name]
    assert first["skipped"] == 1
    assert first["residual"] != second["residual"]
    if case.endswith("scaled"):
        assert first["unchanged"]
        assert first["scale"] == second["scale"] == 2**14


@pytest.fixture(scope="module")
def methods_by_horovod():
    return by_horovod("methods.py", ",".join(METHODS_BY_HOROVOD))


@tf_keras
@needs_horovod
@pytest.mark.parametrize("case", METHODS_BY_HOROVOD)
def test_ranks_of_horovod_do_what_workers_of_a_strategy_do(methods_by_horovod, methods, case):
    for rank, worker in zip(methods_by_horovod, methods, strict=True):
        assert rank[case]["weights"] == worker[case]["weights"]
        assert rank[case]["residual"] == worker[case]["residual"]


def test_workers_of_several_replicas_train_as_one_process_and_stay_equal(alone):
    first, second = by_strategy("exact.py", "wrapped", "AdamW,Adam:adacomp", 2)
    for name in ("AdamW", "Adam:adacomp"):
        assert first[name]["slots"] == second[name]["slots"]
        copies = [*first[name]["replicas"], *second[name]["replicas"]]
        assert copies == [first[name]["weights"]] * 4
    assert largest_difference(first["AdamW"]["values"], alone["AdamW"]["values"]) <= TRAINED
    compressed, other = first["Adam:adacomp"], second["Adam:adacomp"]
    assert compressed["residuals"] != other["residuals"]


def test_addons_and_keras_step_alike_with_divided_gradients(methods):
    """Legacy and new-style Adam differ in rounding alone, and not with divided gradients."""
    first = methods[0]
    assert first["Adam:adacomp"]["weights"] == first["legacy Adam:adacomp"]["weights"]


@pytest.fixture(scope="module")
def simulated():
    return by_strategy("simulated.py", ",".join(SIMULATED))[0]


@pytest.mark.parametrize("case", SIMULATED)
def test_a_simulation_trains_as_workers_do(simulated, case):
    assert largest_difference(simulated["real"][case], simulated["simulated"][case]) <= TRAINED


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    return by_strategy("saves.py", tmp_path_factory.mktemp("saves"), ",".join(SAVED))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", SAVED)
def test_a_job_resumes_from_its_save(saves, name, form):
    first, second = (worker[name] for worker in saves)
    assert sum(first["before"]["residuals"]) > 0
    for seen in (first, second):
        assert seen[form] == {
            **first["before"],
            "residuals": pytest.approx(first["before"]["residuals"], rel=RESTORED),
        }
    if form in ("h5", "checkpoint"):
        assert first[f"{form}, later"] == second[f"{form}, later"]


@tf_keras
@needs_horovod
def test_ranks_of_horovod_resume_from_a_save(tmp_path):
    workers = by_horovod("saves.py", tmp_path, "legacy Adam")
    for form in FORMATS:
        test_a_job_resumes_from_its_save(workers, "legacy Adam", form)


@tf_keras
def test_workers_save_by_one_path_and_the_chief_alone(tmp_path):
    workers = run_workers(PROGRAMS / "one_path.py", 2, [tmp_path])
    for worker in workers:
        seen = result(worker)
        wanted = seen["wanted"]
        assert any(np.any(total) for total in wanted["residuals"])
        for name, held in seen["held"].items():
            assert held["weights"] == wanted["weights"], name
            assert largest_difference(held["residuals"], wanted["residuals"]) <= RESTORED, name
        for name, weights in seen["weights"].items():
            assert weights == wanted["weights"], name
        assert (seen["log"], seen["hidden"]) == (3, [])
    assert "holds only the residuals of the chief" not in workers[0].stderr


@pytest.fixture(scope="module")
def callbacks(tmp_path_factory):
    return by_strategy("callbacks.py", tmp_path_factory.mktemp("backups"))


def check_callbacks(callbacks):
    first, second = callbacks
    for name in ("plan", "autoencoder"):
        assert first[name]["weights"] == second[name]["weights"]
        history = first[name]["history"]
        for measure in ("payload_bytes", "compression_ratio", "residual_norm", "skipped_steps"):
            assert len(history[measure]) == 2
    assert first["plan"]["history"]["compression_ratio"][-1] > 4
    assert first["plan"]["history"]["plan_ratio"][-1] != 1
    assert first["autoencoder"]["history"]["lgc_phase"][-1] > 2
    assert first["autoencoder"]["history"]["autoencoder_error"][-1] < 1
    for worker in callbacks:
        assert_cosines(worker["delays"], 2, checks=2)
    resumed = first["resumed"]
    assert resumed["epochs"] == [1]
    assert resumed["resumed"] == resumed["at once"] == second["resumed"]["resumed"]


def check_executions(reports):
    (one, two), others = (report["executions"] for report in reports)
    assert one == two
    assert others == [one, two]


def test_several_steps_in_an_execution_train_as_one_by_one(callbacks):
    check_executions(callbacks)


def test_callbacks_log_and_a_job_resumes_from_a_backup(callbacks):
    check_callbacks(callbacks)


@tf_keras
@needs_horovod
def test_callbacks_do_so_under_horovod(tmp_path):
    reports = by_horovod("callbacks.py", tmp_path)
    check_callbacks(reports)
    check_executions(reports)


@needs_horovod
@pytest.mark.skipif(not HAS_ADDONS, reason="tensorflow-addons is not there")
def test_moving_average_around_horovods_optimizer_drifts():
    """If this fails, what is said about `MovingAverage(hvd(...))` has to be looked at again."""
    first, second = by_horovod("drifts.py")
    assert first["alone"] == second["alone"]
    assert largest_difference([first["inside"]], [second["inside"]]) > 1e-3


@pytest.fixture(scope="module")
def one_of_three():
    return result(*run_workers(PROGRAMS / "three.py", 1, [""]))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Returns the saved state of two workers, and of three workers that resumed until one was
    killed."""
    folder = tmp_path_factory.mktemp("three")
    two = by_strategy("three.py", folder)
    return two, run_workers(PROGRAMS / "three.py", 3, [folder], check=False)


@tf_keras
@needs_horovod
def test_three_ranks_resume_from_a_job_of_two(tmp_path):
    two = by_horovod("three.py", tmp_path)
    with horovod_workers(3) as run:
        ranks = run(PROGRAMS / "three.py", args=[tmp_path, "gone_on_with"])
    test_three_resume_from_a_job_of_two((two, ranks))


def test_three_train_as_one_process_and_stay_equal(three, one_of_three):
    reports = [result(worker) for worker in three[1]]
    for name in ("dense", "chosen"):
        assert all(report[name] == reports[0][name] for report in reports)
    dense = reports[0]["dense"]
    assert largest_difference(dense["values"], one_of_three["values"]) <= TRAINED
    assert dense["iterations"] == one_of_three["iterations"]


def test_three_resume_from_a_job_of_two(three):
    saved, workers = three
    for worker in workers:
        seen = result(worker)["gone_on_with"]
        residuals = pytest.approx(saved[0]["residuals"], rel=RESTORED)
        assert seen["restored"] == {**saved[0], "residuals": residuals}
        assert seen["later"] == result(workers[0])["gone_on_with"]["later"]


def test_three_get_advice_and_report_differences(three):
    for worker in three[1]:
        seen = result(worker)
        assert seen["advised"] == ["no_compression", "adacomp", "scalecom"]
        assert "worker 1 has" in seen["told"]


def test_two_end_with_an_error_when_the_third_is_killed(three):
    *survivors, dead = three[1]
    assert dead.returncode == -signal.SIGKILL
    for survivor in survivors:
        assert survivor.returncode not in (0, None)
        assert "UnavailableError" in survivor.stderr
