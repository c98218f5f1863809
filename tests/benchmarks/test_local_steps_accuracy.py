"""Tests the trainings that are compared, and the tables that are made of their records."""

import dataclasses
import json

import local_steps_accuracy
import local_steps_tables
import pytest
from click.testing import CliRunner
from local_steps_accuracy import Job
from trainings import DIGITS, TEXT

READINGS = {"digits": DIGITS, "text": TEXT}


def record(job, quality, payload=10.0, sent=30.0):
    traffic = {"dense_bytes": 4000, "payload_bytes": payload, "sent_bytes": sent}
    return {**dataclasses.asdict(job), "training": job.training, "quality": quality, **traffic}


def test_rows_are_beside_dense_training_of_their_seeds():
    local = [Job("digits", 4, seed, 16, "nesterov", "top-k") for seed in (0, 1, 2)]
    records = [
        *(record(Job("digits", 1, seed), quality) for seed, quality in enumerate((98.0, 96.0))),
        *(record(job, quality) for job, quality in zip(local, (97.5, 96.0, 50.0), strict=True)),
        record(Job("digits", 1, 0, batch=16, rate=4.0), 90.0),
    ]
    dense, rounds, larger = local_steps_tables.compare(records, READINGS)
    assert (dense["training"], dense["seeds"], dense["times fewer"]) == ("dense", 2, 1)
    assert (rounds["training"], rounds["seeds"]) == ("16steps-nesterov-top-k", 2)  # seed 2 is alone
    assert (rounds["quality"], rounds["difference"], rounds["good"]) == (96.75, -0.25, True)
    ring = 2 * 3 / 4 * 4000
    assert (rounds["times fewer"], rounds["times fewer sent"]) == (400, ring / 30)
    assert (larger["training"], larger["bytes"]) == ("dense-batch16-rate4", 250)
    assert (larger["times fewer"], larger["good"]) == (16, False)


@pytest.mark.parametrize(("quality", "good"), [(2.02, "16"), (2.03, "none")])
def test_the_longest_round_within_a_percent_is_named(quality, good):
    records = [record(Job("text", 1, 0), 2.0), record(Job("text", 4, 0, 16), quality)]
    rows = local_steps_tables.compare(records, READINGS)
    text = local_steps_tables.markdown(rows, READINGS)
    assert f"| text | 4 | {good} |" in text
    assert "| any | dense | 1 | 2.000 | +0.000 | yes | 4,000 | 1 | 1 |" in text


def invoked(folder, *args):
    return CliRunner().invoke(local_steps_accuracy.main, [*args, "--results", str(folder)])


def test_runs_leave_records_that_are_reused(tmp_path, monkeypatch):
    trained = []

    def train(job, steps):
        trained.append(job.name)
        return {**record(job, 90.0), "training_steps": steps // job.batch, "seconds": 1.0}

    monkeypatch.setattr(local_steps_accuracy, "train", train)
    some = ["--short", "--only", "digits-1*", "--only", "digits-2learners-4steps-average-none-*"]
    assert invoked(tmp_path, *some).exit_code == 0
    names = [f"digits-1learners-dense{larger}-seed0" for larger in ("", "-batch4", "-batch4-rate2")]
    assert trained[:2] == [names[0], "digits-2learners-4steps-average-none-seed0"]
    assert trained[2:4] == names[1:]
    assert len(trained) == 2 + 6
    (tmp_path / "local-steps" / f"{names[1]}.json").unlink()
    assert invoked(tmp_path, *some, "--reuse").exit_code == 0
    assert trained[8:] == [names[1]]
    table = json.loads((tmp_path / "local-steps.json").read_text())
    assert [row["training"] for row in table][:2] == ["dense", "4steps-average-none"]
    refused = invoked(tmp_path, "--only", "digits-1*-seed0", "--reuse")
    assert refused.exit_code == 2
    assert "of 128 steps, not of 704" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--training-steps", "100"], "a multiple of 64"),
        (["--rounds", "24"], "expected numbers of steps that divide 64"),
        (["--only", "cifar*"], "No run matches cifar*; one is digits-1learners-dense-seed0"),
        (["--only", "digits-*", "--learners", "3"], "3 learners cannot share 64 rows equally"),
        (["--compressor", "zip"], "'zip' is not one of"),
        (["--only", "shakespeare-*"], "Set GRADCOMP_DATA, or choose other tasks by --only"),
    ],
)
def test_what_cannot_be_trained_is_refused(args, words, tmp_path, monkeypatch):
    monkeypatch.delenv("GRADCOMP_DATA", raising=False)
    refused = invoked(tmp_path, *args)
    assert refused.exit_code == 2, refused.output
    assert words in " ".join(refused.output.split())
