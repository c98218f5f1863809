"""The contenders of Horovod, over gloo."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import horovod.tensorflow as hvd
import keras
import models
import tensorflow as tf
import turns
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
from models import Gradients, Reduction
from placed import connected

import tf_gradcomp as gc
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.setup import Candidate, Method
from tf_gradcomp.groups.communicator import dense_ring_bytes

PLAIN = {
    turns.HOROVOD_ALL_REDUCE: hvd.Compression.none,
    turns.HOROVOD_FLOAT16: hvd.Compression.fp16,
}
COMPRESSORS = {turns.HOROVOD_ADACOMP: "adacomp"}
_ELEMENT_BYTES = {turns.HOROVOD_ALL_REDUCE: 4, turns.HOROVOD_FLOAT16: 2}


def join(plan: turns.Plan) -> turns.Job:
    """Connects this rank to the other ranks."""
    initialize(json.loads(os.environ.pop("TF_CONFIG")), plan.network.interface)
    exchange = plan.job == turns.EXCHANGE
    contender = Exchanges().contender if exchange else functools.partial(training, plan.job)
    return turns.Job(hvd.rank(), mean_over_ranks(), contender, leave=hvd.shutdown)


def initialize(tf_config: dict, interface: str) -> None:
    """Initializes Horovod, with a rendezvous server at the first rank's address.

    `horovodrun` would run the server on this machine's network, which workers in namespaces cannot
    reach.
    """
    rank, addresses = tf_config["task"]["index"], tf_config["cluster"]["worker"]
    hosts = [address.rpartition(":")[0] for address in addresses]
    counted = ",".join(f"{host}:{slots}" for host, slots in Counter(hosts).items())
    slots = get_host_assignments(parse_hosts(counted), len(hosts))
    port = int(addresses[0].rpartition(":")[2])
    if rank == 0:
        server = RendezvousHTTPServer((hosts[0], port), RendezvousHandler, 0)
        server.init(slots)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    else:
        connected(hosts[0], port).close()  # Horovod does not wait for the server
    job_env = create_run_env_vars(hosts[0], [interface], port)
    rank_env = create_slot_env_vars(slots[rank])
    os.environ.update({name: str(value) for name, value in {**job_env, **rank_env}.items()})
    hvd.init()


def mean_over_ranks() -> Callable[[float], float]:
    """Returns a function that averages a number over all ranks, once all ranks call it."""
    on_all = tf.function(lambda value: hvd.allreduce(value, op=hvd.Average), autograph=False)
    return lambda value: float(on_all(tf.constant(value, tf.float64)))


class Exchanges:
    """Contenders that only exchange the gradient of a ResNet-50."""

    def __init__(self) -> None:
        model = keras.applications.ResNet50(weights=None)
        self._variables = model.trainable_variables
        self._policy = gc.Policy.from_model(model)
        self._gradients = Gradients(self._variables, hvd.rank())

    def contender(self, name: str) -> turns.Contender:
        """Makes the contender of a name."""
        exchange = None if name in PLAIN else self._exchange(COMPRESSORS[name])
        reduce = self._reduction(name, exchange)
        values = self._gradients.values
        step = tf.function(lambda: reduce([v.read_value() for v in values]), autograph=False)
        return _contender(name, step, self._gradients.draw, exchange, self._variables)

    def _exchange(self, compressor: str) -> GradientExchange:
        candidates = [Candidate(gc.compressors.get(compressor))]
        method = Method(compressor, candidates)
        exchange = GradientExchange(method, self._policy, gc.HorovodGroup)
        exchange.build(self._variables)
        return exchange

    def _reduction(self, name: str, exchange: GradientExchange | None) -> Reduction:
        if exchange is not None:
            return lambda gradients: exchange.reduce(gradients, self._variables)[0]
        return lambda gradients: [
            hvd.allreduce(gradient, op=hvd.Sum, compression=PLAIN[name]) for gradient in gradients
        ]


def training(job: str, name: str) -> turns.Contender:
    """Makes a contender that trains the model of a job."""
    batches = models.batches(job, hvd.rank())
    model = models.build(job)
    variables = model.trainable_variables
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(turns.LEARNING_RATE, turns.MOMENTUM)
    exchange = None
    if name in COMPRESSORS:
        policy = gc.Policy.from_model(model)
        optimizer = gc.CompressedOptimizer(optimizer, COMPRESSORS[name], policy, group="horovod")
        exchange = optimizer.exchange
    optimizer.build(variables)

    @tf.function(autograph=False)
    def train(inputs: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = loss(labels, model(inputs, training=True))
        if name in PLAIN:
            tape = hvd.DistributedGradientTape(tape, compression=PLAIN[name])
        # Horovod's tape needs TensorFlow variables.
        gradients = tape.gradient(value, [variable.value for variable in variables])
        optimizer.apply(gradients, variables)

    return _contender(name, lambda: train(*next(batches)), None, exchange, variables)


def _contender(
    name: str,
    step: Callable[[], object],
    prepare: Callable[[], object] | None,
    exchange: GradientExchange | None,
    variables: Sequence[keras.Variable],
) -> turns.Contender:
    if exchange is None:
        elements = sum(variable.value.shape.num_elements() for variable in variables)
        sent = dense_ring_bytes(hvd.size(), _ELEMENT_BYTES[name] * elements)
        counted = not models.has_embedding(variables)
        return turns.Contender(step, prepare, step_bytes=sent if counted else None)
    return turns.Contender(
        step,
        prepare,
        sent_bytes=lambda: exchange.traffic().sent_bytes,
        keeps_residual=exchange.setup.residual_scale is not None,
    )


if __name__ == "__main__":
    turns.measure(join)
