"""`gradcomp simulate`, from a program to its table, record and plot."""

import json
import sys

import pytest
from click.testing import CliRunner

from tf_gradcomp.cli.main import main
from tf_gradcomp.cli.simulate import SimulatedTraining
from tf_gradcomp.cli.simulation_report import _fewer_sent, verdict

PROGRAM = """
import dataclasses

import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc


def simulation_task(batch_size=64, seed=0):
    keras.utils.set_random_seed(seed)
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
    return gc.simulation.Task(model, batches, 64 // batch_size, (x, y))


def without_a_size(batch_size, seed):
    return simulation_task(batch_size, seed)


def without_a_seed(batch_size=64):
    return simulation_task(batch_size)


def no_task(batch_size=64, seed=0):
    return 3


def once(batch_size=16, seed=0):
    task = simulation_task(batch_size, seed)
    return dataclasses.replace(task, batches=iter(task.batches))


def short(batch_size=16, seed=0):
    return dataclasses.replace(simulation_task(batch_size, seed), steps_per_epoch=6)


other = None
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def simulate(program, *options):
    return CliRunner().invoke(main, ["simulate", str(program), *options])


@pytest.mark.quick("gradcomp simulate")
def test_trains_each_method_with_each_number_of_learners(program, tmp_path):
    methods = ["no_compression", "adacomp(bin_sizes=4)"]
    options = ["-n", "2", "-n", "4", "-n", "2", "--epochs", "2", "--seeds", "2"]
    options += ["--batch-size", "16"]
    for method in [*methods, methods[0]]:  # a repeated value runs once
        options += ["-c", method]
    folder = tmp_path / "results"
    result = simulate(program, *options, "--results", str(folder))
    assert result.exit_code == 0, result.output
    runs = json.loads((folder / "simulation.json").read_text())
    kinds = [(run["learners"], run["compressor"], run["seed"]) for run in runs]
    assert kinds == [(n, method, seed) for n in (2, 4) for method in methods for seed in (0, 1)]
    for run in runs:
        history = run["history"]
        assert len(history["loss"]) == 2
        assert history["val_loss"][-1] < history["val_loss"][0]
        assert 0 < history["union_density"][-1] <= 1
    table = (folder / "simulation.md").read_text().splitlines()
    assert len(table) == 2 + 4
    assert "| adacomp(bin_sizes=4) | 4 |" in table[-1]
    assert all(line.count("|") == table[0].count("|") for line in table)
    assert (folder / "simulation.png").stat().st_size > 10_000
    shown = result.output.splitlines()
    begins = next(i for i, line in enumerate(shown) if line.startswith("method "))
    assert max(map(len, shown[begins:-1])) <= 80  # the last has the folder
    assert len([line for line in shown[begins:] if line.startswith("adacomp(bin_")]) == 4
    assert "By val_loss, mean of the last 2 epochs:" in shown
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" not in result.output  # bars, which a file has not
    assert len([line for line in shown if line.startswith("adacomp(bin_sizes=4) with 4 w")]) == 1


def trained(compressor, values, sent, learners=4, metric="val_accuracy"):
    history = {"val_loss": [1.0] * 6, metric: [0.0, *[values] * 5], "sent_bytes": [sent] * 6}
    return SimulatedTraining(compressor, learners, 0, 0.1, history, {})


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        (
            [("adacomp", 0.889, 10)],
            "adacomp with 4 workers: within the spread of uncompressed training at 48",
        ),
        (
            [("s", 0.885, 80)] * 2,
            "s with 4 workers: 0.5 points behind uncompressed at 6.0 times fewer bytes.",
        ),
        (
            [("s", 0.91, 80)] * 2,
            "s with 4 workers: 2.0 points ahead of uncompressed at 6.0 times fewer bytes.",
        ),
        ([("s", float("nan"), 80)], "s with 4 workers: val_accuracy is not a number."),
    ],
)
def test_the_verdict(runs, says):
    dense = [trained("no_compression", value, 480) for value in (0.888, 0.892)]
    lines = verdict([*dense, *(trained(*run) for run in runs)])
    assert lines[0] == "By val_accuracy, mean of the last 5 epochs:"
    assert lines[1].startswith(says)
    assert len(lines) == 2


def test_the_verdict_needs_uncompressed_training_and_is_unsure_of_one_seed():
    runs = [trained("no_compression", 0.2, 480, metric="val_mae"), trained("x", 0.3, 48)]
    runs[1].history["val_mae"] = [1.0, *[0.25] * 5]
    assert verdict(runs[1:])[0].startswith("No verdict: it needs uncompressed training")
    compared = "x with 4 workers: 0.05 behind uncompressed at 10 times fewer bytes"
    says = [f"{compared}, not decided (one seed)."]
    noise = ["Several seeds show how much of this is noise: --seeds 3."]
    assert verdict(runs)[1:] == says + noise


ENDLESS_TABLES = """
from __future__ import annotations

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc


@dataclasses.dataclass
class Size:
    rows: int = 32


def simulation_task(batch_size=8, seed=0):
    keras.utils.set_random_seed(seed)
    words = keras.Input((1,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(20, 4)(words))
    model = keras.Model(words, rows)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.arange(Size().rows)[:, np.newaxis] % 20
    y = np.ones((Size().rows, 4), "float32")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size).repeat()
    return gc.simulation.Task(model, batches, 3)
"""


def test_an_endless_dataset_of_slices_alone_is_trained_for_its_steps(tmp_path):
    program = tmp_path / "tables.py"
    program.write_text(ENDLESS_TABLES)
    folder = tmp_path / "results"
    options = ["-n", "2", "-c", "no_compression", "--epochs", "2", "--results", str(folder)]
    result = simulate(program, *options)
    assert result.exit_code == 0, result.output
    (run,) = json.loads((folder / "simulation.json").read_text())
    assert len(run["history"]["loss"]) == 2
    assert run["history"]["loss"][1] < run["history"]["loss"][0]
    assert "| no_compression | 2 |" in (folder / "simulation.md").read_text()


def test_each_epoch_prints_a_line_without_a_progress_bar(program, tmp_path):
    options = ["-n", "2", "-c", "no_compression", "--epochs", "2", "--batch-size", "16"]
    result = simulate(program, *options, "--results", str(tmp_path / "results"), "--no-plot")
    epochs = [line for line in result.output.splitlines() if ": epoch " in line]
    assert [line.split(", loss ")[0] for line in epochs] == [
        f"no_compression, 2 learners, seed 0: epoch {epoch} of 2" for epoch in (1, 2)
    ]


def test_the_settings_that_are_planned_are_recorded_and_drawn(tmp_path):
    program, folder = tmp_path / "program.py", tmp_path / "results"
    layers = "keras.layers.Dense(128), keras.layers.Dense(32), keras.layers.Dense(1)"
    program.write_text(PROGRAM.replace("keras.layers.Dense(1)", layers))
    lgreco = "lgreco(method='top_k(density=0.1)')"
    options = ["-n", "2", "-c", "qsgd", "-c", lgreco, "--epochs", "2", "--batch-size", "16"]
    result = simulate(program, *options, "--results", str(folder))
    assert result.exit_code == 0, result.output
    plain, planned = json.loads((folder / "simulation.json").read_text())
    assert plain["settings"] == {}
    assert [path.split("/")[-1] for path in planned["settings"]] == ["kernel"] * 2
    assert all(len(settings) == 1 + 2 for settings in planned["settings"].values())
    assert any(len(set(settings)) > 1 for settings in planned["settings"].values())
    assert max(planned["history"]["plan_ratio"]) > 1
    assert (folder / "settings.png").stat().st_size > 10_000


def test_a_program_without_a_task_is_refused_before_it_runs(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit('it trained')\n")
    result = simulate(program)
    assert result.exit_code != 0
    assert "has no function 'simulation_task'" in result.output


def test_fewer_bytes_in_the_table_equal_the_verdict():
    history = {"sent_bytes": [100.0, 300.0], "fewer_bytes": [90.0, 10.0]}
    run = SimulatedTraining("adacomp", 2, 0, 0.0, history, {})
    assert _fewer_sent([run]) == (100 * 90 + 300 * 10) / 400


@pytest.mark.parametrize(
    ("suffix", "options", "message"),
    [
        ("x", [], "is not a file; expected FILE.py"),
        (
            ":missing",
            [],
            "has no function 'missing'; expected a function that takes batch_size and seed",
        ),
        (":other", [], "has no function 'other'"),
        ("", ["-c", "zip"], "unknown name 'zip'"),
        ("", ["-c", "adacomp(bins=3)"], "'adacomp' has no setting 'bins'"),
        (
            "",
            ["-c", "adacomp(3)"],
            "(settings have names); expected a name, or one with settings such as",
        ),
        ("", ["-c", "adacomp(bin_sizes=0)"], "a whole number from 1 to 16383"),
        ("", ["-n", "0"], "0 is not in the range"),
        ("", ["--batch-size", "0"], "0 is not in the range"),
        (":without_a_size", [], "without_a_size of"),
        (":without_a_size", [], "has no default batch size: pass --batch-size"),
        (":without_a_seed", [], "takes no seed; expected a function of batch_size and seed"),
        ("", ["-n", "4", "-n", "3"], "3 learners cannot share batches of 64"),
        ("", ["-c", "auto"], "'auto' chooses by the network, but a simulation has no network"),
        ("", ["--results", __file__], "test_simulate.py' is a file"),
        ("", ["--results", "/dev/null/here"], "Cannot create the folder"),
    ],
)
def test_errors_come_before_anything_runs(program, suffix, options, message):
    if "--results" not in options:
        options = [*options, "--results", str(program.parent / "results")]
    result = simulate(f"{program}{suffix}", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    names = {path.name for path in program.parent.iterdir()}
    assert names - {"__pycache__"} == {program.name}


def test_the_program_s_own_batch_size_is_kept_and_json_is_printed(program, tmp_path):
    program.write_text(PROGRAM.replace("batch_size=64", "batch_size=32"))
    options = [*SHORT, "--results", str(tmp_path / "results"), "--no-plot"]
    default, explicit = (
        CliRunner().invoke(main, ["simulate", str(program), "--json", *options, *more])
        for more in ([], ["--batch-size", "32", "--overwrite"])
    )
    assert default.exit_code == 0, default.output
    runs = [json.loads(result.stdout) for result in (default, explicit)]
    assert runs[0][0]["history"]["loss"] == runs[1][0]["history"]["loss"]
    assert "Written" in default.stderr


SHORT = ["-n", "2", "-c", "no_compression", "--epochs", "1"]


def test_results_of_an_earlier_run_stay_unless_they_may_be_overwritten(program, tmp_path):
    earlier, other = tmp_path / "results" / "simulation.json", tmp_path / "results" / "notes.txt"
    earlier.parent.mkdir()
    earlier.write_text("earlier")
    other.write_text("mine")
    refused = simulate(program, *SHORT, "--results", str(earlier.parent))
    assert refused.exit_code == 2
    message = "holds the results of an earlier run (simulation.json): give another folder by "
    assert message + "--results, or --overwrite." in " ".join(refused.output.split())
    assert earlier.read_text() == "earlier"
    (tmp_path / "results" / "simulation.png").write_text("of the earlier run, and not drawn again")
    allowed = simulate(
        program, *SHORT, "--results", str(earlier.parent), "--overwrite", "--no-plot"
    )
    assert allowed.exit_code == 0, allowed.output
    assert len(json.loads(earlier.read_text())) == 1
    names = {path.name for path in earlier.parent.iterdir()}
    assert names == {"notes.txt", "simulation.json", "simulation.md"}


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_trained(
    program, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = tmp_path / "results"
    refused = simulate(program, *SHORT, "--results", str(folder))
    assert refused.exit_code == 2
    assert "pip install matplotlib, or give --no-plot" in " ".join(refused.output.split())
    assert not folder.exists()
    allowed = simulate(program, *SHORT, "--results", str(folder), "--no-plot")
    assert allowed.exit_code == 0, allowed.output
    assert sorted(path.name for path in folder.iterdir()) == ["simulation.json", "simulation.md"]


def test_where_batches_end_within_an_epoch_they_begin_again(program, tmp_path):
    options = ["-n", "2", "--epochs", "2", "-c", "no_compression", "--no-plot"]
    result = simulate(f"{program}:short", *options, "--results", str(tmp_path / "results"))
    assert result.exit_code == 0, result.output
    assert "12/12" in result.output or "epoch 2 of 2" in result.output


def test_batches_that_cannot_begin_again_are_an_error(program, tmp_path):
    options = ["-n", "2", "--epochs", "2", "-c", "no_compression", "--no-plot"]
    result = simulate(f"{program}:once", *options, "--results", str(tmp_path / "results"))
    assert result.exit_code == 1
    assert "end after 0 of an epoch's 4 steps" in " ".join(result.output.split())


def test_a_function_that_returns_no_task_is_an_error(program, tmp_path):
    result = simulate(f"{program}:no_task", "--results", str(tmp_path / "results"))
    assert result.exit_code == 2
    assert "no_task returned int; expected a gc.simulation.Task" in result.output
