"""Detection of processes that train without a strategy, but were meant to train with others."""

from __future__ import annotations

import os
import threading

import tensorflow as tf

from tf_gradcomp import horovod_here
from tf_gradcomp.chief import is_chief
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.tf_config import read_tf_config

_USE_STRATEGY = (
    "create the model and its optimizer inside `with gc.MultiWorkerMirroredStrategy().scope():`"
)
_ON_PURPOSE = "To train alone on purpose, unset %s."
_USE_LAUNCHER = "start the program by `gradcomp run --horovod` or `horovodrun --gloo`"
_trained_with_others = threading.Event()  # in this process, at some time


def check_not_alone_by_mistake(group: Group) -> None:
    """Refuses to train alone in a process that is one of several.

    Each process would train alone, and nobody would notice. Evaluators and parameter servers run
    alone by design. A chief that has already trained with other workers may also train alone. In
    TensorFlow's tutorial, for example, the chief loads the job's model and continues training.
    """
    if group.processes.size > 1:
        _trained_with_others.set()
        return
    if tf.distribute.has_strategy() or (_trained_with_others.is_set() and is_chief()):
        return
    by_horovod = not isinstance(group, StrategyGroup)
    if by_horovod and horovod_here.size()[1] > 1:  # through a process set that the program passed
        return
    config = read_tf_config()
    if config is not None and config.rank is not None and config.num_workers > 1:
        why = "Horovod knows of one process" if by_horovod else "there is no strategy here"
        raise ValueError(
            f"CompressedOptimizer: TF_CONFIG names {config.num_workers} workers, but {why}, and "
            f"each of them would train alone: {_USE_LAUNCHER if by_horovod else _USE_STRATEGY}. "
            f"{_ON_PURPOSE % 'TF_CONFIG'}"
        )
    name, size = horovod_here.unseen()
    if size > 1:
        raise ValueError(
            f"CompressedOptimizer: {name} says that this is one of {size} processes, but Horovod "
            f"was built without MPI and knows of one: {_USE_LAUNCHER}, or build it with "
            f"HOROVOD_WITH_MPI=1. {_ON_PURPOSE % name}"
        )
    if not by_horovod:
        check_not_of_horovod()


def check_not_of_horovod() -> None:
    """Refuses to train alone in a process that is one of several Horovod ranks."""
    name, size = horovod_here.size()
    if size > 1:
        raise ValueError(
            f"{name} says that this is one of {size} processes, and each of "
            "them would train alone: exchange gradients by Horovod, with hvd.init() and "
            'gc.CompressedOptimizer(..., group="horovod"); or start the program by `gradcomp run` '
            f"or with TF_CONFIG, and {_USE_STRATEGY}."
            + (f" {_ON_PURPOSE % name}" if name in os.environ else "")
        )
