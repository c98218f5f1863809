"""Random training programs: what they compute is what they should."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, note, settings

from tests.net import checks, strategies

EXAMPLES = int(os.environ.get("GRADCOMP_PROGRAMS", "0"))


def programs(strategy: Any, examples: int) -> Any:
    """Runs a test on random programs: always the same, or as many others as one asks for."""
    rules = settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    return lambda test: rules(given(strategy)(test))


@pytest.fixture(autouse=True, scope="module")
def _without_warnings():
    level = tf.get_logger().level
    tf.get_logger().setLevel("ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    tf.get_logger().setLevel(level)


@programs(strategies.dense_programs(), 80)
def test_whole_gradients_train_as_the_inner_optimizer(program):
    note(repr(program))
    checks.trains_as_the_inner_optimizer(program)


@programs(strategies.container_programs(), 10)
def test_whole_gradients_train_as_several_inner_optimizers(program):
    note(repr(program))
    checks.trains_as_the_inner_optimizer(program)


@programs(strategies.lossless_programs(), 100)
def test_nothing_is_lost(program):
    note(repr(program))
    checks.loses_nothing(program)


@programs(strategies.lossless_programs(static=True), 20)
def test_nothing_is_lost_behind_a_static_loss_scale(program):
    note(repr(program))
    checks.loses_nothing(program)


@programs(strategies.lossless_programs(strategies.CASTS), 10)
def test_casts_lose_what_rounding_takes_off(program):
    note(repr(program))
    checks.loses_nothing(program, rounding=2e-2)


@programs(strategies.scaled_programs(), 30)
def test_loss_scales_change_no_bit(program):
    note(repr(program))
    checks.is_blind_to_loss_scales(program)


@programs(strategies.paced_programs(), 12)
def test_adam_keeps_its_pace_when_it_resumes(program):
    note(repr(program))
    checks.keeps_its_pace(program, strategies.WATCHED)
