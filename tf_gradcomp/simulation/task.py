"""Defines tasks that learners train, and loads them from a program."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tf_gradcomp.keras.common.version import keras


@dataclasses.dataclass(frozen=True)
class Task:
    """A task that learners train.

    Attributes:
        model: Built, and compiled with a loss and a plain Keras optimizer.
        batches: Pairs of inputs and labels for all learners; gone through in each epoch.
        steps_per_epoch: The number of batches.
        validation_data: As for `model.evaluate`: a dataset, or a pair of arrays.
    """

    model: keras.Model
    batches: Iterable[tuple[Any, Any]]
    steps_per_epoch: int
    validation_data: Any = None


def load(program: str, batch_size: int | None = None) -> functools.partial[Task]:
    """Returns the function that creates a program's task, with its batch size.

    The program is `FILE.py:FUNCTION`; without a function, it is `simulation_task`.
    """
    path, _, name = program.partition(":")
    name = name or "simulation_task"
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"{path!r} is no file; expected FILE.py or FILE.py:FUNCTION.")
    missing_function = ValueError(
        f"{path!r} has no function {name!r}; expected a function that takes batch_size and seed, "
        "and returns a gc.simulation.Task."
    )
    if name not in file.read_text():  # before the import, which may train
        raise missing_function
    # A name that no import can use.
    spec = importlib.util.spec_from_file_location(f"simulated program {file}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path!r} is not a Python program.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    sys.path.insert(0, str(file.parent))  # as Python does for a program
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise missing_function
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    missing = [each for each in ("batch_size", "seed") if each not in parameters]
    if missing and not takes_any:
        raise ValueError(
            f"{name} of {path!r} takes no {' and no '.join(missing)}; expected a function of "
            "batch_size and seed that returns a gc.simulation.Task."
        )
    own = parameters.get("batch_size")
    if batch_size is None and own is not None and isinstance(own.default, int):
        batch_size = own.default
    if batch_size is None:
        raise ValueError(
            f"{name} of {path!r} has no default batch size: pass --batch-size, or give its "
            "argument batch_size a default."
        )
    return functools.partial(function, batch_size=batch_size)
