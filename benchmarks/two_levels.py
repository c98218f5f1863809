"""Times the exchange of a ResNet-50's gradient between hosts with several replicas each.

    python benchmarks/two_levels.py
    python benchmarks/two_levels.py --replicas 2 --link "1 Gbit/s"

With one level, each replica exchanges with all other replicas. With two levels, the replicas of a
host sum their gradients, and the hosts exchange the sums. Each host is a process in a separate
network namespace, behind a link that `tc` shapes, which needs root. A host's replicas are logical
CPU devices, which share this machine's cores. Within a host, the benchmark therefore shows the
amount of computing and copying, but not the time that GPUs would take.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import links
import rich.console
import rich.table
import turns
from output import print_table, processor
from placed import placed_job, shared_out_threads
from turns import Plan

PROGRAM = Path(__file__).with_name(turns.BACKENDS[turns.TENSORFLOW_NAME])
CONTENDERS = (
    "all-reduce",
    "no_compression, two levels",
    "adacomp, one level",
    "adacomp, two levels",
)


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--hosts", default=2)
@click.option("--replicas", default=4, help="Of each host.")
@click.option(
    "--link",
    "speeds",
    multiple=True,
    type=click.Choice([*links.SPEEDS, links.UNSHAPED]),
    default=["100 Mbit/s", "1 Gbit/s"],
)
@click.option("--rounds", type=click.IntRange(1), default=3, help="Turns of each contender.")
@click.option(
    "--seconds", default=3.0, help="The approximate length of a turn, which has at least one step."
)
@click.option("--warm-up", default=30, help="Steps before all of what keeps a residual.")
def main(
    hosts: int, replicas: int, speeds: Sequence[str], rounds: int, seconds: float, warm_up: int
) -> None:
    missing = links.missing()
    if missing:
        raise click.ClickException(missing)
    with tempfile.TemporaryDirectory(prefix="gradcomp-two-levels-") as folder:
        output = str(Path(folder, "measured.json"))
        with links.network(hosts) as network:
            plan = Plan(
                turns.TWO_LEVELS,
                CONTENDERS,
                speeds,
                network,
                rounds,
                seconds,
                warm_up,
                output,
                replicas,
            )
            command = [sys.executable, str(PROGRAM), plan.to_text()]
            network.shape(links.UNSHAPED)

            def on_line(worker: int, stream: str, line: str) -> None:
                if (worker, stream) == (0, "stdout"):
                    print(line, flush=True)

            with placed_job(command, network, shared_out_threads(hosts), on_line) as job:
                result = job.run()
        if result.exit_code:
            raise click.ClickException("\n".join(result.summary()))
        show(json.loads(Path(output).read_text()), hosts, replicas)


def show(records: Sequence[dict[str, Any]], hosts: int, replicas: int) -> None:
    """Prints the measurements."""
    table = rich.table.Table(
        title=f"ResNet-50 gradient, {hosts} hosts with {replicas} replicas each, {processor()}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    for column in ("link", "", "median ms", "min", "max", "MB that a host sends"):
        table.add_column(column, justify="left" if column in ("link", "") else "right")
    for record in records:
        taken = [1000 * seconds for seconds in record["seconds"]]
        times = (f"{ms:,.0f}" for ms in (statistics.median(taken), min(taken), max(taken)))
        sent = f"{record['interface_bytes'] / 1e6:.2f}"
        table.add_row(record["link"], record["contender"], *times, sent)
    print_table(table)


if __name__ == "__main__":
    main()
