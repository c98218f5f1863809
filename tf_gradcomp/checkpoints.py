"""Paths of the checkpoints of each worker in a job."""

from __future__ import annotations

import os

import tensorflow as tf

from tf_gradcomp.chief import Worker, this_worker


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
    own = path_of(this_worker(strategy), path)
    folder = os.path.dirname(own)
    if folder:
        tf.io.gfile.makedirs(folder)  # even if it is a URL
    return own


def path_of(worker: Worker | None, path: str | os.PathLike[str]) -> str:
    """The path of any worker, as for `worker_path`; nothing is created."""
    folder, name = os.path.split(os.fspath(path).rstrip("/"))
    if worker is not None and not worker.is_chief:
        folder = os.path.join(folder, worker.name)
    return os.path.join(folder, name)
