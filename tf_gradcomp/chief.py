"""Tells this process' rank in its job, and whether it is the chief."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tf_gradcomp import horovod_here
from tf_gradcomp.tf_config import TFConfig, read_tf_config


class Worker(NamedTuple):
    """A worker of a job."""

    name: str
    is_chief: bool


def is_chief(strategy: tf.distribute.Strategy | None = None) -> bool:
    """Tells whether this process is the one of its job that prints and writes for all.

    That is the task `chief`, or worker 0 where there is no `chief`; under Horovod, rank 0. Each
    worker has its own task index, but a `chief` and the first worker have the same one, 0: do not
    ask `task_id`.

    ```python
    if gc.is_chief(strategy):
        print("done")
    ```

    Args:
        strategy: Whose cluster this process is in; by default the current strategy tells, if its
            cluster resolver knows a cluster, and otherwise TF_CONFIG, and otherwise Horovod, if the
            program has initialized it.

    Returns:
        True for the chief, and outside any cluster; False for all other workers, parameter
        servers and evaluators.

    Raises:
        ValueError: If TF_CONFIG is needed and wrong.
    """
    worker = this_worker(strategy)
    return worker is None or worker.is_chief


def this_worker(strategy: tf.distribute.Strategy | None = None) -> Worker | None:
    """Returns this process' rank, as `is_chief` sees it; None outside a job of several."""
    task = _task_of(strategy)
    if task is not None:
        return Worker(f"{task.task_type}-{task.task_index}", task.is_chief)
    hvd = horovod_here.in_use()
    if hvd is None or hvd.size() == 1:
        return None
    return worker_of_rank(hvd.rank())


def worker_of_rank(rank: int) -> Worker:
    """Returns the worker's number of a Horovod rank."""
    return Worker(f"worker-{rank}", rank == 0)


def _task_of(strategy: tf.distribute.Strategy | None) -> TFConfig | None:
    resolver = (strategy or tf.distribute.get_strategy()).cluster_resolver
    cluster = resolver.cluster_spec().as_dict() if resolver else {}
    # A TPU's resolver names hosts, but no task: one process drives them all.
    if not cluster or resolver.task_type is None or resolver.task_id is None:
        return read_tf_config()
    addresses = {task_type: tuple(hosts) for task_type, hosts in cluster.items()}
    return TFConfig(addresses, resolver.task_type, resolver.task_id)
