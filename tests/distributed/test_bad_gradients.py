"""A gradient that is not finite on one worker: all workers skip its step, and nothing is lost."""

from pathlib import Path

import keras
import numpy as np
import pytest

from tests.distributed.common import (
    Setup,
    dense_model,
    digits,
    local_residuals,
    residual_sums,
    scalar,
    state_digest,
)
from tests.ranks import RANK, SIZE, argument, exchange_of, inner_of, report
from tests.workers import result, run_workers

PROGRAM = Path(__file__)  # each worker runs this file
BATCH, STEPS, BAD_STEP = 32, 6, 2


def data():
    """With a NaN among the rows that worker 1 has in step `BAD_STEP`."""
    x, y = digits(BATCH * STEPS)
    x[BATCH * BAD_STEP + BATCH // SIZE] = np.nan
    return x, y


class Watch(keras.callbacks.Callback):
    """The state after each step."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        exchange = exchange_of(self.model)
        self.steps.append(
            {
                **state_digest(self.model),
                "finite": all(
                    np.all(np.isfinite(variable)) for variable in self.model.trainable_variables
                ),
                "skipped": scalar(exchange.skipped_steps),
                "iterations": scalar(inner_of(optimizer).iterations),
                "steps": scalar(inner_of(optimizer)._iterations),
                "scale": scale_of(optimizer),
                "residuals": local_residuals(exchange),
                "residual sums": residual_sums(exchange),
            }
        )


def scale_of(optimizer):
    for candidate in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if isinstance(candidate, keras.optimizers.LossScaleOptimizer):
            return scalar(candidate.dynamic_scale)
    return None


def train(optimizer, policy="float32"):
    x, y = data()
    model = setup.model(dense_model, optimizer, policy=policy)
    watch = Watch()
    model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, shuffle=False, callbacks=[watch])
    return watch.steps


def adam(**kwargs):
    return keras.optimizers.Adam(1e-2, **kwargs)


def scaler(inner):
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10)


BAD_STEP = 2
SETTINGS = {
    "optimizer": [
        "plain",
        "mixed_float16",
        "loss scaler around",
        "loss scaler inside",
        "accumulation",
    ],
    "strategy": ["plain", "mixed_float16"],
}
CASES = [(way, setting) for way, settings in SETTINGS.items() for setting in settings]
SCALED = [case for case in CASES if case[1] not in ("plain", "accumulation")]
# The gradient of worker 1 is bad, and worker 0's gradient goes into the exchange.
KEPT = [case for case in CASES if case != ("strategy", "mixed_float16")]


@pytest.fixture(scope="module")
def steps_of():
    """Returns the state after each step, by way and setting, on each worker."""
    seen = {}
    for way in SETTINGS:
        for worker in run_workers(PROGRAM, 2, [way]):
            for setting in SETTINGS[way]:
                seen.setdefault((way, setting), []).append(result(worker)[setting])
    return seen


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_all_skip_a_step_whose_gradient_is_bad_on_one(steps_of, case):
    before, after = around_the_bad_step(case)
    for worker in steps_of[case]:
        if case != ("strategy", "plain"):  # there, the optimizer is given zeros
            assert worker[after]["weights"] == worker[before]["weights"]
        counted = case == ("strategy", "plain")
        assert worker[after]["iterations"] == worker[before]["iterations"] + counted
        assert worker[-1]["weights"] != worker[after]["weights"]
        assert worker[-1]["iterations"] > worker[after]["iterations"]


@pytest.mark.parametrize("case", KEPT, ids=" ".join)
def test_skipped_steps_are_counted(steps_of, case):
    before, after = around_the_bad_step(case)
    for worker in steps_of[case]:
        assert worker[before]["skipped"] == 0
        assert [step["skipped"] for step in worker[after:]] == [1] * len(worker[after:])


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_weights_stay_finite_and_bit_equal(steps_of, case):
    for first, second in zip(*steps_of[case], strict=True):
        assert first["finite"]
        assert first["weights"] == second["weights"]
        assert first["slots"] == second["slots"]


@pytest.mark.parametrize("case", SCALED, ids=" ".join)
def test_loss_scale_is_halved_on_all_workers(steps_of, case):
    before, after = around_the_bad_step(case)
    scales = [[step["scale"] for step in worker] for worker in steps_of[case]]
    assert scales[0] == scales[1]
    assert scales[0][after] == scales[0][before] / 2
    assert scales[0][-1] == scales[0][after]


@pytest.mark.parametrize("case", KEPT, ids=" ".join)
def test_finite_gradient_is_kept_and_bad_one_is_dropped(steps_of, case):
    before, after = around_the_bad_step(case)
    finite, bad = steps_of[case]
    changes = [change_of_residual(worker[before], worker[after]) for worker in (finite, bad)]
    assert changes[0] > 1e-3
    assert changes[1] < 1e-6


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_residuals_stay_finite(steps_of, case):
    for worker in steps_of[case]:
        for step in worker:
            assert all(np.all(np.isfinite(r)) for r in step["residual sums"])


def around_the_bad_step(case):
    """The last step before, and the first after which the bad gradient has come to the exchange."""
    if case[1] == "accumulation":  # over two steps, so it comes with the second
        return BAD_STEP, BAD_STEP + 1
    return BAD_STEP - 1, BAD_STEP


def change_of_residual(before, after):
    return max(
        np.abs(np.subtract(a, b)).max()
        for a, b in zip(after["residuals"], before["residuals"], strict=True)
    )


if __name__ == "__main__":
    setup = Setup(argument(1))
    CHECKS = {
        "plain": lambda: train(lambda: setup.wrap(adam())),
        "mixed_float16": lambda: train(lambda: setup.wrap(adam()), "mixed_float16"),
    }
    if setup.way == "optimizer":
        CHECKS |= {
            "loss scaler around": lambda: train(lambda: scaler(setup.wrap(adam()))),
            "loss scaler inside": lambda: train(lambda: setup.wrap(scaler(adam()))),
            "accumulation": lambda: train(lambda: setup.wrap(adam(gradient_accumulation_steps=2))),
        }
    seen = {}
    for name, check in CHECKS.items():
        print(name, flush=True)
        seen[name] = check()
    report({**seen, "rank": RANK})
