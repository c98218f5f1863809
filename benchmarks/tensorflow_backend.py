"""Connects a worker of TensorFlow to the others, and makes its contenders."""

from __future__ import annotations

import jobs
import turns
from forecast import forecast
from gradients import mean_over_workers
from stages import stage_seconds
from workloads import Entry, Exchanges, Levels, Trainings

import tf_gradcomp as gc
from tf_gradcomp.private import tensorflow as tf_private


def join(plan: turns.Plan) -> turns.Job:
    """Connects this worker to the others."""
    if plan.job == jobs.TWO_LEVELS:
        tf_private.use_logical_cpus(plan.replicas)
    strategy = gc.MultiWorkerMirroredStrategy()
    rank, mean = strategy.cluster_resolver.task_id, mean_over_workers(strategy)
    if plan.job == jobs.TWO_LEVELS:
        return turns.Job(rank, mean, Levels(strategy).contender)
    work = Exchanges(strategy) if plan.job == jobs.EXCHANGE else Trainings(strategy, plan.job)
    entries: dict[str, Entry] = {}

    def contender(name: str) -> turns.Contender:
        entry = work.entry(name)
        if entry.exchange and name != jobs.GOSSIP:  # no model predicts it
            entries[name] = entry
        return entry.contender

    return turns.Job(
        rank,
        mean,
        contender,
        lambda: forecast(strategy, {name: one.exchange for name, one in entries.items()}),
        lambda: {
            name: stage_seconds(strategy, one.exchange, one.source) for name, one in entries.items()
        },
    )
