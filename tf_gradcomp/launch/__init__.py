"""Starts the workers of a job, here or on hosts, watches them, and ends them together.

Imports neither TensorFlow nor Keras: `gradcomp run` shall start at once.
"""

from tf_gradcomp.launch.processes import LocalJob
from tf_gradcomp.launch.resources import gpus_of_workers, horovod_ranks
from tf_gradcomp.launch.result import JobResult, WorkerEnd
from tf_gradcomp.launch.scheduler import Rank, addresses_of_ranks, end_rank, find_rank
from tf_gradcomp.launch.ssh import Connection, Host, connected, parse_hosts, take_file

__all__ = [
    "Connection",
    "Host",
    "JobResult",
    "LocalJob",
    "Rank",
    "WorkerEnd",
    "addresses_of_ranks",
    "connected",
    "end_rank",
    "find_rank",
    "gpus_of_workers",
    "horovod_ranks",
    "parse_hosts",
    "take_file",
]
