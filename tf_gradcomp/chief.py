"""Determines this process' rank in its job, whether it is the chief, and its paths of files."""

from __future__ import annotations

import os
from typing import NamedTuple

import tensorflow as tf

from tf_gradcomp import horovod_here
from tf_gradcomp.tf_config import TFConfig, read_tf_config


class Worker(NamedTuple):
    """A worker of a job."""

    name: str
    is_chief: bool


def is_chief(strategy: tf.distribute.Strategy | None = None) -> bool:
    """Whether this process is the chief, which prints and writes for all workers.

    The chief is the task `chief`, or worker 0 if there is no `chief`; under Horovod, it is rank 0.
    Do not test `task_id` instead, because a `chief` and the first worker both have task index 0.

    ```python
    if gc.is_chief(strategy):
        print("done")
    ```

    Args:
        strategy: The strategy whose cluster this process belongs to. By default, it is the current
            strategy if its cluster resolver knows a cluster; otherwise TF_CONFIG; otherwise
            Horovod, if the program has initialized it.

    Returns:
        True for the chief, and outside any cluster; False for all other workers, parameter
        servers and evaluators.

    Raises:
        ValueError: If TF_CONFIG is needed and wrong.
    """
    worker = this_worker(strategy)
    return worker is None or worker.is_chief


def this_worker(strategy: tf.distribute.Strategy | None = None) -> Worker | None:
    """Returns this process' rank, consistent with `is_chief`; None outside a job of several."""
    task = task_of(strategy)
    if task is not None:
        return Worker(f"{task.task_type}-{task.task_index}", task.is_chief)
    hvd = horovod_here.in_use()
    if hvd is None or hvd.size() == 1:
        return None
    return worker_of_rank(hvd.rank())


def worker_of_rank(rank: int) -> Worker:
    """Returns the worker's number of a Horovod rank."""
    return Worker(f"worker-{rank}", rank == 0)


def task_of(strategy: tf.distribute.Strategy | None) -> TFConfig | None:
    """Returns the task of this process in a strategy's cluster, or otherwise in TF_CONFIG."""
    return task_in((strategy or tf.distribute.get_strategy()).cluster_resolver)


def task_in(resolver: tf.distribute.cluster_resolver.ClusterResolver | None) -> TFConfig | None:
    """Returns the task of this process in a resolver's cluster, or otherwise in TF_CONFIG."""
    cluster = resolver.cluster_spec().as_dict() if resolver else {}
    # A TPU's resolver names hosts, but no task: one process drives them all.
    if resolver is None or not cluster or resolver.task_type is None or resolver.task_id is None:
        return read_tf_config()
    addresses = {task_type: tuple(hosts) for task_type, hosts in cluster.items()}
    return TFConfig(addresses, resolver.task_type, resolver.task_id)


def worker_path(
    path: str | os.PathLike[str], strategy: tf.distribute.Strategy | None = None
) -> str:
    """Returns this worker's own path, for programs that write one file per worker.

    Saving does not need this function, because all workers may save to one path. The chief (task
    `chief`, or worker 0 if there is none) keeps `path`; worker 3 has `<folder>/worker-3/<name>`.
    The folder is created.

    ```python
    keras.callbacks.ModelCheckpoint(gc.worker_path("checkpoints/{epoch}.keras"))
    ```

    Args:
        path: A file or folder, as in a program for one worker, or a URL such as
            `gs://bucket/model.keras`.
        strategy: The strategy whose cluster this process belongs to. By default, it is the current
            strategy if its cluster resolver knows a cluster, and otherwise TF_CONFIG. If the
            cluster is not in TF_CONFIG, pass the strategy, or call this function in its scope.

    Returns:
        This worker's path; `path` itself for the chief, and if there is only one worker.
    """
    local_path = path_of(this_worker(strategy), path)
    folder = os.path.dirname(local_path)
    if folder:
        tf.io.gfile.makedirs(folder)  # even if it is a URL
    return local_path


def path_of(worker: Worker | None, path: str | os.PathLike[str]) -> str:
    """The path of any worker, as for `worker_path`; nothing is created."""
    folder, name = os.path.split(os.fspath(path).rstrip("/"))
    if worker is not None and not worker.is_chief:
        folder = os.path.join(folder, worker.name)
    return os.path.join(folder, name)
