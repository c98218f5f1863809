"""A worker of the network benchmarks; `network.py` and `two_levels.py` start it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import jobs
import turns


def main() -> None:
    plan = turns.Plan.from_command_line()
    backend = importlib.import_module(jobs.BACKENDS[jobs.framework(plan.contenders[0])])
    job = backend.join(plan)
    contenders = {name: job.contender(name) for name in plan.contenders}
    records = turns.take_turns(plan, contenders, job.mean, job.rank, job.predict)
    stages = job.stages()
    if job.rank == 0:
        records = [{**record, "stages": stages.get(record["contender"])} for record in records]
        Path(plan.output).write_text(json.dumps(records))
    job.leave()


if __name__ == "__main__":
    main()
