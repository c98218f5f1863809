"""How long a method encodes and decodes, by itself: all that its exchange does but communicate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import tensorflow as tf
from workloads import Source

import tf_gradcomp as gc
from tf_gradcomp.compressors import ExchangeInputs
from tf_gradcomp.distribute.communicator import AllReduce, Communicator, Wish
from tf_gradcomp.distribute.exchange import GradientExchange

REPEATS = 11


class _Echo(Communicator):
    """Answers at once, as if all replicas had given the same."""

    def all_gather(self, payload: tf.Tensor, same_length: bool) -> tf.Tensor:
        """A row for each replica."""
        return tf.stack([payload] * self.size)

    def all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        """What is given."""
        return values

    def broadcast(self, payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
        """What is given."""
        return payload


def stage_seconds(
    strategy: gc.MultiWorkerMirroredStrategy, exchange: GradientExchange, source: Source
) -> dict[str, float]:
    """Medians: `encode` up to what is communicated last, and `decode` from there on."""
    wishes = 0

    def whole() -> object:
        nonlocal wishes
        wishes, exchanged = _converse(strategy, exchange, source, None)
        return exchanged

    def first_part() -> object:
        return _converse(strategy, exchange, source, wishes)[1]

    runs = [_on_replica(strategy, part) for part in (whole, first_part)]
    for run in runs:
        run()  # traces; the second has to know what the first counted
    seconds = [[_seconds(run, source) for run in runs] for _ in range(REPEATS)]
    both, encode = map(statistics.median, zip(*seconds, strict=True))
    return {"encode": encode, "decode": max(0.0, both - encode)}


def _converse(
    strategy: gc.MultiWorkerMirroredStrategy,
    exchange: GradientExchange,
    source: Source,
    last: int | None,
) -> tuple[int, object]:
    """Has one replica talk to itself, up to its `last` wish or to the end; counts its wishes."""
    rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
    state = {
        name: [variable.value.handle for variable in variables]
        for name, variables in exchange.state.items()
    }
    gradients = [value.read_value() for value in source.values]
    step, finite = exchange.step.value.read_value(), tf.constant(True)
    inputs = ExchangeInputs(exchange.specs, gradients, state, step, finite, rank, size)
    talk = exchange.compressor.exchange(inputs)
    echo, answer, wishes = _Echo(size, rank), None, 0
    while True:
        try:
            wish = talk.send(answer)
        except StopIteration as end:
            return wishes, end.value.reduced
        wishes += 1
        if wishes == last:
            return wishes, _given(wish)
        answer, _ = echo.answer(wish)


def _given(wish: Wish) -> tf.Tensor:
    return wish.values if isinstance(wish, AllReduce) else wish.payload


def _on_replica(strategy: gc.MultiWorkerMirroredStrategy, work: Callable) -> Callable[[], object]:
    return tf.function(lambda: strategy.run(work), autograph=False)


def _seconds(run: Callable[[], object], source: Source) -> float:
    source.draw()
    start = time.perf_counter()
    done = run()
    seconds = time.perf_counter() - start
    del done
    return seconds
