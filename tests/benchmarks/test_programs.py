"""Every program of the benchmarks, on one worker and on two, for a few steps."""

import argparse  # a text that is part of every Python
import functools
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_gradcomp as gc
from tests.horovod.jobs import needs_horovod
from tests.workers import ONE_THREAD, OPTIMIZED, PYTHON, python_path, run_workers, server
from tf_gradcomp.launch import horovod_ranks

PROGRAMS = Path(__file__).resolve().parents[2] / "benchmarks" / "programs"
SHORT = {
    "digits_cnn.py": ["--epochs", "3"],
    "char_lstm.py": ["--epochs", "2", "--steps-per-epoch", "8"],
    "transformer_lm.py": [
        *("--epochs", "2", "--steps-per-epoch", "8"),
        *("--dataset", argparse.__file__),
    ],
}
all_programs = pytest.mark.parametrize("program", SHORT)
ALSO_DENSE = "digits_cnn.py"


@functools.cache
def trained(program, workers, compressor):
    """Returns the log of a short run of the program; each is run once."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "history.json")
        args = ["--compressor", compressor, "--history", str(file), *SHORT[program]]
        if program == ALSO_DENSE:
            args += ["--checkpoints", folder]
        if workers == 1:
            run_alone(PROGRAMS / program, *args)
        else:
            run_workers(PROGRAMS / program, n=workers, args=args, env=OPTIMIZED)
        record = json.loads(file.read_text())
        if program == ALSO_DENSE:
            record["files"] = sorted(path.name for path in Path(folder).iterdir() if path.is_file())
            known = {"CompressedOptimizer": gc.CompressedOptimizer}
            best = keras.models.load_model(Path(folder, "best.keras"), custom_objects=known)
            record["parameters"] = best.count_params()
        return record


def run_alone(program, *args):
    """Runs a program like a user without TF_CONFIG."""
    env = {**os.environ, **ONE_THREAD, **OPTIMIZED, "PYTHONPATH": python_path()}
    env["PRELOADED"] = server(0)
    env.pop("TF_CONFIG", None)
    return subprocess.run(
        [*PYTHON, program, *args], env=env, check=True, capture_output=True, text=True
    )


def series(record, name):
    return record["history"][name]


@pytest.mark.parametrize(
    ("program", "compressor"),
    [
        *((program, "adacomp") for program in SHORT),
        (ALSO_DENSE, "no_compression"),
    ],
)
def test_learns_on_two_workers(program, compressor):
    record = trained(program, 2, compressor)
    losses = series(record, "loss")
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == len(losses)
    if program in ("char_lstm.py", "transformer_lm.py"):
        bits = series(record, "val_bits_per_character")
        assert bits[-1] < bits[0] < np.log2(96)
    else:
        accuracies = series(record, "val_accuracy")
        assert accuracies[0] < accuracies[-1]
        assert accuracies[-1] > 0.5


def test_two_workers_train_as_one_does():
    """The workers share the batches: each worker has its part, and the parts add up to the stated
    size."""
    one, two = trained(ALSO_DENSE, 1, "adacomp"), trained(ALSO_DENSE, 2, "no_compression")
    np.testing.assert_allclose(series(one, "loss"), series(two, "loss"), rtol=0.02)


@all_programs
def test_compressed_runs_say_what_they_sent(program):
    record = trained(program, 2, "adacomp")
    assert record["compressor"] == "adacomp"
    traffic = record["traffic"]
    # In its first steps, Adam's divided gradients are all alike, and so many are sent.
    assert traffic["dense_bytes"] > 10 * traffic["payload_bytes"]
    assert set(traffic["tensor_bytes"]) == set(traffic["variables"])


def test_dense_runs_send_all():
    traffic = trained(ALSO_DENSE, 2, "no_compression")["traffic"]
    assert traffic["payload_bytes"] == pytest.approx(traffic["dense_bytes"], rel=1e-3)


@pytest.mark.parametrize("program", ["digits_cnn.py", "char_lstm.py", "transformer_lm.py"])
def test_the_monitor_shows_in_the_history(program):
    record = trained(program, 2, "adacomp")
    names = {"payload_bytes", "sent_bytes", "dense_bytes", "compression_ratio", "fewer_bytes"}
    assert names | {"skipped_steps", "residual_norm", "seconds_per_step"} <= set(record["history"])
    assert series(record, "skipped_steps")[-1] == 0


@needs_horovod
def test_ranks_of_horovod_train_as_workers_of_a_strategy_do(tmp_path):
    program, file = "digits_cnn.py", tmp_path / "history.json"
    with horovod_ranks(2) as each:
        args = ["--horovod", "--history", file, *SHORT[program]]
        run_workers(PROGRAMS / program, 2, args, env=OPTIMIZED, per_worker_env=each)
    ranks, workers = json.loads(file.read_text()), trained(program, 2, "adacomp")
    accuracy, second = (series(run, "val_accuracy")[-1] for run in (ranks, workers))
    assert accuracy == pytest.approx(second, rel=0.05)
    first, second = (run["traffic"]["payload_bytes"] for run in (ranks, workers))
    assert first == pytest.approx(second, rel=0.2)


@pytest.mark.parametrize("compressor", ["adacomp", "no_compression"])
def test_digits_checkpoints(compressor):
    record = trained(ALSO_DENSE, 2, compressor)
    assert record["files"] == ["best.keras", "history.json"]
    assert record["parameters"] == 151_306


def test_a_custom_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes a dull model. ☃\n" * 300)
    args = ["--dataset", text, "--epochs", "1", "--steps-per-epoch", "2"]
    output = run_alone(PROGRAMS / "char_lstm.py", *args).stdout
    assert "bits per character" in output.splitlines()[-1]


def test_an_unknown_compressor_is_refused():
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_alone(PROGRAMS / "digits_cnn.py", "--compressor", "zip")
    assert "unknown name 'zip'; expected one of adacomp" in error.value.stderr
    assert "Traceback" not in error.value.stderr


def test_learned_compression(tmp_path):
    args = ["--epochs", "3", "--dense-steps", "10", "--training-steps", "30", "--density", "0.02"]
    chief, _ = run_workers(
        PROGRAMS / "learned_compression.py", n=2, args=[*args, "--results", tmp_path]
    )
    assert "Total params: 216,677" in chief.stdout
    (phase,) = [line for line in chief.stdout.splitlines() if line.startswith("Phase")]
    assert phase.startswith(("Phase 2", "Phase 3"))  # by the guard
    assert (tmp_path / "learned_compression.png").stat().st_size > 10_000
    known = {"Autoencoder": gc.Autoencoder}
    model = keras.models.load_model(tmp_path / "autoencoder.keras", custom_objects=known)
    assert model.flat_weights().size == 216_677


def test_the_demonstration(tmp_path):
    output = run_alone(PROGRAMS / "demo.py", "--epochs", "1", "--results", tmp_path).stdout
    for row in (
        "test accuracy",
        "bytes sent per step and worker",
        "times fewer bytes sent",
        "time per step",
    ):
        assert row in output
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_a_vision_model_trains_on_a_folder_of_images(tmp_path):
    digits, labels = load_digits(n_class=2, return_X_y=True)
    for label in (0, 1):
        (tmp_path / str(label)).mkdir()
        for index, pixels in enumerate(digits[labels == label][:60]):
            image = tf.io.encode_png((15 * pixels).astype("uint8").reshape(8, 8, 1))
            (tmp_path / str(label) / f"{index}.png").write_bytes(image.numpy())
    args = ["--images", tmp_path, "--image-size", "32", "--batch-size", "16"]
    args += ["--epochs", "2", "--steps-per-epoch", "5"]
    chief, other = run_workers(PROGRAMS / "vision.py", n=2, args=args)
    first, last = map(float, re.findall(r" loss: (\S+)", chief.stdout))
    assert last < first
    assert re.search(
        r"^ *total payload +3,209,026 ", chief.stdout, re.MULTILINE
    )  # MobileNet, two classes
    assert "workers exchange gradients compressed by adacomp" in chief.stderr
    assert "Found 120 files belonging to 2 classes" in chief.stdout
    assert "Epoch" not in other.stdout


def test_digits_are_enlarged_for_vision_models(monkeypatch):
    monkeypatch.syspath_prepend(PROGRAMS)
    import vision

    train, test, classes = vision.load_digits(48, seed=0)
    images, labels = next(iter(train.batch(64)))
    assert images.shape == (64, 48, 48, 3)
    assert 200 < np.max(images) <= 255
    assert np.min(images) == 0
    assert set(labels.numpy()) == set(range(classes))
    assert (len(train), len(test)) == (1437, 360)
