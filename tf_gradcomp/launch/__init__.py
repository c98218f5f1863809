"""Starts the workers of a job, here or on hosts, watches them, and ends them together.

Imports neither TensorFlow nor Keras: `gradcomp run` shall start at once.
"""

from tf_gradcomp.launch.gpus import gpus_of_workers
from tf_gradcomp.launch.horovod_ranks import horovod_ranks
from tf_gradcomp.launch.job import PASSED_SIGNALS, THIS_MACHINE, LocalJob
from tf_gradcomp.launch.result import JobResult, WorkerEnd
from tf_gradcomp.launch.scheduler import (
    Rank,
    addresses_of_all,
    is_started_alone,
    scheduled,
)
from tf_gradcomp.launch.ssh import Connection, Host, connected, parse_hosts

__all__ = [
    "PASSED_SIGNALS",
    "THIS_MACHINE",
    "Connection",
    "Host",
    "JobResult",
    "LocalJob",
    "Rank",
    "WorkerEnd",
    "addresses_of_all",
    "connected",
    "gpus_of_workers",
    "horovod_ranks",
    "is_started_alone",
    "parse_hosts",
    "scheduled",
]
