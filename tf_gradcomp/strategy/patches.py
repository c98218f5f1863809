"""The table of all patches of TensorFlow.

`keras/keras2/patches.py` and `keras/keras3/patches.py` apply this table together with their own.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tf_gradcomp import tf_private, tf_private_data, tf_private_files, tf_private_random
from tf_gradcomp.groups.notices import warn_user
from tf_gradcomp.replacements import ChangedFunctionError
from tf_gradcomp.strategy import random_numbers, undivided_means
from tf_gradcomp.strategy.coordinated import save_model, write_checkpoint
from tf_gradcomp.strategy.strategy import copied_for_strategies, is_checked


class Patch(NamedTuple):
    """A part of TensorFlow or Keras that this package replaces while a program runs."""

    replaces: tuple[str, ...]  # dotted names of the functions that are replaced
    why: str  # the fault, or the missing feature, that makes the patch necessary
    test: str  # the test that fails if the patch no longer works
    install: Callable[[], None]  # replaces the functions; called once in a process
    upstream: str | None = None  # the upstream issue, if there is one
    essential: bool = False  # whether jobs would be wrong without it; others are guards


class UntestedVersionError(ImportError):
    """A release of Keras or TensorFlow lacks a function that training needs."""


def apply(patches: Sequence[Patch], versions: str, remedy: str) -> None:
    """Applies patches; skips and logs a guard whose function is missing or has changed.

    Args:
        patches: The patches, in order.
        versions: The versions in use, for messages.
        remedy: What to install, for messages.

    Raises:
        UntestedVersionError: If the patch is essential.
    """
    for patch in patches:
        before = [_attribute(name) for name in patch.replaces]
        try:
            patch.install()
        except (AttributeError, ChangedFunctionError) as error:
            for owner, name, value in before:
                if value is not _MISSING:
                    setattr(owner, name, value)
            names = ", ".join(patch.replaces)
            if patch.essential:
                raise UntestedVersionError(
                    f"tf_gradcomp cannot train with {versions}: {names} is missing or has changed "
                    f"({error}). {remedy}"
                ) from error
            warn_user(
                f"With {versions}, {names} is missing or has changed ({error}), so this protection "
                f"is off: {patch.why} {remedy}"
            )


_MISSING = object()


def _attribute(name: str) -> tuple[Any, str, Any]:
    """Returns the owner of an attribute, its name, and its value if there is one."""
    owner_name, _, attribute = name.rpartition(".")
    try:
        owner = pkgutil.resolve_name(owner_name)
    except (AttributeError, ImportError):
        return None, attribute, _MISSING
    return owner, attribute, vars(owner).get(attribute, _MISSING)


_VARIABLE = "tensorflow.python.distribute.values.DistributedVariable"
_INPUT = "tensorflow.python.distribute.input_lib"

TENSORFLOW = (
    Patch(
        tuple(f"{_VARIABLE}.{name}" for name in ("__float__", "__int__", "__complex__")),
        "Callbacks call float() for the learning rate, and variables of strategies refuse it.",
        "test_let_variables_become_numbers",
        tf_private.let_variables_become_numbers,
    ),
    Patch(
        ("tensorflow.python.ops.script_ops.FuncRegistry.__call__",),
        "TensorFlow shares aligned NumPy memory, and layers that run in place overwrite it.",
        "test_on_returned_by_python",
        lambda: tf_private_data.on_returned_by_python(copied_for_strategies),
    ),
    Patch(
        (
            f"{_INPUT}.DistributedDataset.__iter__",
            f"{_INPUT}.DistributedDatasetsFromFunction.__iter__",
        ),
        "Keras waits up to a minute between two epochs until an iterator has ended.",
        "test_drop_iterators_in_background",
        lambda: tf_private_data.drop_iterators_in_background(is_checked),
    ),
    Patch(
        (f"{_INPUT}._calculate_replicas_with_values",),
        "Each step waits for a collective that checks whether any worker has data.",
        "test_begin_steps_with_own_data",
        lambda: tf_private_data.begin_steps_with_own_data(is_checked),
    ),
    Patch(
        (
            "tensorflow.python.framework.random_seed.get_seed",
            "tensorflow.python.data.util.random_seed.get_seed",
        ),
        "Once a program sets a seed, tf.random draws the same numbers on all workers.",
        "test_on_op_seeds",
        lambda: tf_private_random.on_op_seeds(random_numbers.local_op_seeds),
    ),
    Patch(
        ("tensorflow.python.ops.stateful_random_ops.Generator._preprocess_key",),
        "A tf.random.Generator from outside the scope draws the same numbers on all workers.",
        "test_on_generator_keys",
        lambda: tf_private_random.on_generator_keys(random_numbers.local_generator_key),
    ),
    Patch(
        ("tensorflow.GradientTape.gradient",),
        "Only this function knows which loss a gradient is of.",
        "test_on_tape_gradient",
        undivided_means.on_tape_gradient,
    ),
    Patch(
        ("tensorflow.data.Dataset.__new__",),
        "The functions of a worker's own data draw the same numbers as on other workers.",
        "test_built_again",
        tf_private_data.record_constructors,
    ),
    Patch(
        (
            "tensorflow.python.checkpoint.checkpoint.Checkpoint._write",
            "tensorflow.python.checkpoint.checkpoint_management.update_checkpoint_state_internal",
            "tensorflow.python.checkpoint.checkpoint_management._delete_file_if_exists",
        ),
        "Workers that save to one path overwrite each other's files.",
        "test_on_checkpoint_write",
        lambda: tf_private_files.on_checkpoint_write(write_checkpoint),
        essential=True,
    ),
    Patch(
        ("tensorflow.python.saved_model.save.save_and_return_nodes",),
        "Workers that export to one path overwrite each other's files.",
        "test_on_saved_model",
        lambda: tf_private_files.on_saved_model(save_model),
    ),
)
