"""Runs the README's program and commands as a reader would, and the shortest example."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.workers import run_workers
from tf_gradcomp.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = ROOT / "keras_examples" / "minimal.py"
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]

# Before and after the reader's program.
LISTENER = """
import logging
class Listener(logging.Handler):
    def emit(self, record):
        print("WARNED", record.getMessage())
logging.getLogger("tf_gradcomp").addHandler(Listener(logging.WARNING))
"""
AFTERWARDS = """
import hashlib
print("losses", *model.history.history["loss"])
print("weights", hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest())
print("compressor", model.optimizer.exchange.compressor.name)
"""


def program(without):
    """The README's program, without the lines that have this mark."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", README.read_text(), re.M | re.S)
    assert all(line[:1] in ("", " ", "+", "-") for line in diff.splitlines())
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith(without))


def commands(page, name="gradcomp"):
    """The commands of a page's code that contain a name, from it on, as lists of words."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    shell = "".join(text for language, text in blocks if language in ("", "bash"))
    shown = "".join(re.findall(r"^\$ (.*\n)", page.read_text(), re.M))
    lines = (shell + shown).replace("\\\n", " ").splitlines()
    found = (shlex.split(line, comments=True) for line in lines if name in line)
    return [words[-1 - words[::-1].index(name) :] for words in found if name in words]


def test_a_reader_who_applies_the_diff_trains_on_two_workers(tmp_path):
    (tmp_path / "train.py").write_text(LISTENER + program(without="-") + AFTERWARDS)
    command = next(words for words in commands(README) if words[1:3] == ["run", "-n"])
    done = subprocess.run(
        [sys.executable, "-m", "tf_gradcomp.cli", *command[1:]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNED" not in done.stdout
    assert "Warning" not in done.stderr
    losses = re.findall(r"losses (.+)", done.stdout)
    weights = re.findall(r"weights (\w+)", done.stdout)
    assert losses[0] == losses[1]
    assert weights[0] == weights[1]
    first, *_, last = map(float, losses[0].split())
    assert last < first / 2
    assert done.stdout.count("compressor adacomp") == 2


def test_the_program_before_the_diff_trains_in_one_process():
    names = {}
    exec(program(without="+"), names)
    first, *_, last = names["model"].history.history["loss"]
    assert last < first / 2


def test_the_diff_adds_an_import_and_three_changes():
    text = README.read_text()
    added = [line[1:].strip() for line in text.splitlines() if line.startswith("+")]
    assert added[0] == "import tf_gradcomp as gc"
    assert [line for line in added if "gc." in line or "strategy" in line] == [*added[2:5]]


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_command_line_takes_the_options_of_the_page(page):
    for _, name, *arguments in filter(lambda words: words[1:] not in ([], ["."]), commands(page)):
        command = main.commands[name]
        command.make_parser(click.Context(command, **command.context_settings)).parse_args(
            arguments
        )


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_shell_reads_the_commands_of_the_page(page):
    blocks = re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.M | re.S)
    done = subprocess.run(["bash", "-n"], input="\n".join(blocks), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.quick
def test_the_readme_installs_what_is_there():
    for _, script, name in commands(README, "python3"):
        assert f'"{name}"' in (ROOT / script).read_text()


def test_the_shortest_example_learns_and_marks_its_three_lines():
    lines = MINIMAL.read_text().splitlines()
    assert len(lines) <= 30
    marked = [line.strip() for line in lines if re.search(r"# \(\d\)", line)]
    for line, call in zip(
        marked,
        ["MultiWorkerMirroredStrategy(", "strategy.scope()", "CompressedOptimizer("],
        strict=True,
    ):
        assert call in line
    chief, other = run_workers(MINIMAL)
    accuracies = [float(a) for a in re.findall(r" accuracy: (\S+)", chief.stdout)]
    assert len(accuracies) == 5
    assert accuracies[-1] > 0.85 > accuracies[0]
    assert "Epoch" not in other.stdout


def test_a_strategy_that_comes_too_late_is_an_error():
    program = """
    import sys
    import tensorflow as tf
    import tf_gradcomp as gc

    tf.zeros(1)
    try:
        gc.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        print(error)
    """
    for worker in run_workers(program):
        assert "create the strategy at the top of the program" in worker.stdout
