"""Random training programs: what they compute is what they should."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.net import checks, strategies
from tests.net.program import Program, read

COUNT = os.environ.get("GRADCOMP_PROGRAMS")  # so many new ones of each kind
PROGRAM = os.environ.get("GRADCOMP_PROGRAM")  # only this one


def programs(random: st.SearchStrategy[Program], examples: int) -> Any:
    """Runs a test on random programs, the same ones each time unless the environment says so."""
    rules = settings(
        max_examples=int(COUNT or examples),
        derandomize=not COUNT,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    return lambda test: rules(given(st.just(read(PROGRAM)) if PROGRAM else random)(test))


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    level = tf.get_logger().level
    tf.get_logger().setLevel("ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    tf.get_logger().setLevel(level)


@programs(strategies.dense_programs(), 80)
def test_whole_gradients_train_as_the_inner_optimizer(program):
    checks.trains_as_the_inner_optimizer(program)


@programs(strategies.dense_programs(accumulating=True), 20)
def test_whole_gradients_accumulate_as_in_the_inner_optimizer(program):
    checks.trains_as_the_inner_optimizer(program)


@programs(strategies.container_programs(), 10)
def test_whole_gradients_train_as_several_inner_optimizers(program):
    checks.trains_as_the_inner_optimizer(program)


@programs(strategies.lossless_programs(), 80)
def test_nothing_is_lost(program):
    checks.loses_nothing(program)


@programs(strategies.lossless_programs(static=True), 15)
def test_nothing_is_lost_behind_a_static_loss_scale(program):
    checks.loses_nothing(program)


@programs(strategies.lossless_programs(strategies.CASTS), 10)
def test_casts_lose_what_rounding_takes_off(program):
    checks.loses_nothing(program, rounding=2e-2)


@programs(strategies.scaled_programs(), 30)
def test_loss_scales_change_no_bit(program):
    checks.is_blind_to_loss_scales(program)


@programs(strategies.paced_programs(), 10)
def test_adam_keeps_its_pace_when_it_resumes(program):
    checks.keeps_its_pace(program)
