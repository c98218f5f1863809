"""One TensorFlow worker of the network benchmark; `network.py` starts it."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import turns
from forecast import forecast
from gradients import mean_over_workers
from stages import stage_seconds
from workloads import Exchanges, Trainings

import tf_gradcomp as gc


def main() -> None:
    plan = turns.Plan.from_command_line()
    strategy = gc.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    work = Exchanges(strategy) if plan.job == jobs.EXCHANGE else Trainings(strategy, plan.job)
    entries = {name: work.entry(name) for name in plan.contenders}
    contenders = {name: entry.contender for name, entry in entries.items()}
    exchanges = {name: entry.exchange for name, entry in entries.items() if entry.exchange}
    records = turns.take_turns(
        plan, contenders, mean_over_workers(strategy), rank, lambda: forecast(strategy, exchanges)
    )
    stages = {
        name: stage_seconds(strategy, entry.exchange, entry.source)
        for name, entry in entries.items()
        if entry.exchange
    }
    if rank == 0:
        for record in records:
            record["stages"] = stages.get(record["contender"])
        Path(plan.output).write_text(json.dumps(records))


if __name__ == "__main__":
    main()
