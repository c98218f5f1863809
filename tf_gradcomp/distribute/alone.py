"""Whether a process that trains without a strategy was meant to train with others."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import tensorflow as tf

from tf_gradcomp.distribute.group import current_group
from tf_gradcomp.tf_config import read_tf_config

_LAUNCHERS_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_USE_STRATEGY = (
    "create the model and its optimizer inside `with gc.MultiWorkerMirroredStrategy().scope():`"
)
_trained_with_others = threading.Event()  # in this process, at some time


def check_not_alone_by_mistake() -> None:
    """Refuses to train without a strategy in what is one of several processes.

    Each of them would train by itself, and nobody would notice. Evaluators and parameter servers
    are on their own by design, and so is a process that has trained with the others before: the
    chief of TensorFlow's tutorial loads the model that the job saved, and trains it further.
    Horovod is asked only where the program has imported it, and its launcher's environment only
    then: `mpirun` starts programs of other kinds as well.

    Raises:
        ValueError: With the reason and the way out; or if TF_CONFIG is wrong.
    """
    if tf.distribute.has_strategy():
        if current_group().processes > 1:
            _trained_with_others.set()
        return
    if _trained_with_others.is_set():
        return
    config = read_tf_config()
    if config is not None and config.rank is not None and config.num_workers > 1:
        raise ValueError(
            f"CompressedOptimizer: TF_CONFIG names {config.num_workers} workers, but there is no "
            f"strategy here, and each of them would train alone: {_USE_STRATEGY}. To train alone "
            "on purpose, unset TF_CONFIG."
        )
    name, size = _size_by_horovod()
    if size > 1:
        raise ValueError(
            f"CompressedOptimizer: {name} says that this is one of {size} processes. It exchanges "
            "gradients through tf.distribute, not through Horovod, and each of them would train "
            f"alone: start the program by `gradcomp run` or with TF_CONFIG, and {_USE_STRATEGY}; "
            "or give the inner optimizer to Horovod's DistributedOptimizer."
        )


def _size_by_horovod() -> tuple[str, int]:
    """How many processes Horovod works with, or is about to, and who says so; 1 without it."""
    if "horovod" not in sys.modules:
        return "", 1
    modules = [module for name, module in sys.modules.items() if name.startswith("horovod.")]
    sizes = [(module.__name__, module.size()) for module in modules if _is_initialized(module)]
    if not sizes:
        sizes = [(name, _number(os.environ.get(name, ""))) for name in _LAUNCHERS_SIZES]
    return max(sizes, key=lambda named: named[1])


def _is_initialized(module: Any) -> bool:
    """Whether this is one of Horovod's interfaces, such as `horovod.tensorflow`, and in use."""
    asks = [getattr(module, name, None) for name in ("is_initialized", "size")]
    return all(callable(ask) for ask in asks) and module.is_initialized()


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 1
