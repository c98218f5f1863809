"""A few programs of each kind, by real workers."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import tensorflow as tf

from tests.net import checks, product
from tests.net.program import Job, Program, Step
from tests.ranks import report
from tests.workers import results, run_workers

SHAPES = ((3, 2), (7,))
BOTH, FIRST = (0, 1), (0,)
PROGRAMS = {
    "clipped, averaged, decayed, some without a gradient": (
        "trains_as_the_inner_optimizer",
        Program(
            SHAPES,
            "AdamW",
            {
                "learning_rate": 0.125,
                "weight_decay": 0.25,
                "global_clipnorm": 1.0,
                "use_ema": True,
                "ema_momentum": 0.5,
                "ema_overwrite_frequency": 2,
            },
            (
                Job(
                    2,
                    "top_k(density=1.0)",
                    (Step(0, BOTH), Step(1, FIRST), Step(2, BOTH, (1,)), Step(3, BOTH)),
                ),
            ),
        ),
    ),
    "a table, accumulated": (
        "trains_as_the_inner_optimizer",
        Program(
            ((3,), (7, 3)),
            "Nadam",
            {"learning_rate": 0.125, "gradient_accumulation_steps": 2},
            (Job(2, "no_compression", tuple(Step(i, BOTH) for i in range(4)), graph=True),),
            tables=(1,),
        ),
    ),
    "resumed, scaled, skipped": (
        "loses_nothing",
        Program(
            SHAPES,
            "SGD",
            {"learning_rate": 1.0},
            (
                Job(2, "qsgd(bits=2, bucket_size=32)", (Step(0, BOTH), Step(1, BOTH, (0,)))),
                Job(
                    2,
                    "top_k(density=0.2, warmup_steps=3)",
                    (Step(2, FIRST), Step(3, BOTH, (0, 1)), Step(4, BOTH), Step(5, BOTH, (1,))),
                    graph=True,
                    resumes="weights",
                ),
            ),
            scaler="around",
        ),
    ),
    "divided by second moments, scaled": (
        "is_blind_to_loss_scales",
        Program(
            SHAPES,
            "Adam",
            {"learning_rate": 0.125, "clipnorm": 0.5},
            (
                Job(
                    2,
                    "adacomp(bin_sizes=3)",
                    (Step(0, BOTH), Step(1, FIRST), Step(2, BOTH, (0,)), Step(3, BOTH)),
                    precondition="auto",
                    graph=True,
                ),
            ),
            scaler="inside",
        ),
    ),
}


@pytest.fixture(scope="module")
def wrong() -> list[dict[str, str]]:
    return results(run_workers(Path(__file__), 2))


@pytest.mark.parametrize("program", PROGRAMS)
def test_workers_train_as_they_should(wrong, program):
    assert [worker[program] for worker in wrong] == ["", ""]


OF_DIFFERENT_VARIABLES = """
    import keras
    import tensorflow as tf
    import tf_gradcomp as gc

    strategy = gc.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [keras.Variable(tf.zeros(6), name=name) for name in ("left", "right")]
        optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0), COMPRESSOR)
        optimizer.build(variables)
    mine = variables[strategy.cluster_resolver.task_id]

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.ones(6)], [mine]))

    step()
    print("trained", [variable.numpy() for variable in variables])
"""


@pytest.mark.parametrize("compressor", ["no_compression", "adacomp", "scalecom"])
def test_workers_with_gradients_for_different_variables_end_with_an_error(compressor):
    program = OF_DIFFERENT_VARIABLES.replace("COMPRESSOR", repr(compressor))
    for worker in run_workers(program, 2, check=False):
        assert worker.returncode != 0, worker.stdout
        for name in ("left", "right"):
            assert name in worker.stderr


LATER = """
    import keras
    import tensorflow as tf
    import tf_gradcomp as gc
    from tf_gradcomp.groups import agreement

    agreement.LATER_LIST_SECONDS = 15.0
    strategy = gc.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [keras.Variable(tf.zeros(6), name=name) for name in ("left", "right")]
        optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(1.0), "no_compression")
        optimizer.build(variables)

    @tf.function
    def step(count):
        mine = variables[:count]
        strategy.run(lambda: optimizer.apply([tf.ones(6)] * count, mine))

    step(2)
    step(1 + strategy.cluster_resolver.task_id)
    print("trained", [variable.numpy() for variable in variables])
"""


def test_a_worker_that_alone_trains_other_variables_later_ends_the_job():
    first, second = run_workers(LATER, 2, check=False)
    assert first.returncode != 0
    assert second.returncode != 0
    assert "waited 15.0 seconds for the other workers" in first.stderr
    assert "gradient of 'left'" in first.stderr


def fault(check: str, program: Program) -> str:
    """Returns what a worker finds wrong; empty if nothing."""
    try:
        getattr(checks, check)(program)
    except AssertionError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    tf.get_logger().setLevel("ERROR")
    warnings.simplefilter("ignore")
    product.workers()  # TensorFlow wants to know of its cluster before anything runs
    # If workers differed in their faults, they would wait for each other until the deadline.
    report({name: fault(*program) for name, program in PROGRAMS.items()})
