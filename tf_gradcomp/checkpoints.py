"""Where each worker of a job writes its checkpoints."""

from __future__ import annotations

import os
import pathlib

import tensorflow as tf


def worker_path(
    path: str | os.PathLike[str], strategy: tf.distribute.Strategy | None = None
) -> str:
    """The path under which this worker saves what all workers save.

    Saving is a collective (residuals and metrics are summed over the workers), so every worker
    must save; and Keras' callbacks, which know no chief, would all write one file. The chief (task
    `chief`, or worker 0 where there is none) keeps `path`; worker 3 has `<folder>/worker-3/<name>`.
    The folder is created.

    ```python
    keras.callbacks.ModelCheckpoint(gc.worker_path("checkpoints/{epoch}.keras"))
    ```

    Args:
        path: A file or folder, as one worker alone would name it.
        strategy: Whose cluster this process is in; by default TF_CONFIG tells.

    Returns:
        This worker's path; `path` itself for the chief, and where there is one worker.
    """
    if strategy is not None:
        resolver = strategy.cluster_resolver
    else:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    location = pathlib.Path(path)
    if not _is_chief(resolver):
        location = location.parent / f"{resolver.task_type}-{resolver.task_id}" / location.name
    location.parent.mkdir(parents=True, exist_ok=True)
    return str(location)


def _is_chief(resolver: tf.distribute.cluster_resolver.ClusterResolver | None) -> bool:
    cluster = resolver.cluster_spec().as_dict() if resolver else {}
    if not cluster or resolver.task_type == "chief":
        return True
    return "chief" not in cluster and resolver.task_type == "worker" and resolver.task_id == 0
