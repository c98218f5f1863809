"""Where each worker of a job writes its checkpoints."""

from __future__ import annotations

import os

import tensorflow as tf

from tf_gradcomp.chief import Worker, this_worker


def worker_path(
    path: str | os.PathLike[str], strategy: tf.distribute.Strategy | None = None
) -> str:
    """Returns a path of this worker's own, for programs that want a file of each worker.

    Nobody needs it to save: all workers may save to one path. The chief (task `chief`, or worker 0
    where there is none) keeps `path`; worker 3 has `<folder>/worker-3/<name>`. The folder is
    created.

    ```python
    keras.callbacks.ModelCheckpoint(gc.worker_path("checkpoints/{epoch}.keras"))
    ```

    Args:
        path: A file or folder, as one worker alone would name it, or a URL such as
            `gs://bucket/model.keras`.
        strategy: Whose cluster this process is in; by default the current strategy tells, if its
            cluster resolver knows a cluster, and otherwise TF_CONFIG. Where the cluster is not in
            TF_CONFIG, give it, or call this in the strategy's scope.

    Returns:
        This worker's path; `path` itself for the chief, and where there is one worker.
    """
    own = path_of(this_worker(strategy), path)
    folder = os.path.dirname(own)
    if folder:
        tf.io.gfile.makedirs(folder)  # also where it is a URL
    return own


def path_of(worker: Worker | None, path: str | os.PathLike[str]) -> str:
    """The path of any worker, as for `worker_path`; nothing is created."""
    folder, name = os.path.split(os.fspath(path).rstrip("/"))
    if worker is not None and not worker.is_chief:
        folder = os.path.join(folder, worker.name)
    return os.path.join(folder, name)
