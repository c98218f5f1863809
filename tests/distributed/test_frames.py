"""The path of a gradient is short: few frames and files to the encoder and to a collective."""

import sys
import threading
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.ranks import report
from tests.workers import result, run_workers
from tf_gradcomp.adam.handover import HandOver
from tf_gradcomp.private import tensorflow as tf_private

PROGRAM = Path(__file__)  # each worker runs this file
LIBRARY = str(Path(gc.__file__).parent)
OLDER = [
    ("strategy/strategy.py", "run"),
    ("keras/common/fit.py", "fit"),
    ("keras/common/fit.py", "filtered"),
]
ENCODERS = ("AdaCompEncode", "PowerSgdLeft")
FIRST = ("apply_gradients", "reduce_gradients")


def stacks():
    """Yields the library's frames of each thread that traces the step, outermost first."""
    for thread, frame in sys._current_frames().items():
        frames = [
            (Path(one.filename).relative_to(LIBRARY).as_posix(), one.name)
            for one in traceback.extract_stack(frame)
            if one.filename.startswith(LIBRARY)
        ]
        if frames and frames[0] != ("groups/stalls.py", "_watch"):
            yield thread != threading.get_ident(), frames


def noting(graph, op_type, *args, **kwargs):
    if method and op_type.startswith(("Collective", *ENCODERS)):
        frames = [frame for _, one in sorted(stacks(), reverse=True) for frame in one]
        frames = [frame for frame in frames if frame not in OLDER]
        names = [name for _, name in frames]
        first = next((name for name in FIRST if name in names), None)
        if first:  # metrics are averaged elsewhere
            noted.setdefault(method, []).append(frames[names.index(first) :])
    return create(graph, op_type, *args, **kwargs)


def handing_over(hand_over, place, wanted):
    noted["handed over"] += 1
    return to_replicas(hand_over, place, wanted)


def nodes_of_a_step(optimizer, count):
    """Returns the number of nodes in the graph of a step that trains `count` variables."""
    with strategy.scope():
        variables = [keras.Variable(np.zeros((8, 4), "float32")) for _ in range(count)]
        optimizer.build(variables)
    apply = lambda: optimizer.apply([tf.ones((8, 4))] * count, variables)  # noqa: E731
    step = tf.function(lambda: strategy.run(apply), autograph=False)
    definition = step.get_concrete_function().graph.as_graph_def()
    return len(definition.node) + sum(len(one.node_def) for one in definition.library.function)


def nodes_of_a_variable(make):
    counts = []
    for count in (2, 4):
        with strategy.scope():
            optimizer = make()
        counts.append(nodes_of_a_step(optimizer, count))
    return (counts[1] - counts[0]) / 2


# Frames and files.
MOST = {
    "adacomp": (8, 6),
    "power_sgd(rank=1)": (8, 6),
    "adacomp on the strategy": (8, 7),
    "reduce_gradients": (8, 6),
}


def path(frames):
    return "\n".join(f"{file}: {name}" for file, name in frames)


@pytest.fixture(scope="module")
def found():
    return result(run_workers(PROGRAM, 2)[0])


@pytest.mark.parametrize("method", MOST)
def test_the_path_of_a_gradient_has_few_frames(found, method):
    longest = max(found[method], key=len)
    frames, files = MOST[method]
    assert len(longest) <= frames, path(longest)
    assert len({file for file, _ in longest}) <= files, path(longest)


@pytest.mark.parametrize("method", ["adacomp", "top_k"])
def test_a_variable_adds_no_more_nodes_to_a_step_than_without_compression(found, method):
    assert found["nodes"][method] <= found["nodes"]["dense"]


def test_a_new_job_hands_no_second_moments_over(found):
    assert found["handed over"] == 0


if __name__ == "__main__":
    method, noted = None, {"handed over": 0}
    create, tf.Graph._create_op_internal = tf.Graph._create_op_internal, noting
    to_replicas, HandOver.to_replicas = HandOver.to_replicas, handing_over
    strategy = gc.MultiWorkerMirroredStrategy()
    x, y = np.ones([16, 4], "float32"), np.ones([16, 1], "float32")
    for method in ("adacomp", "power_sgd(rank=1)"):
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)]
            )
            optimizer = gc.CompressedOptimizer(keras.optimizers.Adam(0.1), compressor=method)
            model.compile(optimizer, loss="mse")
        model.fit(x, y, batch_size=8, verbose=0)
    tf_private.install(strategy, gc.CompressedAllReduce("adacomp"))
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.1), loss="mse")
    method = "adacomp on the strategy"
    model.fit(x, y, batch_size=8, verbose=0)
    method = "reduce_gradients"

    @tf.function
    def reduce_in_loop():
        variables = model.trainable_variables
        ones = [tf.ones(variable.shape) for variable in variables]
        ops = strategy.extended._cross_device_ops
        strategy.run(lambda: ops.reduce_gradients(ones, variables), ())

    reduce_in_loop()
    method = None
    strategy.extended._cross_device_ops = strategy.extended._cross_device_ops.forward_to
    noted["nodes"] = {
        name: nodes_of_a_variable(make)
        for name, make in {
            "dense": keras.optimizers.Adam,
            "adacomp": lambda: gc.CompressedOptimizer(keras.optimizers.Adam(), "adacomp"),
            "top_k": lambda: gc.CompressedOptimizer(keras.optimizers.Adam(), "top_k"),
        }.items()
    }
    report(noted)
