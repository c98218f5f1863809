"""Tests the results of random training programs."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.bounds import rounding
from tests.net import checks, strategies
from tests.net.program import CHECKPOINT, Job, Program, Step, read

COUNT = os.environ.get("GRADCOMP_PROGRAMS")  # so many new ones of each kind
PROGRAM = os.environ.get("GRADCOMP_PROGRAM")  # only this one


def programs(random: st.SearchStrategy[Program], count: int, *always: Program) -> Any:
    """Runs a test on random programs, which are equal each time unless the environment changes
    their number."""
    rules = settings(
        max_examples=int(COUNT or count),
        derandomize=not COUNT,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )

    def on_programs(test: Any) -> Any:
        if PROGRAM:
            return rules(given(st.just(read(PROGRAM)))(test))
        for program in always:
            test = example(program)(test)
        return rules(given(random)(test))

    return on_programs


def by_sgd(*jobs: Job, **settings: Any) -> Program:
    """Returns a program of two variables."""
    return Program(((3,), (7,)), "SGD", {"learning_rate": 1.0, **settings}, jobs)


def by_adam(before: Job, after: Job) -> Program:
    return Program(((3, 4), (9,)), "Adam", {"learning_rate": 0.01}, (before, after))


BOTH, FIRST = (0, 1), (0,)
TOP_K = "top_k(density=0.2)"
BEFORE, AFTER = (Step(0, BOTH, times=40),), (Step(1000, BOTH, times=10),)


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    level = tf.get_logger().level
    tf.get_logger().setLevel("ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    tf.get_logger().setLevel(level)


@programs(strategies.dense_programs(), 16)
def test_whole_gradients_train_as_the_inner_optimizer(program):
    checks.trains_as_the_inner_optimizer(program)


@programs(
    strategies.dense_programs(accumulating=True),
    8,
    by_sgd(
        Job(2, "no_compression", (Step(0, BOTH, times=6),)),
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_momentum=0.5,
    ),
    by_sgd(
        Job(2, "no_compression", (Step(0, BOTH, (0,)), Step(1, BOTH), Step(2, BOTH, times=2))),
        gradient_accumulation_steps=2,
    ),
    Program(
        ((3,), (7, 3)),
        "SGD",
        {"learning_rate": 0.5, "gradient_accumulation_steps": 3},
        (
            Job(2, "adacomp(bin_sizes=None)", (*(Step(0, BOTH),) * 2, Step(0, BOTH, (0,)))),
            Job(1, "adacomp(bin_sizes=None)", (Step(0, BOTH),) * 3),
        ),
        tables=(1,),
        max_dense_elements=10,
    ),
)
def test_whole_gradients_accumulate_as_in_the_inner_optimizer(program):
    checks.trains_as_the_inner_optimizer(program)


@programs(strategies.lossless_programs(), 12)
def test_nothing_is_lost(program):
    checks.loses_nothing(program)


@programs(
    strategies.lossless_programs(most_jobs=3),
    16,
    by_sgd(
        Job(2, TOP_K, (Step(0, BOTH),)),
        Job(1, TOP_K, (Step(1, FIRST), Step(2, BOTH))),
    ),
    by_sgd(
        Job(2, TOP_K, (Step(0, BOTH),)),
        Job(2, "no_compression", (Step(1, BOTH),), resumes=CHECKPOINT),
    ),
    by_sgd(
        Job(2, TOP_K, (Step(0, BOTH),)),
        Job(2, "no_compression", (Step(1, FIRST), Step(2, BOTH, (1,)), Step(3, BOTH)), rival=TOP_K),
        Job(1, TOP_K, (Step(4, FIRST),), rival="no_compression"),
    ),
    by_sgd(
        Job(2, "scalecom(rates=3, beta=0.25)", (Step(0, BOTH),)),
        Job(2, TOP_K, (Step(1, BOTH),)),
    ),
    by_sgd(
        Job(2, TOP_K, (Step(0, BOTH),)),
        Job(2, "scalecom(rates=3, beta=0.25)", (Step(1, BOTH),)),
    ),
)
def test_nothing_is_lost_between_jobs(program):
    checks.loses_nothing(program)


@programs(strategies.lossless_programs(static=True, most_jobs=2), 8)
def test_nothing_is_lost_behind_a_static_loss_scale(program):
    checks.loses_nothing(program)


@programs(strategies.lossless_programs(strategies.CASTS, most_jobs=2), 6)
def test_casts_lose_what_rounding_takes_off(program):
    # Two replicas' gradients and their sum are rounded, to 8 bits at least.
    checks.loses_nothing(program, rounded=rounding(1, terms=3, dtype="bfloat16"))


@programs(
    strategies.scaled_programs(),
    8,
    Program(
        ((3,),),
        "Adam",
        {"learning_rate": 0.5, "loss_scale_factor": 16.0},
        (Job(2, TOP_K, (Step(0, FIRST),), precondition="auto"),),
    ),
    Program(
        ((3,),),
        "Adam",
        {"learning_rate": 0.5, "loss_scale_factor": 16.0, "clipnorm": 0.5},
        (Job(2, TOP_K, (Step(0, FIRST), Step(1, FIRST)), precondition="auto"),),
    ),
    Program(
        ((2, 3, 4),),
        "Lamb",
        {"learning_rate": 0.5},
        (Job(2, TOP_K, (Step(0, FIRST),), precondition="auto"),),
        scaler="around",
    ),
)
def test_loss_scales_change_no_bit(program):
    checks.is_blind_to_loss_scales(program)


@programs(
    strategies.paced_programs(),
    2,
    by_adam(
        Job(2, TOP_K, BEFORE, graph=True), Job(1, TOP_K, AFTER, precondition="auto", graph=True)
    ),
    by_adam(
        Job(2, TOP_K, BEFORE, precondition="auto", graph=True),
        Job(2, TOP_K, AFTER, graph=True, resumes=CHECKPOINT),
    ),
)
def test_adam_keeps_its_pace_when_it_resumes(program):
    """Two replicas switch in tests/optimizer/test_switching_second_moments.py as well."""
    checks.keeps_its_pace(program)
