"""One host of the benchmark of two levels; `two_levels.py` starts it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jobs
import tensorflow as tf
import turns
from gradients import Gradients, all_reduce, mean_over_workers, on_replica

import tf_gradcomp as gc
from tf_gradcomp import tf_private
from tf_gradcomp.advice.choice import choose
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.method import Candidate, Method
from tf_gradcomp.groups.host_group import HostGroup
from tf_gradcomp.groups.strategy_group import StrategyGroup


def main() -> None:
    plan = turns.Plan.from_command_line()
    tf_private.use_logical_cpus(int(sys.argv[2]))
    strategy = gc.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    with strategy.scope():
        variables = [tf.Variable(tf.zeros(shape)) for shape in jobs.resnet50_shapes()]
    gradients = Gradients(variables, seed=rank)
    contenders = {name: contender(name, strategy, variables, gradients) for name in plan.contenders}
    records = turns.take_turns(plan, contenders, mean_over_workers(strategy), rank)
    if rank == 0:
        Path(plan.output).write_text(json.dumps(records))


def contender(
    name: str,
    strategy: tf.distribute.Strategy,
    variables: Sequence[tf.Variable],
    gradients: Gradients,
) -> turns.Contender:
    """The one of that name."""
    if name == jobs.ALL_REDUCE:
        step = on_replica(strategy, all_reduce, gradients.values)
        return turns.Contender(step, gradients.draw)
    method, levels = name.split(", ")
    exchange = new_exchange(method, strategy, variables, two_level=levels == "two levels")
    step = on_replica(strategy, reduction(exchange, variables), gradients.values)
    return turns.Contender(step, gradients.draw, keeps_residual=exchange.keeps_residual)


def new_exchange(
    name: str,
    strategy: tf.distribute.Strategy,
    variables: Sequence[tf.Variable],
    *,
    two_level: bool,
) -> GradientExchange:
    """An exchange of all replicas, or of the hosts."""
    method = Method(name, [Candidate(gc.compressors.get(name))], choose)
    group = (HostGroup if two_level else StrategyGroup)(strategy)
    exchange = GradientExchange(method, find_group=lambda: group)
    with strategy.scope():
        exchange.build(variables)
    return exchange


def reduction(
    exchange: GradientExchange, variables: Sequence[tf.Variable]
) -> Callable[[Sequence[tf.Tensor]], Any]:
    """What reduces the gradients of a replica."""
    group = exchange.group

    def reduce(gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return exchange.reduce(gradients, variables, group.member())[0]

    def reduce_together(gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        context = tf.distribute.get_replica_context()
        totals = context.merge_call(lambda _, each: group.on_each(reduce, each), (gradients,))
        return [tf.identity(total) for total in totals]  # on this replica's device

    return reduce if group.all_replicas is group else reduce_together


if __name__ == "__main__":
    main()
