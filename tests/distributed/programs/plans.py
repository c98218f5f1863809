"""Methods whose settings change between steps that are traced once, between real workers."""

import json

import numpy as np
import tensorflow as tf

from tests.ranks import RANK, SIZE, argument, report
from tf_gradcomp import compressors
from tf_gradcomp.compressors import StepInputs
from tf_gradcomp.compressors.base import start
from tf_gradcomp.exchange.state import handles, new_state
from tf_gradcomp.groups.communicator import RequestStream, communicate
from tf_gradcomp.groups.current import current_group
from tf_gradcomp.policy import GradientSpec

strategy = tf.distribute.MultiWorkerMirroredStrategy()


def reduced_by_step(compressor, shapes, plans):
    """Returns the reduced gradients of a step with each plan, and the number of traces."""
    kinds = ["dense", "vector", "vector"]
    specs = [
        GradientSpec(f"layer_{i}", tuple(shape), "float32", kind)
        for i, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))
    ]
    state = new_state(compressor, specs)
    settings = tf.Variable(plans[0], dtype=tf.int64)
    generator = np.random.default_rng(RANK)

    def exchange(gradients, index):
        communicator = current_group().communicator()
        inputs = StepInputs(
            specs, gradients, handles(state), index, tf.constant(True), RANK, SIZE,
            settings=settings.read_value(),
        )  # fmt: skip
        results, _ = communicate([RequestStream(start(compressor, inputs))], [communicator])
        return results[0].gradients

    @tf.function(autograph=False)
    def step(gradients, index):
        return strategy.run(exchange, (gradients, index))

    sums = []
    for index, plan in enumerate(plans):
        settings.assign(plan)
        gradients = [tf.constant(generator.normal(size=shape), tf.float32) for shape in shapes]
        reduced = step(gradients, tf.constant(index, tf.int64))
        sums.append([tensor.numpy().tolist() for tensor in reduced])
    return {"reduced": sums, "traces": step.experimental_get_tracing_count()}


shapes, plans = json.loads(argument())
report(
    {text: reduced_by_step(compressors.get(text), shapes, of_one) for text, of_one in plans.items()}
)
