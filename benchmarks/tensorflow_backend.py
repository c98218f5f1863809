"""The contenders of TensorFlow: exchanges of a gradient, and whole steps of training.

Besides their steps, the times of encoding and decoding are measured, and `gc.advise` predicts the
time of each exchange.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import models
import tensorflow as tf
import turns
from models import (
    Gradients,
    Reduction,
    all_reduce,
    all_reduce_float16,
    mean_over_workers,
    on_replica,
)
from turns import Contender

import tf_gradcomp as gc
from tf_gradcomp.advice.codec_speed import CodecSpeed
from tf_gradcomp.advice.probe import THOROUGH, choose, probe
from tf_gradcomp.compressors import StepInputs, methods_of, text_of
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.replica import ReplicaStep
from tf_gradcomp.exchange.setup import Candidate, Method
from tf_gradcomp.groups.communicator import dense_ring_bytes
from tf_gradcomp.groups.host_group import HostGroup
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.private import keras3 as keras_private
from tf_gradcomp.private import tensorflow as tf_private

PLAIN: dict[str, Reduction] = {
    turns.ALL_REDUCE: all_reduce,
    turns.FLOAT16: all_reduce_float16,
    turns.NOTHING: lambda gradients: gradients,
}
STAGE_REPEATS = 11
_ELEMENT_BYTES = {turns.ALL_REDUCE: 4, turns.FLOAT16: 2, turns.NOTHING: 0}


class Source(Protocol):
    """A source of gradients to try a method on."""

    values: Sequence[tf.Variable]

    def draw(self) -> object:
        """Makes `values` the gradients of another step."""


class Entry(NamedTuple):
    """A contender, with its exchange, if it has any, and a source of gradients."""

    contender: Contender
    exchange: GradientExchange | None
    source: Source


class Exchanges:
    """Contenders that only exchange the gradient of a ResNet-50."""

    def __init__(self, strategy: gc.MultiWorkerMirroredStrategy) -> None:
        self._strategy = strategy
        with strategy.scope():
            model = keras.applications.ResNet50(weights=None)
        self._variables = model.trainable_variables
        self._policy = gc.Policy.from_model(model)
        self._gradients = Gradients(self._variables, strategy.cluster_resolver.task_id)

    def entry(self, name: str) -> Entry:
        """Makes the contender of a name."""
        exchange = None
        if name not in PLAIN:
            exchange = _exchange(name, self._strategy, self._variables, policy=self._policy)

        def reduction(gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
            if exchange is None:
                return PLAIN[name](gradients)
            return exchange.reduce(gradients, self._variables)[0]

        step = on_replica(self._strategy, reduction, self._gradients.take)
        prepare = self._gradients.hand_over
        contender = _contender(name, step, prepare, exchange, self._strategy, self._variables)
        contender = _renewable(contender, name, lambda: self.entry(name))
        return Entry(contender, exchange, self._gradients)


class Levels:
    """Contenders that only exchange the gradient of a ResNet-50, on several replicas per host.

    Their names end in "one level" or "two levels": all replicas exchange, or only hosts do.
    """

    def __init__(self, strategy: gc.MultiWorkerMirroredStrategy) -> None:
        self._strategy = strategy
        with strategy.scope():
            self._variables = [tf.Variable(tf.zeros(shape)) for shape in turns.resnet50_shapes()]
        self._gradients = Gradients(self._variables, strategy.cluster_resolver.task_id)

    def contender(self, name: str) -> Contender:
        """Makes the contender of a name."""
        values, draw = self._gradients.values, self._gradients.draw

        def take() -> list[tf.Tensor]:
            return [value.read_value() for value in values]  # each replica takes the same

        if name == turns.ALL_REDUCE:
            return Contender(on_replica(self._strategy, all_reduce, take), draw)
        method, levels = name.split(", ")
        group = (HostGroup if levels == "two levels" else StrategyGroup)(self._strategy)
        exchange = _exchange(method, self._strategy, self._variables, find_group=lambda: group)
        step = on_replica(self._strategy, self._reduction(exchange), take)
        return Contender(step, draw, keeps_residual=exchange.setup.residual_scale is not None)

    def _reduction(self, exchange: GradientExchange) -> Reduction:
        group = exchange.group

        def reduce(gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
            return exchange.reduce(gradients, self._variables)[0]

        def reduce_together(gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            across = lambda _, replica_values: group.each_replica(reduce, args=(replica_values,))  # noqa: E731
            totals = context.merge_call(across, (gradients,))
            return [tf.identity(total) for total in totals]  # on this replica's device

        return reduce if group.all_replicas is group else reduce_together


class Trainings:
    """Contenders that do whole steps of training, each with its own model."""

    def __init__(self, strategy: gc.MultiWorkerMirroredStrategy, job: str) -> None:
        self._strategy = strategy
        self._job = job

    def entry(self, name: str) -> Entry:
        """Makes the contender of a name."""
        training = _Training(self._strategy, self._job, name)
        exchange = None if name in PLAIN else training.optimizer.exchange
        step, variables = training.step, training.variables
        contender = _contender(name, step, None, exchange, self._strategy, variables)
        contender = _renewable(contender, name, lambda: self.entry(name))
        return Entry(contender, exchange, training)


class _Training:
    def __init__(self, strategy: gc.MultiWorkerMirroredStrategy, job: str, name: str) -> None:
        self._strategy = strategy
        self._reduce = PLAIN.get(name, PLAIN[turns.NOTHING])  # our optimizer does it by itself
        self._batches = models.batches(job, strategy.cluster_resolver.task_id)
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with strategy.scope():
            self._model = models.build(job)
            self.variables = self._model.trainable_variables
            self.optimizer = _optimizer(name, self._model)
            self.optimizer.build(self.variables)
        self.values = [tf.Variable(tf.zeros(variable.shape)) for variable in self.variables]

    def step(self) -> None:
        """Trains on the next batch."""
        self._train(*next(self._batches))

    def draw(self) -> None:
        """Computes the gradients of the next batch into `values`."""
        self._keep_gradients(*next(self._batches))

    @tf.function(autograph=False)
    def _train(self, inputs: tf.Tensor, labels: tf.Tensor) -> None:
        def train() -> None:
            gradients = self._reduce(self._gradients(inputs, labels))
            self.optimizer.apply(gradients, self.variables)

        with keras_private.applying_at_once(self.optimizer):  # what it gets is summed
            self._strategy.run(train)

    @tf.function(autograph=False)
    def _keep_gradients(self, inputs: tf.Tensor, labels: tf.Tensor) -> None:
        def keep() -> None:
            gradients = self._gradients(inputs, labels)
            for value, gradient in zip(self.values, gradients, strict=True):
                value.assign(gradient)

        self._strategy.run(keep)

    def _gradients(self, inputs: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = self._loss(labels, self._model(inputs, training=True))
            loss /= self._strategy.num_replicas_in_sync
        return tape.gradient(loss, self.variables)


def _exchange(
    name: str,
    strategy: gc.MultiWorkerMirroredStrategy,
    variables: Sequence[tf.Variable],
    **arguments: Any,
) -> GradientExchange:
    candidates = [Candidate(m) for m in methods_of(gc.compressors.get(name))]
    exchange = GradientExchange(Method(name, candidates, choose), **arguments)
    with strategy.scope():
        exchange.build(variables)
    return exchange


def _optimizer(name: str, model: keras.Model) -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.SGD(turns.LEARNING_RATE, turns.MOMENTUM)
    if name in PLAIN:
        return optimizer
    policy = gc.Policy.from_model(model)
    if name == turns.GOSSIP:
        return gc.CompressedOptimizer(optimizer, policy=policy, local_steps=gc.Gossip())
    return gc.CompressedOptimizer(optimizer, name, policy)


def _renewable(contender: Contender, name: str, make: Callable[[], Entry]) -> Contender:
    """Lets `auto` choose its method again on each link."""
    if name in (*PLAIN, turns.GOSSIP):
        return contender
    if not isinstance(gc.compressors.get(name), gc.compressors.Auto):
        return contender
    return dataclasses.replace(contender, renew=lambda: make().contender)


def _contender(
    name: str,
    step: Callable[[], object],
    prepare: Callable[[], object] | None,
    exchange: GradientExchange | None,
    strategy: gc.MultiWorkerMirroredStrategy,
    variables: Sequence[keras.Variable],
) -> Contender:
    if exchange is not None:
        return Contender(
            step,
            prepare,
            sent_bytes=lambda: exchange.traffic().sent_bytes,
            keeps_residual=exchange.setup.residual_scale is not None,
        )
    elements = sum(math.prod(variable.shape) for variable in variables)
    gathered = models.has_embedding(variables)
    payload_bytes = _ELEMENT_BYTES[name] * elements
    sent = dense_ring_bytes(strategy.num_replicas_in_sync, payload_bytes)
    return Contender(step, prepare, step_bytes=None if gathered and payload_bytes else sent)


def forecast(
    strategy: tf.distribute.Strategy, exchanges: Mapping[str, GradientExchange]
) -> dict[str, float]:
    """Returns the seconds of an exchange by name; a choice takes its fastest method."""
    methods = {name: methods_of(gc.compressors.get(name)) for name in exchanges}
    methods_by_text = {text_of(method): method for group in methods.values() for method in group}
    if not methods_by_text:
        return {}
    specs = next(iter(exchanges.values())).specs
    candidates = [Candidate(method) for method in methods_by_text.values()]
    probed = probe(StrategyGroup(strategy), specs, candidates, THOROUGH)
    seconds = {prediction.method: prediction.exchange for prediction in probed.predictions}
    return {
        name: min(seconds[text_of(method)] for method in group) for name, group in methods.items()
    }


def stage_seconds(
    strategy: gc.MultiWorkerMirroredStrategy, exchange: GradientExchange, source: Source
) -> dict[str, float]:
    """Returns the median times of `encode`, up to the last request, and of `decode`, after it."""
    state = {
        name: [strategy.experimental_local_results(v)[0].handle for v in variables]
        for name, variables in exchange.state.items()
    }
    step = strategy.experimental_local_results(exchange.step)[0]

    def next_step() -> ReplicaStep:
        return ReplicaStep.new(
            StepInputs(
                exchange.specs,
                [strategy.experimental_local_results(v)[0].read_value() for v in source.values],
                state,
                step.read_value(),
                tf.constant(True),
                strategy.cluster_resolver.task_id,
                strategy.num_replicas_in_sync,
            )
        )

    work = CodecSpeed(exchange.compressor, next_step, source.draw).measure(STAGE_REPEATS)
    return {"encode": work.encode, "decode": work.decode}


def join(plan: turns.Plan) -> turns.Job:
    """Connects this worker to the others."""
    if plan.job == turns.TWO_LEVELS:
        tf_private.use_logical_cpus(plan.replicas)
    strategy = gc.MultiWorkerMirroredStrategy()
    rank, mean = strategy.cluster_resolver.task_id, mean_over_workers(strategy)
    if plan.job == turns.TWO_LEVELS:
        return turns.Job(rank, mean, Levels(strategy).contender)
    work = Exchanges(strategy) if plan.job == turns.EXCHANGE else Trainings(strategy, plan.job)
    entries: dict[str, Entry] = {}

    def contender(name: str) -> turns.Contender:
        entry = work.entry(name)
        if entry.exchange and name != turns.GOSSIP:  # no model predicts it
            entries[name] = entry
        return entry.contender

    return turns.Job(
        rank,
        mean,
        contender,
        lambda: forecast(strategy, {name: entry.exchange for name, entry in entries.items()}),
        lambda: {
            name: stage_seconds(strategy, entry.exchange, entry.source)
            for name, entry in entries.items()
        },
    )


if __name__ == "__main__":
    turns.measure(join)
