"""The examples, on two workers: they learn, and the workers end with equal weights."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import keras
import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.datasets import load_digits

from tests.cli.test_run import preloaded_gradcomp
from tests.horovod.jobs import needs_horovod
from tests.workers import result, run_workers
from tf_gradcomp.cli.advise import advise
from tf_gradcomp.cli.main import main
from tf_gradcomp.cli.run import run
from tf_gradcomp.launch import horovod_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "keras_examples"
LONGEST = 80  # lines, of a program that one copies
REPORTS_WEIGHTS = """
import os, numpy
trained = [weight.numpy() for weight in model.trainable_variables]
numpy.savez(os.environ["RESULT_PATH"], *trained)
"""

BESIDE = f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n"  # programs find files beside them


def trained(name, *args, changes=(), more="", **job):
    """Runs an example on two workers; returns the chief's output and the weights of both."""
    program = (EXAMPLES / name).read_text()
    for old, new in changes:
        assert program.count(old) == 1
        program = program.replace(old, new)
    program = BESIDE + program + more + REPORTS_WEIGHTS
    chief, other = run_workers(program, 2, args, **job)
    assert "Epoch" not in other.stdout
    assert "exchange gradients" in chief.stderr  # and by which method
    weights, others = (list(result(worker).values()) for worker in (chief, other))
    assert len(weights) > 1
    for mine, its in zip(weights, others, strict=True):
        np.testing.assert_array_equal(mine, its)
    return chief.stdout, weights


def series(output, measure):
    """The values of a measure at the end of each epoch."""
    return [float(value) for value in re.findall(rf"(?<!\S){measure}: (\S+)", output)]


def test_a_gan_trains_with_two_optimizers():
    draws = """
drawn = model.generator(keras.random.normal((2000, NOISE), seed=1)).numpy().mean(0)
print("Distance from real:", *numpy.abs(drawn - images.mean(0)))
print("Exchanges:", model.optimizer.exchange.traffic().exchanges,
      model.discriminator_optimizer.exchange.traffic().exchanges)
"""
    output, _ = trained("two_optimizers.py", more="import numpy\n" + draws)
    assert len(series(output, "generator_loss")) == len(series(output, "discriminator_loss")) == 40
    (distance,) = re.findall(r"Distance from real: (.*)", output)
    images = load_digits().data / 16
    # Before, all pixels are about grey.
    untrained = np.abs(0.5 - images.mean(0)).mean()
    trained_distance = np.mean([float(pixel) for pixel in distance.split()])
    assert trained_distance < untrained / 2
    assert "Exchanges: 1120 1120" in output


def test_a_frozen_backbone_stays_and_is_then_trained_further():
    keeps = """
def backbone_weights():
    return [weight.numpy() for weight in backbone.weights]


def moved():
    return sum(np.abs(a - b).max() for a, b in zip(kept, backbone_weights()))


def sent():
    traffic = model.optimizer.exchange.traffic()
    return traffic.dense_bytes // traffic.exchanges
"""
    changes = [
        (
            "compile_again(model, 1e-3)\n",
            "compile_again(model, 1e-3)\n    kept = backbone_weights()\n",
        ),
        (
            "backbone.trainable = True\n",
            "backbone.trainable = True\n    print('moved', moved())\n    print('sent', sent())\n",
        ),
        ("\n\n# Stands for", keeps + "\n\n# Stands for"),
    ]
    more = """
print('moved', moved())
print('sent', sent())
"""
    output, _ = trained("finetune.py", changes=changes, more=more)
    losses, accuracies = series(output, "loss"), series(output, "accuracy")
    assert len(losses) == 15
    assert losses[4] < losses[0] / 2
    assert losses[9] < losses[5] / 2
    assert losses[14] < losses[9]
    assert accuracies[14] > 0.9
    frozen, unfrozen = (float(x) for x in re.findall(r"moved (\S+)", output))
    assert frozen == 0 < unfrozen
    head, everything = (int(x) for x in re.findall(r"sent (\d+)", output))
    assert head == 4 * (1024 * 5 + 5)
    assert everything == head + 4 * (9 * 32 + 32 + 9 * 32 * 64 + 64)


@pytest.mark.parametrize("name", ["image_folder.py", "tfrecords.py"])
def test_files_are_read(name, tmp_path):
    run_alone(EXAMPLES / name, "write", tmp_path)
    changes = []
    if name == "image_folder.py":
        files = list(tmp_path.rglob("*.png"))
        assert len(files) == 1797
        for file in files:  # two classes train fast
            if file.parent.name not in "01":
                file.unlink()
        changes = [("5  # pixels", "2  # pixels")]
    else:
        assert len(list(tmp_path.iterdir())) == 4
    output, _ = trained(name, "train", tmp_path, changes=changes)
    losses = series(output, "loss")
    assert len(losses) == (5 if name == "tfrecords.py" else 2)
    assert losses[-1] < losses[0] / 2


def run_alone(program, *args):
    """Runs a program in one process, which is not a worker."""
    return run_workers(program, 1, args)[0]


@pytest.mark.parametrize(
    ("name", "measure", "epochs"),
    [("train_step.py", "error", 5), ("custom_training_loop.py", "loss", 10)],
)
def test_programs_with_steps_of_their_own_learn(name, measure, epochs):
    more = """
made = getattr(model, "optimizer", None) or optimizer
traffic = made.exchange.traffic()
print("Fewer:", traffic.dense_bytes / traffic.payload_bytes)
"""
    output, _ = trained(name, more=more)
    values = [float(v) for v in re.findall(rf" {measure}:? ([\d.]+)", output)]
    assert len(values) == epochs
    assert values[-1] < values[0] / 2
    assert float(re.findall(r"Fewer: (\S+)", output)[0]) > 10
    if accuracies := re.findall(r"test accuracy (\S+)", output):
        assert float(accuracies[-1]) > 0.9


def test_workers_learn_by_local_steps():
    changes = [("EPOCHS = 2", "EPOCHS = 3"), ("rows -= rows %", "rows =")]
    output, _ = trained("local_steps.py", changes=changes)
    assert series(output, "rounds") == [1, 2, 3]
    first, second, last = series(output, "loss")
    assert last < second < first


DIES = """
class Dies(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        import json, os, signal
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        if (epoch, index, os.environ["GRADCOMP_RESTARTS"]) == (6, 1, "0"):
            os.kill(os.getpid(), signal.SIGKILL)


model.fit("""


def test_a_job_resumes_after_its_worker_has_died(tmp_path):
    program = (EXAMPLES / "resume.py").read_text()
    for old, new in (
        ('"backup"', f'"{tmp_path}/backup"'),
        ('"model.keras"', f'"{tmp_path}/model.keras"'),
        ("model.fit(", DIES),
        ("callbacks=callbacks,", "callbacks=[*callbacks, Dies()],"),
    ):
        assert program.count(old) == 1
        program = program.replace(old, new)
    file = tmp_path / "resume.py"
    file.write_text(program)
    options = ["-n", "2", "--max-restarts", "3", "--output", "chief"]
    done = preloaded_gradcomp("run", *options, str(file))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("gradcomp: restart ") == 1
    begun = [int(epoch) for epoch in re.findall(r"Epoch (\d+)/10", done.stdout)]
    assert begun[:6] == [1, 2, 3, 4, 5, 6]
    assert begun[-4:] == [7, 8, 9, 10]
    assert begun.count(6) == 1  # complete, so it is not done again
    losses = series(done.stdout, "loss")
    assert len(losses) == 10
    assert losses == sorted(losses, reverse=True)
    model = keras.models.load_model(tmp_path / "model.keras", compile=False)
    digits, labels = load_digits(return_X_y=True)
    predicted = model.predict(digits[1408:] / 16, verbose=0).argmax(-1)
    assert (predicted == labels[1408:]).mean() > 0.85


@needs_horovod
def test_ranks_of_horovod_learn():
    with horovod_ranks(2) as each:
        output, _ = trained("horovod_minimal.py", per_worker_env=each)
    losses = series(output, "loss")
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2


def test_the_task_of_a_simulation_trains_with_and_without_compression(tmp_path):
    options = ["-n", "2", "--epochs", "1", "-c", "no_compression", "-c", "adacomp", "--no-plot"]
    program, folder = str(EXAMPLES / "simulate_task.py"), str(tmp_path / "simulation")
    done = CliRunner().invoke(main, ["simulate", program, *options, "--results", folder])
    assert done.exit_code == 0, done.output
    dense, compressed = json.loads((tmp_path / "simulation/simulation.json").read_text())
    for training in (dense, compressed):
        assert training["history"]["val_accuracy"][-1] > 0.8
    assert compressed["history"]["sent_bytes"][-1] < dense["history"]["sent_bytes"][-1] / 10


@pytest.mark.parametrize("script", ["slurm.sh", "two_machines.sh"])
def test_scripts_use_options_that_exist(script):
    text = (EXAMPLES / script).read_text()
    subprocess.run(["bash", "-n", EXAMPLES / script], check=True)
    commands = re.findall(r"gradcomp (run|advise) (.*?)(?:&&|#|$)", text, re.M)
    assert commands
    for name, arguments in commands:
        known = {"run": run, "advise": advise}[name]
        options = {option for param in known.params for option in param.opts}
        words = shlex.split(arguments)
        assert options >= {word for word in words if word.startswith("-")}
        (program,) = [word for word in words if word.endswith(".py")]
        assert (EXAMPLES / program).exists()


def test_the_examples_are_listed_and_short():
    listed = re.findall(r"\]\((.*?)\)", (EXAMPLES / "README.md").read_text())
    files = {path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".sh", ".yaml")}
    assert {str(path.relative_to(EXAMPLES)) for path in files} == set(listed)
    for path in files:
        source = path.read_text()
        assert "click" not in source
        assert path.suffix == ".yaml" or source.count("\n") <= LONGEST, path
