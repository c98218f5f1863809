"""Properties of every program; each check runs it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.bounds import rounding
from tests.net.plain import Plain, bad_of, keeps_gradients, means
from tests.net.product import Running, jobs_of
from tests.net.program import Program, Step

# Optimizers round less than 20 times in an update, and a program has at most 8 updates.
NEAR = rounding(1, terms=20, steps=8)
# A gradient is averaged, added to a residual and a weight, and summed over 3 replicas, less than 8
# times in all, in up to 12 updates.
EXACT = rounding(1, terms=8, steps=12)


def trains_as_the_inner_optimizer(program: Program) -> None:
    """Methods that send everything train as the inner optimizer alone, on the sums of gradients."""
    plain = Plain(program)
    for running, before in jobs_of(program):
        lost = _lost(running, before)
        if any(left.any() for left in lost):
            plain.kept.clear()
        for steps in program.rounds(running.job):
            keeps = _take(running, steps)
            plain.update(running.job, steps, keeps)
            _assert_near(running.weights(), [v.numpy() for v in plain.variables], "weights")
        _assert_said(running, lost)
        slots = plain.optimizer.variables
        names = [variable.path for variable in slots]
        running_slots = [variable.numpy() for variable in running.slots()]
        _assert_near(running_slots, [variable.numpy() for variable in slots], names)
    running.compressed.finalize_variable_values(running.variables)
    plain.optimizer.finalize_variable_values(plain.variables)
    _assert_near(running.weights(), [v.numpy() for v in plain.variables], "averages")


def loses_nothing(program: Program, rounded: float = EXACT) -> None:
    """Checks with SGD at rate 1 that applied gradients plus residuals equal all gradients.

    This also holds for jobs that resume from each other, unless the log has reported a loss.
    """
    given = [np.zeros(shape) for shape in program.shapes]
    largest = 1.0
    start = None
    for running, before in jobs_of(program):
        start = running.weights() if start is None else start
        lost = _lost(running, before)
        for steps in [(), *program.rounds(running.job)]:
            keeps = _take(running, steps) if steps else False
            bad = bad_of(steps)
            replicas = set(range(running.job.replicas))
            without = bad if keeps or not bad else replicas
            for variable, mean in means(program, running.job, steps, without).items():
                given[variable] += mean
                largest += np.abs(mean).max()
            parts = zip(start, running.weights(), running.left(), given, lost, strict=True)
            for index, (first, now, left, total, gone) in enumerate(parts):
                np.testing.assert_allclose(
                    np.float64(first) - now + left,
                    total - gone,
                    rtol=0,
                    atol=rounded * largest,
                    err_msg=f"variable {index}, job {running.job}, after {steps}",
                )
            if steps and not bad and not keeps_gradients(running.job, _exchanges(running)):
                left = running.left()
                stuck = [v for v in means(program, running.job, steps) if left[v].any()]
                assert not stuck, f"never applied, of variables {stuck}, after {steps}"
        if not all(map(bad_of, program.rounds(running.job))):
            _assert_said(running, lost)
        given = [total - gone for total, gone in zip(given, lost, strict=True)]


def is_blind_to_loss_scales(program: Program) -> None:
    """A loss scale that is a power of two changes no bit."""
    bare = program.without("loss_scale_factor", scaler=None)
    for (running, _), (other, _) in zip(jobs_of(program), jobs_of(bare), strict=True):
        for steps in program.rounds(running.job):
            _take(running, steps)
            _take(other, steps)
            for value, wanted in zip(running.weights(), other.weights(), strict=True):
                np.testing.assert_array_equal(value, wanted, f"after {steps}")


def keeps_its_pace(program: Program) -> None:
    """The steps of the second of two jobs are about as long as if it had not been interrupted.

    That is, the longest one is neither more than 1.5 times the longest of a job with either's
    settings, nor less than a third of it.
    """
    first, second = program.jobs
    before, throughout = Running(program, first), Running(program, second)
    for running in (before, throughout):
        _lengths(running, program.rounds(first))
    resumed = Running(program, second)
    resumed.resume(before)
    found = _lengths(resumed, program.rounds(second))
    wanted = [max(_lengths(running, program.rounds(second))) for running in (before, throughout)]
    assert max(found) <= 1.5 * max(wanted), f"steps of {found}, instead of {wanted} at most"
    assert max(found) >= min(wanted) / 3, f"steps of {found}, instead of {wanted} at most"


def _take(running: Running, steps: Sequence[Step]) -> bool:
    """Takes the steps of an update; returns whether replicas keep skipped gradients."""
    keeps = keeps_gradients(running.job, _exchanges(running))
    for step in steps:
        running.step(step)
    assert not running.unequal(), f"replicas differ in {running.unequal()} after {steps}"
    return keeps


def _exchanges(running: Running) -> int:
    return int(running.compressed.exchange.step.numpy())


def _lost(running: Running, before: Running | None) -> list[np.ndarray]:
    """Returns the residuals that are lost with the job before, for want of a place."""
    if before is None or running.keeps_residuals():
        return [np.zeros(shape) for shape in running.program.shapes]
    return before.left()


def _assert_said(running: Running, lost: Sequence[np.ndarray]) -> None:
    """Checks that the log has reported losses, at the latest in the first step that is not
    skipped."""
    if any(left.any() for left in lost):
        assert any("residual" in text for text in running.said), f"lost in silence: {lost}"


def _lengths(running: Running, rounds: Sequence[Sequence[Step]]) -> list[float]:
    """Takes steps; returns the largest change of a weight in each round."""
    lengths = []
    for steps in rounds:
        start = running.weights()
        for step in steps:
            running.step(step)
        changes = zip(running.weights(), start, strict=True)
        lengths.append(max(float(np.abs(now - then).max()) for now, then in changes))
    assert not running.unequal(), f"replicas differ in {running.unequal()}"
    return lengths


def _assert_near(
    values: Sequence[np.ndarray], wanted: Sequence[np.ndarray], names: str | Sequence[str]
) -> None:
    for index, (value, other) in enumerate(zip(values, wanted, strict=True)):
        assert np.isfinite(other).all()
        name = f"{names} {index}" if isinstance(names, str) else names[index]
        np.testing.assert_allclose(value, other, rtol=NEAR, atol=NEAR, err_msg=name)
