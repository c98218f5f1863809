"""Tests when a run reaches the dense run's final figure, and the result of a free network."""

import dataclasses
import json

import click
import comparison
import keras
import links
import pytest
import records
import simulated
import tensorflow as tf
import time_to_accuracy
import time_to_accuracy_report as report
import trainings
from click.testing import CliRunner
from comparison import Pace
from links import Network
from time_to_accuracy_report import DENSE, FREE, HOROVOD
from trainings import DIGITS, TEXT, TRANSFORMER, Run

FREE_PACE = Pace(FREE, FREE, 0.05)


def run(task, compressor, curve, seconds_per_step, seed=0, chosen=None, local_steps=0):
    history = {task.metric: curve, "seconds_per_step": [seconds_per_step] * len(curve)}
    record = {"history": history, "steps_per_epoch": 10, "compressor": chosen, "traffic": None}
    return Run(task, 2, "adam", compressor, seed, record, local_steps)


def compared(*runs, within=0.0):
    """The rows of dense runs, of the same on a free network, and of others."""
    dense = (one for one in runs if one.compressor == DENSE)
    free = [comparison.at_pace(one, FREE_PACE) for one in dense]
    every = [*runs, *free]
    rows = report.compare(every, report.fixed_goal(every, within))
    return {(row["method"], row["seed"]): row for row in rows}


def test_it_is_when_the_figure_is_reached_first():
    dense = run(TEXT, DENSE, [4.0, 3.0, 2.5], 1.0)
    rows = compared(dense, run(TEXT, "adacomp", [4.5, 2.4, 2.6, 2.3], 0.1))
    first, second = rows[DENSE, 0], rows["adacomp", 0]
    assert (first["goal"], first["seconds"], first["times faster"]) == (2.5, pytest.approx(30), 1)
    assert (second["goal"], second["seconds"]) == (2.5, pytest.approx(2))
    assert second["times faster"] == pytest.approx(15)
    assert second["seconds of a step"] == pytest.approx(0.1)


def test_a_free_network_saves_all_but_computing():
    dense = run(TEXT, DENSE, [4.0, 3.0, 2.5], 1.0)
    rows = compared(dense, run(TEXT, "adacomp", [4.5, 2.4], 0.1))
    free = rows[FREE, 0]
    assert (free["seconds"], free["times faster"]) == (pytest.approx(1.5), pytest.approx(20))
    assert free["of a free network's"] == 1
    assert rows["adacomp", 0]["of a free network's"] == pytest.approx(0.75)
    assert rows[DENSE, 0]["of a free network's"] == pytest.approx(0.05)


def test_a_mean_over_the_last_epochs_may_be_reached_before_the_end():
    dense = run(DIGITS, DENSE, [0.5, 0.9, 0.97, 0.96, 0.98, 0.97], 1.0)
    assert dense.quality == pytest.approx(95.6)
    assert report.seconds_to(dense, dense.quality) == 30


@pytest.mark.parametrize(("task", "best", "near"), [(TEXT, 2.0, 2.04), (DIGITS, 1.0, 0.96)])
def test_near_enough_may_be_as_good(task, best, near):
    runs = run(task, DENSE, [best], 1.0), run(task, "cast", [near], 0.5)
    assert compared(*runs)["cast", 0]["seconds"] is None
    enough = compared(*runs, within=task.scale * 0.05)["cast", 0]
    assert enough["seconds"] == pytest.approx(5)


def test_methods_are_compared_with_the_best_dense_training():
    curve = [4.0, 3.0, 2.5]
    slow, fast = (run(TEXT, name, curve, pace) for name, pace in ((DENSE, 1.0), (HOROVOD, 0.5)))
    rows = compared(slow, fast, run(TEXT, "adacomp", curve, 0.1))
    found = {name: rows[name, 0]["times faster"] for name in (DENSE, HOROVOD, "adacomp")}
    assert found == pytest.approx({DENSE: 0.5, HOROVOD: 1, "adacomp": 5})
    means = {row["method"]: row["times faster"] for row in report.means([*rows.values()])}
    assert means["adacomp"] == pytest.approx(5)


def test_a_goal_that_is_never_reached_is_reported():
    rows = compared(run(TEXT, DENSE, [2.0], 1.0), run(TEXT, "top_k", [3.0, 2.1], 0.1))
    row = rows["top_k", 0]
    assert row["seconds"] is None
    table = report.markdown("", [row])
    assert "| top_k | 0 | 2.000 | never |  |  |  | 2.100 | 100.0 |" in table


def test_seeds_are_averaged_and_a_choice_is_named():
    chosen = ["adacomp", "cast"]
    rows = compared(
        *(run(TEXT, DENSE, [3.0, 2.0], 1.0, seed) for seed in (0, 1)),
        *(run(TEXT, "auto", [2.0], 0.1 * (seed + 1), seed, chosen[seed]) for seed in (0, 1)),
        *(run(TEXT, "qsgd", [2.0 + seed], 0.1, seed) for seed in (0, 1)),
    )
    means = {row["method"]: row for row in report.means(list(rows.values()))}
    assert means["auto"]["seconds"] == pytest.approx(1.5)
    assert means["auto"]["times faster"] == pytest.approx(20 / 1.5)
    assert means["auto"]["of a free network's"] == pytest.approx(1 / 1.5)
    assert means["qsgd"]["seconds"] is means["qsgd"]["times faster"] is None  # not in both
    assert "| auto: adacomp, cast | mean |" in report.markdown("", means.values())


def test_all_seeds_have_to_reach_what_the_worst_dense_run_has():
    rows = compared(
        *(run(TEXT, DENSE, [3.0, 2.1 + 0.1 * seed], 1.0, seed) for seed in (0, 1)),
        *(run(TEXT, "cast", [2.5, 2.2], 0.5, seed) for seed in (0, 1)),
        *(run(TEXT, "adacomp", [2.0] if seed else [2.4, 2.0], 0.1, seed) for seed in (0, 1)),
    )
    assert {row["goal"] for row in rows.values()} == {2.1 + 0.1}
    assert rows["adacomp", 0]["than casts"] == pytest.approx(5)
    means = report.means(list(rows.values()))
    text = report.markdown("", means)
    assert "| adacomp | mean | 2.200 | 1.5 (1.0 to 2.0) | 13.3 | 6.7 |" in text


def test_a_link_gives_each_curve_its_pace():
    curves = [
        *(run(TEXT, DENSE, [4.0, 2.5 + seed], 0.0, seed) for seed in (0, 1)),
        *(run(TEXT, "adacomp", [3.0, 2.4 + seed], 0.0, seed) for seed in (0, 1)),
    ]
    link = [Pace(DENSE, DENSE, 1.0), Pace("auto", "adacomp", 0.2), FREE_PACE]
    runs = comparison.placed_on(link, curves)
    assert [(one.compressor, one.chosen, one.seed) for one in runs] == [
        *((DENSE, DENSE, seed) for seed in (0, 1)),
        *(("auto", "adacomp", seed) for seed in (0, 1)),
        *((FREE, FREE, seed) for seed in (0, 1)),
    ]
    assert [one.seconds[-1] for one in runs] == pytest.approx([20, 20, 4, 4, 1, 1])
    assert [one.curve[-1] for one in runs] == [2.5, 3.5, 2.4, 3.4, 2.5, 3.5]


def test_local_steps_count_as_separate_methods():
    curves = [
        run(TEXT, DENSE, [4.0, 2.5], 0.0),
        run(TEXT, "top_k", [3.0, 2.5], 0.0),
        run(TEXT, "top_k", [3.5, 2.4], 0.0, local_steps=16),
    ]
    link = [Pace(DENSE, DENSE, 1.0), Pace("top_k", "top_k", 0.5), FREE_PACE]
    link.append(Pace("top_k", "top_k", 0.1, 16))
    runs = comparison.placed_on(link, curves)
    rows = {row["method"]: row["seconds"] for row in report.compare(runs, 2.5)}
    assert rows == pytest.approx({DENSE: 20, "top_k": 10, FREE: 1, "top_k, 16 local steps": 2})
    assert curves[2].name == "text-2workers-adam-top_k-16local-seed0"


def test_only_the_choice_of_auto_takes_the_place_of_what_was_asked_for():
    recorded = "top_k(density={'dense': 0.05})"  # records have all settings
    asked, auto = "top_k(density=0.05)", "auto"
    chosen = [run(TEXT, name, [4.0], 1.0, chosen=recorded).chosen for name in (asked, auto)]
    assert chosen == [asked, recorded]


def invoked_with_paces(folder, monkeypatch, *args):
    """Trains curves that rise evenly, with recorded times of steps."""

    def run_all(self, runs, args, epochs):
        curve = [0.5 + epoch / 64 for epoch in range(6)]  # binary fractions: sums are exact
        done = {}
        for one in runs:
            faster = one.compressor == "adacomp" and one.seed
            history = {DIGITS.metric: [*curve[1:], 0.5] if faster else curve}
            history["seconds_per_step"] = [9.0] * len(history[DIGITS.metric])  # a busy machine
            done[one] = {"history": history, "steps_per_epoch": 10}
        return [
            dataclasses.replace(one, record={**record, "compressor": None, "traffic": None})
            for one, record in done.items()
        ]

    monkeypatch.setattr(trainings.Bench, "run_all", run_all)
    monkeypatch.setattr(links, "network", None)  # no link is needed
    rows = [(DENSE, DENSE, 1.0), ("auto", "adacomp", 0.2), ("qsgd", "qsgd", None)]
    rows.append((FREE, FREE, 0.1))
    names = ("method", "chosen", "seconds of a step")
    setup = dict(zip(records.SETUP, ("digits", "adam", 2, 0.0, "100 Mbit/s"), strict=True))
    setup |= {"about": {"machine": "a quiet one"}, "measured": None}
    setup["rows"] = [dict(zip(names, row, strict=True)) for row in rows]
    file = folder / "recorded.jsonl"
    records.write_network({"about": {}, "raw": [], "records": [], "setups": [setup]}, file)
    args = ["digits", *args, "--paces", str(file), "--results", str(folder / "results")]
    return CliRunner().invoke(time_to_accuracy.main, args)


def test_recorded_times_of_steps_are_given_to_new_curves(tmp_path, monkeypatch):
    done = invoked_with_paces(tmp_path, monkeypatch, "-c", "auto", "--seeds", "2")
    assert done.exit_code == 0, done.output
    (file,) = (tmp_path / "results").glob("*.json")
    result = json.loads(file.read_text())
    assert result["about"][records.PACES] == {"machine": "a quiet one"}
    rows = {(r["method"], r["seed"]): r for r in result["links"]["100 Mbit/s"]["rows"]}
    # The mean of the last five of six points is the fourth point.
    assert rows[DENSE, 0]["seconds"] == pytest.approx(40)
    assert rows["auto", 0]["seconds"] == pytest.approx(8)
    assert rows["auto", 1]["seconds"] == pytest.approx(6)
    assert [rows["auto", seed]["times faster"] for seed in (0, 1)] == pytest.approx([5, 40 / 6])
    entry = records.merge_times([result])[0]
    (found,) = (one for one in report.sooner(entry) if one.method == "auto")
    assert found.dense == pytest.approx([5, 40 / 6], rel=1e-4)


def test_methods_without_a_recorded_time_are_refused(tmp_path, monkeypatch):
    refused = invoked_with_paces(tmp_path, monkeypatch, "-c", "qsgd")
    assert refused.exit_code == 2
    assert "no time of a step is recorded for qsgd" in " ".join(refused.output.split())
    refused = invoked_with_paces(tmp_path, monkeypatch, "-c", "auto", "--workers", "4")
    assert "has no times of" in refused.output


def test_a_new_result_takes_the_place_of_what_measured_the_same():
    def result(workers, machine):
        what = {"task": "digits", "optimizer": "adam", "workers": workers, "delay": 0.0}
        links = {"1 Gbit/s": {"measured": None, "rows": [{"seconds": 1.0}]}}
        return {"about": {"machine": machine}, "what": what, "links": links}

    before = records.merge_times([result(2, "old"), result(4, "old")])
    after = records.merge_times([result(2, "new")], before)
    found = [(entry["workers"], entry["about"]["machine"]) for entry in after]
    assert found == [(2, "new"), (4, "old")]


@pytest.mark.parametrize(
    ("local_steps", "epochs", "steps"), [(0, 30, 22), (16, 21, 32), (64, 10, 64), (1000, 2, 1000)]
)
def test_epochs_are_whole_rounds(local_steps, epochs, steps):
    setting = comparison.SETTINGS["digits"]
    assert setting.in_rounds(30, local_steps) == (epochs, steps)


@pytest.mark.parametrize(
    ("rates", "used"),
    [
        ((None, None), (None, None)),
        ((None, 0.002), (None, "0.002")),
        ((0.004, None), ("0.004", "0.004")),
        ((0.004, 0.002), ("0.004", "0.002")),
    ],
)
def test_all_runs_have_equal_epochs_of_whole_rounds(rates, used, tmp_path, monkeypatch):
    given = []

    class Bench:
        def __init__(self, *_args, **_settings):
            pass

        def run_all(self, runs, args, epochs):
            given.append(([one.method for one in runs], args, epochs))
            return runs

    monkeypatch.setattr(comparison, "Bench", Bench)
    methods = [(DENSE, 0), ("cast", 0), ("cast", 16), ("cast", 24)]
    setting = comparison.SETTINGS["digits"]
    compared = comparison.Comparison(setting, 2, "adam", methods, 0.0, *rates, False)
    assert len(compared.curves(methods, 1, 30, tmp_path)) == 4
    epochs = ["--epochs", "14", "--steps-per-epoch", "48"]
    synchronous, local = (["--learning-rate", rate] if rate else [] for rate in used)
    assert given == [
        ([DENSE, "cast"], [*epochs, *synchronous], 14),
        (["cast, 16 local steps", "cast, 24 local steps"], [*epochs, *local], 14),
    ]


PROGRAM = """
import json, os, pathlib, sys
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]) == 1  # alone
slow = args["--history"].endswith("alone1.json")
history = {"seconds_per_step": [9.0, 0.2 if slow else 0.1]}
record = {"args": args, "history": history}
pathlib.Path(args["--history"]).write_text(json.dumps(record))
"""


def test_steps_without_exchange_are_of_workers_that_train_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "_PROGRAMS", tmp_path)
    monkeypatch.setattr(trainings, "cores", lambda: 2)
    (tmp_path / TRANSFORMER.program).write_text(PROGRAM)
    one = Run(TRANSFORMER, 2, "adamw", DENSE, 3)
    bench = trainings.Bench(tmp_path, False, Network(2), 1)
    seconds = bench.without_exchange(one, ["--epochs", "2"])
    assert seconds == 0.2  # in the second half
    record = json.loads((tmp_path / one.files_without_exchange[0]).read_text())
    args = {key: record["args"][key] for key in ("--batch-size", "--compressor", "--seed")}
    assert args == {"--batch-size": "16", "--compressor": "no_compression", "--seed": "3"}
    assert "--optimizer" not in record["args"]  # the program has one
    four_workers = dataclasses.replace(one, workers=4)  # who would share each core by twos
    assert bench.without_exchange(four_workers, ["--epochs", "2"]) == 0.4
    files = [tmp_path / file for file in four_workers.files_without_exchange]
    assert [json.loads(file.read_text())["args"]["--batch-size"] for file in files] == ["8", "8"]
    (tmp_path / TRANSFORMER.program).write_text("raise SystemExit('no such text')")
    with pytest.raises(Exception, match="a worker alone, failed"):
        bench.without_exchange(one, [])


@pytest.mark.skipif(not trainings.horovod_installed(), reason="Horovod is not installed.")
def test_dense_training_by_horovod_is_that_of_one_process(tmp_path):
    bench = trainings.Bench(tmp_path, False, Network(2), 1)
    one = Run(DIGITS, 2, "sgd", DENSE, 3)
    args = ["--epochs", "2", "--steps-per-epoch", "3"]
    assert bench.by_horovod(one, args) > 0
    found = json.loads((tmp_path / one.file_by_horovod).read_text())["history"]["val_loss"]
    keras.utils.set_random_seed(3)
    single = simulated.Training("digits", 1, 3, 6, optimizer="sgd")
    model, rows, held_out = simulated.WORKLOADS["digits"].make(single)
    batches = tf.data.Dataset.from_tensor_slices(rows).shuffle(len(rows[0]), seed=3).batch(64)
    fitted = model.fit(
        batches.repeat(), epochs=2, steps_per_epoch=3, validation_data=held_out, verbose=0
    )
    # Six steps from equal weights, with means that are rounded in another order.
    assert found == pytest.approx(fitted.history["val_loss"], rel=1e-4)


def test_records_of_other_arguments_are_not_reused(tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "_PROGRAMS", tmp_path)
    (tmp_path / TRANSFORMER.program).write_text(PROGRAM)
    one = Run(TRANSFORMER, 1, "adamw", DENSE, 0)
    trainings.Bench(tmp_path, False, Network(1), 1).without_exchange(one, ["--epochs", "2"])
    (tmp_path / TRANSFORMER.program).write_text("raise SystemExit('it trained')")
    again = trainings.Bench(tmp_path, True, Network(1), 1)
    assert again.without_exchange(one, ["--epochs", "2"]) == 0.1
    with pytest.raises(click.UsageError, match=r"with --epochs 2, not with --epochs 3"):
        again.without_exchange(one, ["--epochs", "3"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["transformer", "--optimizer", "sgd"], "transformer is trained by adamw"),
        (["digits", "--workers", "3"], "3 workers cannot share 64 rows equally"),
    ],
)
def test_impossible_trainings_are_refused(args, words):
    result = CliRunner().invoke(time_to_accuracy.main, args)
    assert result.exit_code == 2
    assert words in result.output
