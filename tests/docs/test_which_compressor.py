"""Tests the compressors and the program of the pages "Which method?" and "Does it pay?"."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc

DOCS = Path(__file__).resolve().parents[2] / "docs"
CHOICE, ADVICE = ((DOCS / f"{name}.md").read_text() for name in ("which_compressor", "advise"))
NAMES = "|".join(gc.compressors.names())


def named():
    """Finds the compressors in code."""
    for text in re.findall(r"`\"?([^`\n]+?)\"?`", CHOICE):
        if re.fullmatch(rf"({NAMES})(\(.*\))?", text):
            yield text


def test_the_page_names_compressors():
    assert {"adacomp", "adacomp(bin_sizes=50)", "arc_top_k", "cast"} <= set(named())


@pytest.mark.parametrize("text", sorted(set(named())))
def test_recommended_compressors_are_accepted(text):
    gc.compressors.get(text)


def test_the_program_for_a_simulation_is_one():
    x = np.zeros((128, 3), "float32")
    names = {
        "keras": keras,
        "gc": gc,
        "build_model": lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]),
        "dataset": tf.data.Dataset.from_tensor_slices((x, x[:, :1])),
        "held_out": (x, x[:, :1]),
    }
    exec(re.search(r"```python\n(.*?)```", ADVICE, re.S)[1], names)
    task = names["simulation_task"]()
    assert task.steps_per_epoch == 2
    learners = gc.simulation.Learners(task.model, 4)
    history = learners.fit(task.batches, 1, task.validation_data)
    assert "val_mae" in history
