"""Training by Horovod: as by one process, as by a strategy, and nothing is lost or goes unsaid."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.bounds import rounding, training
from tests.delays import assert_cosines
from tests.horovod.jobs import PROGRAMS, needs_horovod, run_ranks
from tests.workers import ONE_THREAD, python_path, result, run_workers

pytestmark = needs_horovod
quick = pytest.mark.quick("Horovod", "custom training loop")

# Horovod carries requests, whatever method makes them. These make one of each kind: payloads of
# different lengths and of one length, sums of each dtype, and the payload of one rank. "auto" times
# them, "warmed up" changes them, and the ranks plan and learn from them.
METHODS = [
    *("adacomp", "qsgd", "power_sgd", "cast", "bfloat16", "max_norm", "scalecom"),
    *("auto", "warmed up", "lgreco", "lgc"),
]
METHODS_OF_THREE = ["adacomp", "max_norm", "scalecom"]
OPTIMIZERS = ["sums", "clipnorm", "EMA", "accumulation", "loss scale"]
FEW = ["AdamW"]
# Adam moves a weight by up to 0.01 / 0.05 of its gradient. Sums are over 24 rows, 20 words, and 16
# and 3 units.
TRAINED = training(gain=0.2, terms=24 + 20 + 16 + 3, steps=8)
THIRDS = rounding(1, terms=3 + 1)  # a third of a value, three times
SAVED = ["whole.keras", "only.weights.h5", "tf"]


def results(workers):
    return [result(worker) for worker in workers]


def largest_difference(left, right):
    pairs = zip(left, right, strict=True)
    return max(np.abs(np.array(a) - np.array(b)).max(initial=0) for a, b in pairs)


def largest(arrays):
    return max(np.abs(array).max(initial=0) for array in arrays)


def only(results):
    """Returns the value of all ranks, which must be the same."""
    assert all(rank == results[0] for rank in results)
    return results[0]


@pytest.fixture(scope="module")
def two_ranks():
    return results(run_ranks("exact.py", 2, [",".join(OPTIMIZERS)]))


@pytest.fixture(scope="module")
def three_ranks():
    return results(run_ranks("exact.py", 3, [",".join(FEW)]))


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        *(("two_ranks", name) for name in OPTIMIZERS),
        *(pytest.param("three_ranks", name, marks=quick) for name in FEW),
    ],
)
def test_dense_training_equals_one_process_on_whole_batches(request, ranks, name):
    seen = request.getfixturevalue(ranks)
    together = only([rank["by Horovod"][name] for rank in seen])
    single = seen[0]["alone"][name]
    assert largest_difference(together["values"], single["values"]) <= TRAINED
    assert together["iterations"] == single["iterations"]


@pytest.fixture(scope="module")
def methods():
    return results(run_ranks("methods.py", 2, METHODS))


@pytest.fixture(scope="module")
def methods_of_three():
    return results(run_ranks("methods.py", 3, METHODS_OF_THREE, env=ONE_THREAD))


@pytest.fixture(scope="module")
def methods_by_strategy():
    return results(run_workers(PROGRAMS / "methods.py", 2, METHODS))


@pytest.mark.parametrize(
    ("ranks", "method"),
    [
        *(pytest.param("methods", method, marks=quick) for method in METHODS),
        *(("methods_of_three", method) for method in METHODS_OF_THREE),
    ],
)
def test_ranks_stay_equal_and_skip_a_step_together(request, ranks, method):
    seen = [rank[method] for rank in request.getfixturevalue(ranks)]
    only([rank["weights"] for rank in seen])
    only([rank["sums"].get("residual") for rank in seen])
    assert only([rank["skipped"] for rank in seen]) == 1
    assert np.isfinite(np.concatenate(list(map(np.ravel, seen[0]["values"])))).all()
    if method != "auto":  # which may choose any
        has_none = method in ("cast", "bfloat16")
        assert len({rank["own residuals"] for rank in seen}) == (1 if has_none else len(seen))


@quick
def test_ranks_learn_an_autoencoder_and_plan_together(methods):
    assert only([rank["lgc"]["phase"] for rank in methods]) == 3
    assert only([rank["lgreco"]["plan"] for rank in methods])


@quick
@pytest.mark.parametrize("method", [method for method in METHODS if method != "auto"])
def test_a_method_does_what_it_does_by_the_collectives_of_tensorflow(
    methods, methods_by_strategy, method
):
    by_horovod, by_strategy = methods[0][method], methods_by_strategy[0][method]
    assert by_horovod["values"] == by_strategy["values"]
    for name, sums in by_strategy["sums"].items():
        assert by_horovod["sums"][name] == sums
    as_float32 = 2 if method == "bfloat16" else 1  # Horovod does not sum bfloat16
    assert by_horovod["payload"] <= as_float32 * by_strategy["payload"]
    assert by_horovod["sent"] <= as_float32 * by_strategy["sent"]


@quick
def test_gathered_payloads_are_sent_without_padding(methods):
    ranks = [rank["adacomp"] for rank in methods]
    payloads = [rank["payload"] for rank in ranks]
    words = ranks[0]["exchanges"]  # that tell the length, one in each step
    assert payloads[0] != payloads[1]
    assert only([rank["sent"] for rank in ranks]) - 4 * words == pytest.approx(
        sum(payloads) / 2, abs=4 * words
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(folder):
    return results(run_ranks("saves.py", 2, ["save", folder]))


@pytest.fixture(scope="module")
def loaded(saved, folder):
    return {
        "Horovod": results(run_ranks("saves.py", 3, ["load", folder])),
        "MultiWorkerMirroredStrategy": results(
            run_workers(PROGRAMS / "saves.py", 2, ["load", folder])
        ),
    }


@pytest.mark.parametrize("job", ["Horovod", "MultiWorkerMirroredStrategy"])
@pytest.mark.parametrize("way", SAVED)
def test_another_job_resumes_from_the_save_of_rank_0(saved, loaded, job, way):
    results = [worker[way] for worker in loaded[job]]
    for name in ("residual", "second_moment"):
        sums = [
            np.add(*np.float32(pair))
            for pair in zip(*(rank["own"][name] for rank in saved), strict=True)
        ]
        assert max(np.abs(total).max() for total in sums) > 0
        assert largest_difference(results[0][name], sums) <= THIRDS * largest(sums)
    assert {worker["group"] for worker in results} == {job}
    assert {worker["exchanges"] for worker in results} == {4}


@pytest.mark.parametrize("wrappers", ["several", "outside"])
def test_callbacks_collect_the_state_of_all_wrappers_of_a_model(saved, wrappers):
    first, second = (rank[wrappers]["own"] for rank in saved)
    assert len(first) == 2
    for collected, *local in zip(saved[0][wrappers]["collected"], first, second, strict=True):
        sums = [np.add(*np.float32(pair)) for pair in zip(*local, strict=True)]
        assert max(np.abs(total).max() for total in sums) > 0
        assert largest_difference(collected, sums) == 0


@pytest.mark.parametrize("job", ["Horovod", "MultiWorkerMirroredStrategy"])
def test_a_resumed_job_trains_on_all_workers(loaded, job):
    only([worker["later"] for worker in loaded[job]])


def test_each_rank_gets_its_share_of_what_was_saved(loaded):
    ranks = [rank["only.weights.h5"] for rank in loaded["Horovod"]]
    assert largest_difference(only([rank["own"] for rank in ranks]), ranks[0]["residual"]) > 0
    shares = [3 * np.array(local) for local in ranks[0]["own"]]
    assert largest_difference(shares, ranks[0]["residual"]) <= THIRDS * largest(shares)


def test_collecting_changes_nothing_and_counts_until_the_next_step(saved):
    assert all(rank["unchanged"] for rank in saved)
    assert saved[0]["saved alone"] == saved[0]["own later"]
    assert np.any(saved[0]["saved alone"][0])
    assert all("rank 0 save" in rank["refused"] for rank in saved[1:])


@pytest.fixture(scope="module")
def fitted(folder):
    return results(run_ranks("fit.py", 2, [folder]))


@pytest.mark.parametrize(
    "check",
    [
        "planned_and_monitored",
        "mixed_precision",
        "advised",
        "backed_up",
        "two_models",
        "several_steps_per_execution",
    ],
)
def test_ranks_stay_equal_with_all_options_of_fit(fitted, check):
    only([rank[check]["weights"] for rank in fitted])
    only([rank[check]["slots"] for rank in fitted])


def test_two_models_are_distinguished(fitted):
    seen = only([(rank["two_models"]["both"], rank["two_models"]["exchanges"]) for rank in fitted])
    assert seen[1] == [6, 6]


def test_steps_in_one_execution_equal_separate_steps(fitted):
    seen = fitted[0]["several_steps_per_execution"]
    assert seen["weights"] == seen["one by one"]


def test_horovods_own_optimizer_still_does_nothing_under_keras_3(fitted):
    """If this fails, what is said about `hvd.DistributedOptimizer` has to be looked at again."""
    assert fitted[0]["stock"] != fitted[1]["stock"]


def test_plans_and_logs_equal_the_jobs(fitted):
    logs = fitted[0]["planned_and_monitored"]["logs"]
    assert logs["compression_ratio"] > 1
    assert logs["sent_bytes"] > 0
    assert logs["plan_ratio"] >= 1
    only([rank["planned_and_monitored"]["settings"] for rank in fitted])


def test_delays_are_checked_by_each_ranks_own_residuals(fitted):
    for rank in fitted:
        assert_cosines(rank["planned_and_monitored"]["delays"], 2, checks=2)


def test_steps_are_skipped_until_the_loss_scale_fits(fitted):
    seen = fitted[0]["mixed_precision"]
    assert seen["skipped"] > 0
    assert seen["scale"] == 2.0 ** (20 - seen["skipped"])


def test_a_scaler_around_a_multi_optimizer_skips_a_step_on_all_ranks(fitted):
    for rank in fitted:
        assert rank["one_rank_overflows"] == {"values": [-2, -2], "scale": 4}


WHOLE_ROUND = [[[-5.5], [-5.5]]]  # the gradients of both ranks


@pytest.mark.parametrize("around", ["nothing", "a loss scaler", "a multi-optimizer"])
def test_each_rank_keeps_what_it_has_accumulated_when_others_take_over_its_state(fitted, around):
    for rank in fitted:
        assert rank["amid_a_round"]["broadcast"][around] == WHOLE_ROUND


def test_each_rank_has_the_accumulated_gradients_that_it_set(fitted):
    for rank in fitted:
        assert rank["amid_a_round"]["set_weights"] == WHOLE_ROUND


def test_an_optimizer_without_variables_is_built(fitted):
    for rank in fitted:
        assert rank["amid_a_round"]["nothing to train"] == [True, 0]


def test_a_round_continues_after_an_unexpected_end_of_data(fitted):
    known, unknown = only([rank["amid_a_round"]["ends_of_data"] for rank in fitted])
    assert unknown == known


@pytest.mark.parametrize("when", ["before", "after"])
def test_accumulated_gradients_are_shared_out_whenever_they_are_restored(fitted, when):
    for rank in fitted:
        assert rank["amid_a_round"]["restored"][when] == WHOLE_ROUND


def test_advice_and_the_choice_are_the_same_on_all_ranks(fitted):
    only([(rank["advised"]["best"], rank["advised"]["chosen"]) for rank in fitted])


def test_a_backup_holds_the_residuals_of_all(fitted):
    left = [rank["backed_up"]["left"] for rank in fitted]
    sums = [np.add(*np.float32(pair)) for pair in zip(*left, strict=True)]
    found = only([rank["backed_up"]["found"] for rank in fitted])
    assert max(np.abs(total).max() for total in sums) > 0
    assert largest_difference([2 * np.array(one) for one in found], sums) == 0
    assert only([rank["backed_up"]["epochs"] for rank in fitted]) == [1]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("inside", 'does nothing under Keras 3.*group="horovod". alone'),
        ("outside", 'does nothing under Keras 3.*group="horovod". alone'),
        ("compression", "FP16Compressor"),
        ("gossip", "Horovod's ranks cannot take them.*use gc.MultiWorkerMirroredStrategy"),
        ("strategy", "either by Horovod or by a strategy"),
        ("xla", "jit_compile=False"),
        ("elastic", "Elastic Horovod is not supported.*restart it from a checkpoint"),
        ("no group", "one of 2 processes.*group=.horovod."),
    ],
)
def test_impossible_jobs_are_refused_with_an_alternative(fitted, what, message):
    assert re.search(message, only([rank["refused"] for rank in fitted])[what], re.DOTALL)


def test_rank_0_is_chief_and_others_have_their_own_paths(fitted, folder):
    assert [rank["chief"] for rank in fitted] == [True, False]
    assert [rank["path"] for rank in fitted] == [
        str(folder / "file"),
        str(folder / "worker-1" / "file"),
    ]


@pytest.fixture(scope="module")
def disagreeing():
    return results(run_ranks("disagree.py"))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("other_variables", "shape=(3, 2)"),
        ("other_settings", "compressor: worker 0 has"),
        ("other_versions", "keras: worker 0 has '3.0', worker 1 has '3.1'"),
        ("other_weights", "gc.callbacks.BroadcastInitialState()"),
        ("other_steps", "exchanges so far: worker 0 has 7, worker 1 has 0"),
        ("other_learning_rates", "as ReduceLROnPlateau does if its metric differs"),
        ("other_gradients", "gradient of 'kernel_0': worker 0 has 'dense', worker 1 has nothing"),
        ("other_actions", "next action: worker 0 has 'collecting state to save'"),
        ("other_data", "all workers): worker 0 has 2, worker 1 has 3"),
    ],
)
def test_ranks_report_their_differences(disagreeing, what, message):
    for rank in disagreeing:
        assert rank[what].startswith("WorkersDisagreeError: ")
        assert message in rank[what]


def test_a_model_without_variables_and_layers_unaware_of_ranks_are_reported(disagreeing):
    for rank in disagreeing:
        assert "'unbuilt' has no variables yet" in rank["no_variables"]
        assert "'batch_normalization' should have the statistics" in rank["synchronized_layers"]


@pytest.mark.parametrize("wish", ["AllReduce", "AllGather", "Broadcast"])
def test_a_collective_that_is_timed_is_run(disagreeing, wish):
    for rank in disagreeing:
        assert "Mismatched data types" in rank["timed"][wish]


def test_a_rank_with_fewer_batches_does_not_wait_for_the_others_without_an_end(disagreeing):
    first, second = (rank["other_numbers_of_batches"] for rank in disagreeing)
    assert first.startswith("WorkersDisagreeError: This worker has waited 2.0 seconds")
    assert "collecting state to save" in first
    assert "Horovod" in second


def test_the_others_end_with_an_error_when_a_rank_is_killed():
    survivor, dead = run_ranks("killed.py", 2, check=False)
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, None)
    assert "Horovod" in survivor.stderr


def test_process_sets_train_separately(tmp_path):
    env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    seen = results(run_ranks("subsets.py", 3, [tmp_path / "backup"], env=env))
    gradient = np.arange(1.0, 5)  # times rank + 1
    two_mean = one_gradient = [-2 * gradient]
    assert largest_difference([seen[0]["no_compression"]], two_mean) == 0
    for method in ("no_compression", "scalecom", "adacomp"):
        assert largest_difference([seen[1][method]], one_gradient) == 0
        assert seen[0][method] == seen[2][method]
    assert seen[0]["adacomp"] != seen[1]["adacomp"]
    assert "is not in" in seen[0]["not in it"]

    def by_set(what):
        first, apart, third = (rank["backed up"][what] for rank in seen)
        assert first == third
        return first, apart

    assert len(set(by_set("begun"))) == 2
    assert by_set("restored") == by_set("trained")
    assert len(set(by_set("trained"))) == 2
    assert by_set("epochs after") == ([], [])


def test_gradcomp_run_starts_ranks_and_ends_as_the_first_that_fails(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "rank = int(os.environ['HOROVOD_RANK'])\n"
        "print(rank, os.environ['HOROVOD_SIZE'], 'TF_CONFIG' in os.environ)\n"
        "sys.exit(3 if rank else 0)\n"
    )
    args = ["run", "--horovod", "-n", "2", str(program)]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", "from tf_gradcomp.cli.main import main; main()", *args],
        env={**environment, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[worker 0] 0 2 False", "[worker 1] 1 2 False"]
    assert "worker 1 died first" in done.stderr
