"""L-GreCo between real workers: one plan for all, in each way to train, and in jobs that resume.

There is a plan after each 6 steps, in epochs of 4 steps: so epochs end amid a period. A worker's
arguments:

    killed FOLDER    trains by CompressedOptimizer, from the backup in FOLDER if there is one, until
                     worker 1 kills itself in the ninth step
    resume FOLDER    the same to the end
    strategy         trains by a compressor on the strategy, two steps in an execution; then reports
                     what happens where worker 1 has another plan
"""

import os
import signal
from pathlib import Path

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.distributed.common import Setup, digits, state_digest, state_sums
from tests.ranks import RANK, argument, exchange_of, report
from tests.workers import result, results, run_workers
from tf_gradcomp.compressors import TopK
from tf_gradcomp.compressors.base import GRADIENT_SUM
from tf_gradcomp.compressors.lgreco import LayerPlanner
from tf_gradcomp.policy import LayerPolicy

PROGRAM = Path(__file__)  # each worker runs this file
BATCH, STEPS, EPOCHS = 32, 4, 5
PERIOD, LAST_STEP = 6, 9
METHOD = "lgreco(method='top_k(density=0.05)')"
data = digits(BATCH * STEPS)


def layers():
    hidden = [keras.layers.Dense(width, activation="tanh") for width in (128, 32)]
    return keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(3)])


def built(way, **compile_args):
    setup = Setup(way, METHOD)
    model = setup.model(layers, lambda: setup.wrap(keras.optimizers.SGD(0.1)), **compile_args)
    if way == "optimizer":
        with setup.strategy.scope():
            model.optimizer.build(model.trainable_variables)
    return model, exchange_of(model)


def fit(model, *callbacks):
    plans = gc.callbacks.LayerwisePlan(PERIOD, table=False)
    return model.fit(
        *data,
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        shuffle=False,
        callbacks=[plans, *callbacks],
    )


def seen(model, exchange):
    """Returns a checkpoint's plan, and the plan that would be made now."""
    state = state_sums(exchange)
    sums = state[GRADIENT_SUM]
    return {
        **state_digest(model),
        "plan": exchange.hooks.plan_in_force(),
        "sums": sums,
        "next plan": exchange.hooks.get(LayerPlanner).propose(sums, exchange.job_state),
    }


class Epochs(keras.callbacks.Callback):
    """Records values at the beginning and after each epoch; kills worker 1 on request."""

    def __init__(self, exchange, dies=False):
        super().__init__()
        self.exchange, self.dies, self.steps, self.seen = exchange, dies, 0, []

    def on_train_begin(self, logs=None):
        self.restored = seen(self.model, self.exchange)

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append({**seen(self.model, self.exchange), "ratio": logs["plan_ratio"]})
        report({"restored": self.restored, "epochs": self.seen})

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.dies and RANK == 1 and self.steps == LAST_STEP:
            os.kill(os.getpid(), signal.SIGKILL)


def with_backup(dies):
    model, exchange = built("optimizer")
    backup = gc.callbacks.BackupAndRestore(Path(argument(2)), delete_checkpoint=False)
    fit(model, backup, Epochs(exchange, dies))


def strategy():
    model, exchange = built("strategy", steps_per_execution=2)
    epochs = Epochs(exchange)
    fit(model, epochs)
    report(
        {
            "epochs": epochs.seen,
            "at the start": error_with_another_plan(*built("strategy")),
            "later": error_with_another_plan(model, exchange),
        }
    )


def error_with_another_plan(model, exchange):
    """Trains on where worker 1 has another plan, and so vectors of another length."""
    (plan,) = exchange.job_state["top_k_plan"].values
    settings = np.array(exchange.hooks.plan_in_force().settings)
    if RANK == 1:
        planner = exchange.hooks.get(LayerPlanner)
        choices = planner.lgreco.choices(planner.specs[2])
        settings[2] = next(choice for choice in choices if choice != settings[2])
    plan.assign(settings + 1)
    try:
        fit(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


SHAPES = [(8, 128), (128,), (128, 32), (32,), (32, 3), (3,)]
OWN = TopK(0.05).settings(
    [LayerPolicy().spec("layer/kernel", shape, "float32") for shape in SHAPES]
)


@pytest.fixture(scope="module")
def by_strategy():
    return results(run_workers(PROGRAM, 2, ["strategy"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("backup")


@pytest.fixture(scope="module")
def killed(folder):
    """By two workers, within the third epoch."""
    return run_workers(PROGRAM, 2, ["killed", folder], check=False)


@pytest.fixture(scope="module")
def killed_again(killed, folder):
    """From there by three, within the fifth epoch."""
    return run_workers(PROGRAM, 3, ["killed", folder], check=False)


@pytest.fixture(scope="module")
def resumed(killed_again, folder):
    return run_workers(PROGRAM, 2, ["resume", folder])


# Trains by L-GreCo within the strategy's scope, where creating a variable synchronizes the workers.
_PLANS_IN_SCOPE = """
    import keras
    from tests.distributed.common import Setup, digits

    import tf_gradcomp as gc
    from tests.ranks import exchange_of, report


    def layers():
        hidden = [keras.layers.Dense(width, activation="tanh") for width in (128, 32)]
        return keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(3)])


    def plan_within(method):
        setup = Setup("optimizer", f"lgreco(method='{method}')")
        model = setup.model(layers, lambda: setup.wrap(keras.optimizers.SGD(0.1)))
        plans = gc.callbacks.LayerwisePlan(3, table=False)
        with setup.strategy.scope():
            settings = {"batch_size": 32, "epochs": 1, "verbose": 0, "shuffle": False}
            model.fit(*digits(), **settings, callbacks=[plans])
        return exchange_of(model).hooks.plan_in_force()


    methods = "adacomp(bin_sizes=50)", "scalecom(rates=20)"
    report({method: plan_within(method) for method in methods})
"""


def test_plans_are_made_within_the_strategys_scope():
    workers = run_workers(_PLANS_IN_SCOPE, 2)
    chief, other = results(workers)
    assert chief == other
    for plan in chief.values():
        assert plan[1] > 1  # times fewer bytes


def test_both_ways_to_train_plan_alike_also_with_several_steps_in_an_execution(killed, by_strategy):
    by_optimizer = result(killed[0])["epochs"]
    assert len(by_optimizer) == 2
    chief, other = (worker["epochs"] for worker in by_strategy)
    assert chief[:2] == by_optimizer
    for name in ("weights", "plan", "ratio"):
        assert [epoch[name] for epoch in other] == [epoch[name] for epoch in chief]
    assert chief[0]["plan"][0] == OWN
    assert chief[0]["ratio"] == 1
    assert chief[1]["plan"][0] != OWN
    assert chief[1]["ratio"] == chief[1]["plan"][1] > 1
    # An epoch ends amid a period, and the last one at its end. Only the chief has the sums.
    assert [np.any(epoch["sums"][0]) for epoch in chief] == [True, True, False, True, True]
    assert not any(np.any(epoch["sums"][0]) for epoch in other)


@pytest.mark.parametrize(
    ("before", "after", "sums_left"),
    [("killed", "killed_again", [False, True]), ("killed_again", "resumed", [True])],
    ids=["two workers, then three", "three, then two"],
)
def test_a_job_killed_within_a_period_resumes_with_plan_and_sums(before, after, sums_left, request):
    before, after = (request.getfixturevalue(job) for job in (before, after))
    assert before[1].returncode == -signal.SIGKILL
    saved = result(before[0])["epochs"][1]
    assert np.any(saved["sums"][0])
    jobs = results(after)
    for worker in jobs:
        for name in ("weights", "plan", "sums", "next plan"):
            assert worker["restored"][name] == saved[name], name
        for name in ("weights", "plan"):
            expected = [epoch[name] for epoch in jobs[0]["epochs"]]
            assert [epoch[name] for epoch in worker["epochs"]] == expected
    # A plan is made at the end of the period, and the next one begins.
    assert [np.any(epoch["sums"][0]) for epoch in jobs[0]["epochs"]] == sums_left
    assert jobs[0]["epochs"][0]["weights"] != saved["weights"]


# Trains by L-GreCo with a plan after each epoch, which worker 1 knows nothing of.
_ONE_PLANS = """
    import keras
    from tests.distributed.common import Setup, digits

    import tf_gradcomp as gc
    from tests.ranks import RANK, report

    setup = Setup("optimizer", "lgreco(method='top_k(density=0.02)')")
    model = setup.model(
        lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)]),
        lambda: setup.wrap(keras.optimizers.SGD(0.1)),
    )
    plans = [gc.callbacks.LayerwisePlan(table=False)] if RANK == 0 else []
    try:
        model.fit(*digits(), batch_size=32, epochs=2, verbose=0, callbacks=plans)
    except gc.WorkersDisagreeError as error:
        report(str(error))
"""


def test_workers_end_at_the_start_if_one_does_not_plan():
    for worker in run_workers(_ONE_PLANS, 2):
        assert "LayerwisePlan(every='epoch')" in result(worker)
        assert "nobody" in result(worker)


@pytest.mark.parametrize(
    ("when", "messages"),
    [
        ("at the start", ["WorkersDisagreeError", "planned setting of", "worker 1 has"]),
        ("later", ["InvalidArgumentError"]),
    ],
)
def test_a_worker_with_another_plan_is_found(by_strategy, when, messages):
    for worker in by_strategy:
        for message in messages:
            assert message in worker[when]


if __name__ == "__main__":
    if argument(1) == "strategy":
        strategy()
    else:
        with_backup(dies=argument(1) == "killed")
