"""Trains the character LSTM on a text that had no influence on our defaults.

    gradcomp simulate benchmarks/library_text.py -n 2 -n 4 -n 8 --epochs 6 --seeds 3 -c adacomp

The text is the first three million characters of the modules of Python's standard library, in order
of their names. `keras_examples/char_lstm.py` by itself takes only the first 5,000 characters of
each module.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "keras_examples"))

import char_lstm

import tf_gradcomp as gc

_CHARACTERS = 3_000_000


def simulation_task(batch_size: int = 32, seed: int = 0) -> gc.simulation.Task:
    """Returns the task that `gradcomp simulate` trains, with 200 steps an epoch."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(module.read_text(errors="ignore") for module in modules)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text[:_CHARACTERS])
        file.flush()
        return char_lstm.simulation_task(batch_size, seed, dataset=file.name)
