"""Tests the trainings that are compared, and the tables that are made of their records."""

import dataclasses
import functools

import local_steps_accuracy
import local_steps_runs
import pool
import pytest
import records
from click.testing import CliRunner
from trainings import DIGITS, TEXT

READINGS = {"digits": DIGITS, "text": TEXT}
Job = functools.partial(local_steps_runs.Job, dense_steps=128)


def record(job, quality, payload=10.0, sent=30.0):
    traffic = {"dense_bytes": 4000, "payload_bytes": payload, "sent_bytes": sent}
    return {**dataclasses.asdict(job), "training": job.training, "quality": quality, **traffic}


def test_rows_are_compared_with_dense_training_of_their_seeds():
    rounds = {"steps": 16, "outer": "nesterov", "compressor": "top-k"}
    local = [Job("digits", 4, seed, **rounds) for seed in (0, 1, 2)]
    of_runs = [
        *(record(Job("digits", 1, seed), quality) for seed, quality in enumerate((98.0, 96.0))),
        *(record(job, quality) for job, quality in zip(local, (97.5, 96.0, 50.0), strict=True)),
        record(Job("digits", 1, 0, batch=16, rate=4.0), 90.0),
        record(Job("digits", 1, 0, dense_steps=64), 70.0),
    ]
    short, dense, larger, rounds = local_steps_runs.compare(of_runs[::-1], READINGS)
    assert (short["dense_steps"], short["quality"]) == (64, 70.0)
    assert (dense["training"], dense["seeds"], dense["times fewer"]) == ("dense", 2, 1)
    assert (rounds["training"], rounds["seeds"]) == ("rounds16-nesterov-top-k", 2)  # 2 is alone
    assert (rounds["quality"], rounds["difference"], rounds["good"]) == (96.75, -0.25, True)
    ring = 2 * 3 / 4 * 4000
    assert (rounds["times fewer"], rounds["times fewer sent"]) == (400, ring / 30)
    assert (larger["training"], larger["bytes"]) == ("dense-batch16-rate4", 250)
    assert (larger["times fewer"], larger["good"]) == (16, False)


def test_rows_are_compared_with_the_best_rate_that_dense_training_has_all_seeds_of():
    rates = {1.0: (2.0, 2.2), 2.0: (1.8, 2.0), 4.0: (1.0,)}
    dense = [
        record(Job("text", 1, seed, rate=rate), quality)
        for rate, qualities in rates.items()
        for seed, quality in enumerate(qualities)
    ]
    local = [record(Job("text", 4, seed, steps=16), 2.1) for seed in (0, 1)]
    rows = local_steps_runs.compare([*dense, *local], READINGS)
    differences = {row["training"]: round(row["difference"], 6) for row in rows}
    dense_differences = {"dense": 0.2, "dense-rate2": 0.0, "dense-rate4": -0.8}
    assert differences == {**dense_differences, "rounds16-average-none": 0.2}


def test_rounds_by_muon_are_compared_with_both_dense_optimizers_and_the_same_rounds_by_adam():
    runs = [
        record(Job("text", 1, 0), 2.5),
        record(Job("text", 1, 0, rate=2.0), 2.0),
        record(Job("text", 1, 0, inner="muon"), 1.6),
        record(Job("text", 4, 0, steps=16, inner="muon"), 1.8),
        record(Job("text", 4, 0, steps=16), 2.4),
        record(Job("text", 4, 0, steps=64), 2.8),
        record(Job("digits", 1, 0), 90.0),
    ]
    rows = local_steps_runs.compare(runs, READINGS)
    assert {row["training"]: round(row["difference"], 6) for row in rows}[
        "rounds16-average-none-muon"
    ] == round(1.8 - 1.6, 6)
    lines = local_steps_runs.by_inner_optimizer(rows, READINGS).splitlines()
    assert len(lines) == 2 + 5  # digits have no run by Muon, and neither have rounds of 64
    assert "| 1 | 2.400 | +20.0 | +50.0 |" in lines[-2]
    assert "| 1 | 1.800 | -10.0 | +12.5 |" in lines[-1]


@pytest.mark.parametrize(("quality", "good"), [(2.02, "16"), (2.03, "none")])
def test_the_longest_round_within_a_percent_is_named(quality, good):
    of_runs = [
        record(Job("text", 1, 0), 2.0),
        record(Job("text", 1, 0, batch=4), 2.01),
        record(Job("text", 1, 0, batch=16), 2.1),
        record(Job("text", 4, 0, steps=16, warmup_steps=64, rate=2.0), quality),
        record(Job("text", 4, 0, steps=64), 3.0),
    ]
    text = local_steps_runs.markdown(local_steps_runs.compare(of_runs, READINGS), READINGS)
    assert f"| text, 128 steps | 4 | {good} | 4 |" in text
    assert "| any | dense | 1 | 2.000 | +0.000 | yes | 4,000 | 1 | 1 |" in text
    assert "| 4 | rounds of 16, mean, uncompressed, 64 steps of warm-up, rate 2 times |" in text


def invoked(folder, *args):
    return CliRunner().invoke(local_steps_accuracy.main, [*args, "--results", str(folder)])


def test_runs_leave_records_that_are_reused(tmp_path, monkeypatch):
    done = []

    class Pool:
        def __init__(self, *_):
            pass

        def run_all(self, runs):
            for job in runs:
                done.append(job.name)
                yield job, {**record(job, 90.0), "seconds": 1.0}

    monkeypatch.setattr(pool, "Pool", Pool)
    rounds, dense = "digits-128steps-2learners-rounds4-average-none", "digits-128steps-1learners-*"
    some = ["--training-steps", "128", "--seeds", "1", "--only", f"{rounds}-*", "--only", dense]
    first = invoked(tmp_path, *some)
    assert first.exit_code == 0, first.output
    assert done[0] == f"{rounds}-seed0"  # in the order of the patterns
    assert len(done) == 1 + 1 + 6
    assert "| digits, 128 steps | 2 | 4 | 64 |" in first.output
    larger = "digits-128steps-1learners-dense-batch4-rate2-seed0"
    assert larger in done
    refused = invoked(tmp_path, *some)
    assert refused.exit_code == 2
    assert "holds the results of an earlier run" in " ".join(refused.output.split())
    file = tmp_path / "local_steps.jsonl"
    found = records.by_name(file)
    one = found.pop(larger)
    records.write_by_name(file, found)
    assert invoked(tmp_path, *some, "--reuse").exit_code == 0
    assert done[8:] == [larger]
    assert records.by_name(file) == {**found, larger: one}
    records.write_by_name(file, {**found, larger: {**one, "rate": 3.0}})
    assert invoked(tmp_path, *some, "--overwrite").exit_code == 0
    assert len(done) == 8 + 1 + 8
    assert records.by_name(file) == {**found, larger: one}
    records.write_by_name(file, {**found, larger: {**one, "rate": 3.0}})
    refused = invoked(tmp_path, *some, "--reuse")
    assert refused.exit_code == 2
    assert "it is of another run" in " ".join(refused.output.split())


def test_all_of_a_grid_are_named_differently():
    grid = local_steps_runs.Grid((4, 16), ("none",), (0, 64), (1.0, 2.0))
    jobs = list(grid.jobs(4, "digits", 0, 128))
    assert len({job.name for job in jobs}) == len(jobs) == 2 + 2 * 3 * 2 * 2 + 4
    name = "digits-128steps-4learners-rounds4-average-none-warmup64-rate2-seed0"
    assert jobs[5].name == name
    assert jobs[-1].name == "digits-128steps-1learners-dense-batch16-rate4-seed0"
    assert jobs[-1].whole.steps == 8


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--training-steps", "100"], "a multiple of 64"),
        (["--rounds", "24"], "expected numbers of steps that divide 64"),
        (["--only", "cifar*"], "No run matches cifar*; one is digits-704steps-1learners-dense-s"),
        (["--only", "digits-*", "--learners", "3"], "3 learners cannot share 64 rows equally"),
        (["--compressor", "zip"], "'zip' is not one of"),
        (["--only", "shakespeare-*"], "Set GRADCOMP_DATA, or choose other tasks by --only"),
    ],
)
def test_impossible_trainings_are_refused(args, words, tmp_path, monkeypatch):
    monkeypatch.delenv("GRADCOMP_DATA", raising=False)
    refused = invoked(tmp_path, *args)
    assert refused.exit_code == 2, refused.output
    assert words in " ".join(refused.output.split())
