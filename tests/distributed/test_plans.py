"""Settings that change between steps, between real workers."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests.compressors.lockstep import Lockstep
from tests.workers import results, run_workers
from tf_gradcomp import compressors
from tf_gradcomp.policy import GradientSpec

# Methods whose settings change between steps that are traced once, between real workers.
PROGRAM = '''
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
        {
            text: reduced_by_step(compressors.get(text), shapes, settings)
            for text, settings in plans.items()
        }
    )
'''
SHAPES = [(60, 80), (50,), (33,)]
CHUNKS = [[40, 25, 25], [7, 3, 5], [1, 1, 1], [400, 2, 2], [40, 25, 24]]
PLANS = {
    "power_sgd(rank=6)": [[4, 0, 0], [2, 0, 0], [0, 0, 0], [6, 0, 0], [5, 0, 0]],
    "scalecom": CHUNKS,
    "scalecom(value_bits=8)": CHUNKS,
    "scalecom(value_bits=16)": CHUNKS,
    "random_k": CHUNKS,
    "adacomp": [[50, 7, 0], [500, 0, 3], [0, 0, 0], [1, 64, 63], [50, 7, 0]],
    "qsgd": [[4, 0, 0], [8, 2, 3], [0, 0, 0], [2, 5, 0], [4, 0, 0]],
    "top_k": [[40, 5, 0], [1, 0, 3], [0, 0, 0], [4800, 9, 9], [40, 5, 0]],
}


@pytest.fixture(scope="module")
def workers():
    return results(run_workers(PROGRAM, 2, [json.dumps([SHAPES, PLANS])]))


@pytest.mark.parametrize("text", PLANS)
def test_workers_that_change_plans_reduce_as_replicas_in_one_process_do(workers, text):
    kinds = ["dense", "vector", "vector"]
    specs = [
        GradientSpec(f"layer_{i}", shape, "float32", kind)
        for i, (shape, kind) in enumerate(zip(SHAPES, kinds, strict=True))
    ]
    settings = tf.Variable(PLANS[text][0], dtype=tf.int64)
    lockstep = Lockstep(compressors.get(text), specs, 2, settings=settings)
    generators = [np.random.default_rng(rank) for rank in range(2)]
    first, second = (worker[text] for worker in workers)
    assert first == second
    assert first["traces"] == 1
    for plan, reduced in zip(PLANS[text], first["reduced"], strict=True):
        settings.assign(plan)
        outcome = lockstep.step(
            [[g.normal(size=shape).astype(np.float32) for shape in SHAPES] for g in generators]
        )
        for actual, expected in zip(reduced, outcome.reduced[0], strict=True):
            np.testing.assert_array_equal(np.float32(actual), expected)
