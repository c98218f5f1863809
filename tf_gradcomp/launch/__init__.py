"""Starts the workers of a job on this machine, watches them, and ends them together.

Imports neither TensorFlow nor Keras: `gradcomp run` shall start at once.
"""

from tf_gradcomp.launch.horovod_ranks import horovod_ranks
from tf_gradcomp.launch.job import LocalJob
from tf_gradcomp.launch.result import JobResult, WorkerEnd

__all__ = ["JobResult", "LocalJob", "WorkerEnd", "horovod_ranks"]
