"""Local steps of real workers, compared with learners in one process and with exact arithmetic.

Gradients are small integers and learning rates powers of two, so that float32 holds every result of
plain SGD exactly. Such results are compared for equality.
"""

import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import adam_bound, rounding, training
from tests.distributed.common import scalar
from tests.distributed.local_learners import (
    RATE,
    SHAPES,
    WORKERS,
    Learners,
    assert_equal,
    gradients,
    sgd,
)
from tests.distributed.local_training import Trained
from tests.ranks import RANK, argument, digest, report
from tests.replicas import mirrored
from tests.workers import results, run_workers
from tf_gradcomp.keras.local.local_steps import check_can_be_local

PROGRAM = Path(__file__)  # each worker runs this file

# How often a step rounds a value. PowerSGD sums the products of a row, and of a column, twice.
ROUNDED = {"cast": 3, "power_sgd": 2 * (40 + 8), "qsgd": 3}
METHODS = ["no_compression", "adacomp", "scalecom", "top_k(density=0.1)", *ROUNDED]
RESUMED = ["top_k(density=0.1)", "no_compression"]


def _first_local_step(change):
    """Returns eight steps; the third, the first after a warm-up of two steps, is changed."""
    steps = gradients(8)
    change(steps[2])
    return steps


def _without_the_second_variable(worker_gradients):
    for tensors in worker_gradients:
        del tensors[1]


def _with_a_nan_on_worker_1(worker_gradients):
    worker_gradients[1][0][0, 0] = np.nan


def _with_slices_of_the_first_variable(worker_gradients):
    for tensors in worker_gradients:
        shape = SHAPES[0]
        tensors[0] = tf.IndexedSlices(tensors[0], np.arange(shape[0]), np.array(shape))


WARM_UPS = {
    "whole": gradients(8),
    "slices": _first_local_step(_with_slices_of_the_first_variable),
    "not finite": _first_local_step(_with_a_nan_on_worker_1),
    "missing": _first_local_step(_without_the_second_variable),
}


def as_data_parallel(method):
    """Rounds of one step, and no local steps at all."""
    steps = gradients(4)
    rounds = lambda: gc.LocalSteps(1, outer=keras.optimizers.SGD(1.0))  # noqa: E731
    return {
        "rounds": Trained(method, rounds).on(steps).seen(),
        "gradients": Trained(method, lambda: None).on(steps).seen(),
    }


def nesterov():
    return keras.optimizers.SGD(0.5, momentum=0.75, nesterov=True)


def adam():
    return keras.optimizers.Adam(2.0**-6, epsilon=1.0)


HALVES = ("bfloat16", "float16")  # hold every result of averages() exactly, too


def averages(**settings):
    """Two whole rounds, and one that ends early."""
    trained = Trained("no_compression", lambda: 3, **settings).on(gradients(7))
    separate = trained.seen()
    trained.optimizer.synchronize()
    trained.optimizer.synchronize()  # does nothing
    return {"separate": separate, "averaged": trained.seen()}


def with_momentum():
    trained = Trained("no_compression", lambda: gc.LocalSteps(3, outer=nesterov()), adam)
    return trained.on(gradients(6)).seen()


def warm_up():
    """Synchronous steps leave a residual of gradients, and rounds one of weights."""
    return {case: _warm_up(steps) for case, steps in WARM_UPS.items()}


def _warm_up(steps):
    settings = gc.LocalSteps(3, warmup_steps=2)
    trained = Trained("top_k(density=0.1)", lambda: settings)
    seen = [trained.on(steps[:2]).seen(), trained.on(steps[2:]).seen()]
    return {"warm": seen[0], "end": seen[1]}


def in_one_graph():
    """A warm-up, and a momentum that overflows on worker 1, by one call for each step and by one
    call for all steps."""
    steps = gradients(8)
    steps[3][1][1][0] = 1e38
    seen = {}
    for case, settings in (
        ("rounds", {"steps": 3, "warmup_steps": 2}),
        ("fragments", {"steps": 2, "fragments": 2}),
    ):
        make = lambda settings=settings: gc.LocalSteps(**settings)  # noqa: E731
        inner = lambda: keras.optimizers.SGD(4.0, momentum=0.5)  # noqa: E731
        jobs = [Trained("top_k(density=0.1)", make, inner) for _ in range(2)]
        seen[case] = [
            job.on(steps, one).seen() for job, one in zip(jobs, (False, True), strict=True)
        ]
    return seen


def momentum(folder):
    """Takes synchronous steps, which leave a velocity of gradients, and then rounds, also in a new
    job."""
    seen = {}
    for case, density in (("warm-up", None), ("resumed", 0.1)):
        method = f"top_k(density={density}, momentum=0.5)"
        if case == "warm-up":
            warm = trained = Trained(method, lambda: gc.LocalSteps(3, warmup_steps=2))
            warm.on(gradients(8)[:2])
        else:
            warm = Trained(method, lambda: None).on(gradients(8)[:2])
            trained = Trained(method, lambda: 3)
            path = f"{folder}/worker_{RANK}/synchronous"
            trained.checkpoint().read(warm.checkpoint().write(path))
        seen[case] = [trained.seen()]
        for begin in (2, 5):
            seen[case].append(trained.on(gradients(8)[begin : begin + 3]).seen())
    return seen


def decays():
    settings = gc.LocalSteps(2, residual_decay=0.5)
    trained = Trained("top_k(density=0.1)", lambda: settings)
    steps = gradients(6)
    return [trained.on(steps[i : i + 2]).seen() for i in (0, 2, 4)]


def not_finite():
    """Worker 1 has a NaN in the second step of the first round, and overflows in the second one."""
    steps = gradients(6)
    steps[1][1][0][0, 0] = np.nan
    steps[4][1][1][0] = 1e38
    trained = Trained("no_compression", lambda: 3, lambda: keras.optimizers.SGD(4.0))
    return [trained.on(steps[:3]).seen(), trained.on(steps[3:]).seen()]


def accumulates():
    trained = Trained(
        "no_compression",
        lambda: 2,
        lambda: keras.optimizers.SGD(RATE, gradient_accumulation_steps=2),
    )
    return trained.on(gradients(8)).seen()


def scaled():
    """A loss scaler inside: worker 1 overflows once, and its own scale is halved."""
    steps = gradients(4)
    steps[3][1][0][0, 0] = np.inf
    trained = Trained(
        "no_compression",
        lambda: 2,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), 8.0),
    )
    seen = trained.on(steps).seen()
    return {**seen, "scale": scalar(trained.optimizer.inner_optimizer.dynamic_scale)}


def chosen():
    """By a method that the network decides on."""
    return Trained("auto", lambda: 2).on(gradients(4)).seen()


def chief_saves_alone():
    """In the middle of a round, a checkpoint of one worker has the common weights."""
    trained = Trained("top_k(density=0.1)", lambda: 3).on(gradients(3))
    common = digest(trained.variables)
    trained.on(gradients(1, seed=4))
    saving = trained.optimizer.exchange.saving
    with saving.hooks.rolled_back():
        saved = digest(trained.variables)
    return {"common": common, "saved": saved, "own": digest(trained.variables)}


def checkpoints(folder, method):
    """Saves and restores within a round on all workers, and continues like an uninterrupted job."""
    make = lambda: gc.LocalSteps(3, outer=nesterov())  # noqa: E731
    trained = Trained(method, make).on(gradients(4))
    path = trained.checkpoint().write(f"{folder}/worker_{RANK}/{method}")
    saved = trained.seen()
    other = Trained(method, make).on(gradients(2, seed=9))  # amid a round
    other.checkpoint().read(path)
    try:
        Trained(method, lambda: None).checkpoint().read(path)
        refused = None
    except ValueError as error:
        refused = str(error)
    steps = gradients(6, seed=5)
    return {
        "refused": refused,
        "saved": saved,
        "restored": other.seen(),
        "continued": trained.on(steps).seen(),
        "resumed": other.on(steps).seen(),
    }


def fragments():
    """Two cycles of three steps, each fragment with a variable, and rounds that end early."""
    seen = []
    for outer in (lambda: None, nesterov, lambda: keras.optimizers.Adam(0.5)):
        make = lambda outer=outer: gc.LocalSteps(3, outer(), fragments=5)  # noqa: E731
        trained = Trained("no_compression", make).on(gradients(7))
        seen.append([trained.seen()])
        with trained.optimizer.exchange.hooks.rolled_back():
            seen[-1].append(trained.seen())
        trained.optimizer.synchronize()
        seen[-1].append(trained.seen())
    return seen


def decaying_fragments():
    """Each variable's residual and sent values, after each exchange of a fragment."""
    settings = gc.LocalSteps(2, residual_decay=0.5, fragments=2)
    trained = Trained("top_k(density=0.1)", lambda: settings)
    return [trained.on([step]).seen() for step in gradients(6)]


def overflowing_fragment():
    """The second variable of worker 1 overflows in the second step, after which it is exchanged."""
    steps = gradients(4)
    steps[1][1][1][0] = 1e38
    settings = gc.LocalSteps(2, fragments=2)
    trained = Trained("no_compression", lambda: settings, lambda: keras.optimizers.SGD(4.0))
    trained.on(steps).optimizer.synchronize()
    return trained.seen()


def outside_of_the_scope():
    settings = gc.LocalSteps(2, keras.optimizers.SGD())
    try:
        Trained("no_compression", lambda: settings)
    except ValueError as error:
        return str(error)
    return None


def other_number():
    """Workers with rounds of different lengths, and with other fragments."""
    seen = []
    for settings in ({"steps": 2 + RANK}, {"steps": 2, "fragments": 1 + RANK}):
        try:
            Trained("no_compression", lambda settings=settings: gc.LocalSteps(**settings))
        except gc.WorkersDisagreeError as error:
            seen.append(str(error))
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def jobs(folder):
    return results(run_workers(PROGRAM, WORKERS, [folder]))


@pytest.mark.parametrize("method", METHODS)
def test_rounds_of_one_step_are_data_parallel_training(jobs, method):
    for job in jobs:
        seen = job["alike"][method]
        # Rounds keep differences of weights: gradients times the learning rate.
        scaled = [RATE * residual for residual in np_arrays(seen["gradients"]["residuals"])]
        for actual, expected in (
            *zip(seen["rounds"]["values"], seen["gradients"]["values"], strict=True),
            *zip(seen["rounds"]["residuals"], scaled, strict=True),
        ):
            # Where weights are no multiples of a power of two, their difference is rounded.
            bound = rounding(2.0, ROUNDED.get(method, 0), steps=4)
            np.testing.assert_allclose(actual, np.float32(expected), rtol=0, atol=bound)
        assert np.any(seen["rounds"]["values"][0])
        assert seen["rounds"]["rounds"] == seen["rounds"]["exchanges"] == 4


def np_arrays(lists):
    return [np.asarray(one, np.float32) for one in lists]


@pytest.mark.parametrize("case", ["averages", "averages_of_halves"])
def test_workers_average_what_they_learn_in_a_round(jobs, case):
    steps, learners = gradients(7), Learners(sgd)
    learners.round(steps[:3]).round(steps[3:6])
    before = learners.values
    learners.round(steps[6:])
    drifts = []
    for rank, job in enumerate(jobs):
        separate, averaged = job[case]["separate"], job[case]["averaged"]
        local = [
            start - RATE * WORKERS * g for start, g in zip(before, steps[6][rank], strict=True)
        ]
        assert_equal(separate["values"], local)
        assert_equal(averaged["values"], learners.values)
        assert (separate["rounds"], averaged["rounds"]) == (2, 3)
        assert averaged["iterations"] == 7
        moved, norm = (
            np.sqrt(sum(np.sum(np.float64(v) ** 2) for v in values))
            for values in ([a - b for a, b in zip(local, before, strict=True)], before)
        )
        drifts.append(moved / norm)
    for job in jobs:
        assert job[case]["averaged"]["drift"] == pytest.approx(np.mean(drifts), rel=1e-5)


def test_outer_optimizer_gets_the_mean_pseudo_gradient(jobs):
    steps = gradients(6)
    learners = Learners(
        lambda: keras.optimizers.Adam(2.0**-6, epsilon=1.0),
        lambda: keras.optimizers.SGD(0.5, momentum=0.75, nesterov=True),
    )
    learners.round(steps[:3]).round(steps[3:])
    # Adam moves a weight by at most its learning rate, and gradients do not depend on weights.
    bound = training(gain=2.0**-6, terms=8, steps=6, gradients=16.0)
    for job in jobs:
        for actual, expected in zip(job["with_momentum"]["values"], learners.values, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)
    assert jobs[0]["with_momentum"]["values"] == jobs[1]["with_momentum"]["values"]


@pytest.mark.parametrize("case", WARM_UPS)
def test_nothing_is_lost_between_synchronous_steps_and_rounds(jobs, case):
    step_gradients = gradients(8)
    if case == "not finite":  # worker 1 skips its first local step
        step_gradients[2][1] = [np.zeros_like(one) for one in step_gradients[2][1]]
    if case == "missing":
        for tensors in step_gradients[2]:
            tensors[1] = np.zeros_like(tensors[1])
    total = [
        sum(g[i] for worker_gradients in step_gradients for g in worker_gradients) for i in range(2)
    ]
    seen = [job["warm_up"][case] for job in jobs]
    waits = [sum(np.float32(one["end"]["residuals"][i]) for one in seen) for i in range(2)]
    for one in seen:
        assert one["warm"]["exchanges"] == 2
        assert one["warm"]["rounds"] == 0
        assert one["end"]["exchanges"] == 4
        assert np.any(one["warm"]["residuals"][0])
        assert np.any(one["warm"]["residuals"][1])
        values = np_arrays(one["end"]["values"])
        # Sent values plus residuals equal the steps of plain SGD.
        whole = [value - waiting_value for value, waiting_value in zip(values, waits, strict=True)]
        assert_equal(whole, [-RATE * one for one in total])


@pytest.mark.parametrize("case", ["rounds", "fragments"])
def test_steps_in_one_graph_are_those_of_one_call_each(jobs, case):
    for job in jobs:
        single, together = job["in_one_graph"][case]
        assert together == single
        assert np.isfinite(np_arrays(together["values"])[0]).all()
    assert jobs[1]["in_one_graph"][case][0]["skipped"] > 0


@pytest.mark.parametrize("case", ["warm-up", "resumed"])
def test_velocity_of_gradients_does_not_move_weights_in_rounds(jobs, case):
    steps = gradients(8)
    moved = [
        [RATE * sum(g[i] for s in steps[b : b + 3] for g in s) for i in range(2)] for b in (2, 5)
    ]
    whole = [with_what_waits([job["momentum"][case][n] for job in jobs]) for n in range(3)]
    assert np.any(jobs[0]["momentum"][case][0]["residuals"][0]) == (case == "resumed")
    before = [job["momentum"][case][0] for job in jobs]
    for i in range(2):
        # The residuals of synchronous steps are gradients.
        waits = sum(np.float32(one["residuals"][i]) for one in before)
        start = np.float32(before[0]["values"][i]) - RATE * waits
        np.testing.assert_array_equal(whole[1][i], start - moved[0][i])
        if case == "warm-up":  # all is sent: from round to round there is plain momentum
            velocity = moved[1][i] + 0.5 * moved[0][i]
            np.testing.assert_array_equal(whole[2][i], whole[1][i] - velocity)


def with_what_waits(workers):
    """Returns the common weights if everything were sent, after a round of local steps."""
    waits = [sum(np.float32(worker["residuals"][i]) for worker in workers) for i in range(2)]
    values = np_arrays(workers[0]["values"])
    return [value - waiting_value for value, waiting_value in zip(values, waits, strict=True)]


def test_residual_decays_at_each_round(jobs):
    steps = gradients(6)
    values, waits = [np.zeros(shape, np.float32) for shape in SHAPES], [0.0, 0.0]
    for step in range(3):
        now = np_arrays(jobs[0]["decays"][step]["values"])
        left = [
            sum(np.float32(job["decays"][step]["residuals"][i]) for job in jobs) for i in range(2)
        ]
        for i in range(2):
            moved = RATE * sum(g[i] for s in steps[2 * step : 2 * step + 2] for g in s)
            np.testing.assert_array_equal(values[i] - now[i], 0.5 * waits[i] + moved - left[i])
        values, waits = now, left
    assert np.any(waits[0])


def test_worker_with_a_gradient_that_is_not_finite_continues_alone(jobs):
    rate, steps = 4.0, gradients(6)
    moved = [np.zeros(shape, np.float32) for shape in SHAPES]
    for index, step_gradients in enumerate(steps[:3]):
        for rank, shares in enumerate(step_gradients):
            if (index, rank) != (1, 1):  # only that step of that worker is skipped
                moved = [m + rate * share for m, share in zip(moved, shares, strict=True)]
    first = [-one for one in moved]
    for job in jobs:
        assert_equal(job["not_finite"][0]["values"], first)
    assert [job["not_finite"][0]["skipped"] for job in jobs] == [0, 1]
    # In the second round, the weights of worker 1 overflow: it adds nothing.
    by_first = [rate * sum(step_gradients[0][i] for step_gradients in steps[3:]) for i in range(2)]
    for job in jobs:
        expected = [value - one for value, one in zip(first, by_first, strict=True)]
        assert_equal(job["not_finite"][1]["values"], expected)


def test_rounds_count_updates_where_gradients_are_accumulated(jobs):
    steps, learners = gradients(8), Learners(sgd)
    means = [
        [
            [(a + b) / 2 for a, b in zip(first, second, strict=True)]
            for first, second in zip(steps[i], steps[i + 1], strict=True)
        ]
        for i in (0, 2, 4, 6)
    ]
    learners.round(means[:2]).round(means[2:])
    for job in jobs:
        assert_equal(job["accumulates"]["values"], learners.values)
        assert job["accumulates"]["exchanges"] == 2


def test_each_worker_has_a_loss_scale_of_its_own(jobs):
    steps = gradients(4)
    total = [RATE * sum(g[i] for step_gradients in steps for g in step_gradients) for i in range(2)]
    skipped = [RATE * share for share in steps[3][1]]
    for job in jobs:
        expected = [-(one - rest) for one, rest in zip(total, skipped, strict=True)]
        assert_equal(job["scaled"]["values"], expected)
    assert [job["scaled"]["scale"] for job in jobs] == [8.0, 4.0]


def test_workers_are_equal_after_a_round_by_a_chosen_method(jobs):
    first, second = (job["chosen"] for job in jobs)
    assert first["values"] == second["values"]
    assert (first["rounds"], first["exchanges"]) == (2, 2)


def test_chief_that_saves_alone_saves_the_common_weights(jobs):
    for job in jobs:
        seen = job["chief_saves_alone"]
        assert seen["saved"] == seen["common"] == jobs[0]["chief_saves_alone"]["common"]
        assert seen["own"] != seen["common"]


@pytest.mark.parametrize("method", ["top_k(density=0.1)", "no_compression"])
def test_saving_ends_the_round_and_a_restored_job_continues_equally(jobs, method):
    saved_by_job = [job["checkpoints"][method] for job in jobs]
    for seen in saved_by_job:
        assert seen["saved"]["values"] == saved_by_job[0]["saved"]["values"]
        assert seen["restored"]["values"] == seen["saved"]["values"]
        assert "residual of a job with local steps" in seen["refused"]
        assert seen["resumed"]["values"] == saved_by_job[0]["resumed"]["values"]
        if method == "no_compression":
            assert seen["resumed"]["values"] == seen["continued"]["values"]
        else:
            total = [
                sum(np.float32(second["saved"]["residuals"][i]) for second in saved_by_job)
                for i in range(2)
            ]
            assert_equal(seen["restored"]["residuals"], [first / WORKERS for first in total])
        # Workers exchange the same sums, with different parts of the residual.
        assert seen["resumed"]["exchanges"] == seen["continued"]["exchanges"] == 4


@pytest.mark.parametrize("case", range(3))
def test_fragments_are_exchanged_in_turn(jobs, case):
    outer = (
        None,
        lambda: keras.optimizers.SGD(0.5, momentum=0.75, nesterov=True),
        lambda: keras.optimizers.Adam(0.5),
    )[case]
    steps, learners = gradients(7), Learners(sgd, outer)
    # After two of three steps the first variable is exchanged, after all three the second one.
    learners.take(steps[:2]).exchange(0).take(steps[2:3]).exchange(1)
    learners.take(steps[3:5]).exchange(0).take(steps[5:6]).exchange(1).take(steps[6:])
    separate, common = [[np.asarray(v) for v in local] for local in learners.own], learners.values
    learners.exchange(0, 1)
    bound = rounding(8.0, adam_bound(), steps=3) if case == 2 else 0
    for rank, job in enumerate(jobs):
        seen = job["fragments"][case]
        for one, expected in zip(seen, (separate[rank], common, learners.values), strict=True):
            for actual, value in zip(one["values"], expected, strict=True):
                np.testing.assert_allclose(np.float32(actual), value, rtol=0, atol=bound)
        assert seen[2]["values"] == jobs[0]["fragments"][case][2]["values"]
        assert [one["exchanges"] for one in seen] == [4, 4, 6]
        assert [one["rounds"] for one in seen] == [4, 4, 6]
        assert seen[2]["drift"] == jobs[0]["fragments"][case][2]["drift"] > 0


def test_a_fragment_keeps_its_residual_while_others_are_exchanged(jobs):
    steps, seen = gradients(6), [job["decaying_fragments"] for job in jobs]
    for index, due in enumerate(([0, 2, 4], [1, 3, 5])):
        common, waits = np.zeros(SHAPES[index], np.float32), 0.0
        for begin, end in zip([0, *(step + 1 for step in due)], due, strict=False):
            moved = RATE * sum(g[index] for s in steps[begin : end + 1] for g in s)
            now = np.float32(seen[0][end]["values"][index])
            left = sum(np.float32(one[end]["residuals"][index]) for one in seen)
            np.testing.assert_array_equal(common - now, 0.5 * waits + moved - left)
            if end < 5:  # the other fragment is exchanged in between
                assert seen[0][end + 1]["residuals"][index] == seen[0][end]["residuals"][index]
            common, waits = now, left
        assert np.any(waits)


def test_an_overflow_costs_a_worker_the_round_of_that_fragment_alone(jobs):
    steps = gradients(4)
    moved = [4.0 * sum(g[index] for s in steps for g in s) for index in range(2)]
    moved[1] -= 4.0 * sum(step_gradients[1][1] for step_gradients in steps[:2])
    for job in jobs:
        assert_equal(job["overflowing_fragment"]["values"], [-one for one in moved])
    assert [job["overflowing_fragment"]["skipped"] for job in jobs] == [0, 1]


def test_workers_with_rounds_of_different_lengths_get_errors(jobs):
    for job in jobs:
        by_length, by_fragments = job["other_number"]
        assert "local_steps' steps" in by_length
        assert "local_steps' fragments" in by_fragments


def test_outer_optimizer_that_is_not_of_the_strategy_is_refused(jobs):
    for job in jobs:
        assert "outer optimizer was created outside the strategy's scope" in job["outside"]


def test_unsupported_settings_of_local_steps_are_refused():
    with mirrored(2).scope(), pytest.raises(ValueError, match="there is only one worker"):
        gc.CompressedOptimizer(keras.optimizers.SGD(), local_steps=2)
    ranks = types.SimpleNamespace(by_strategy=False)
    with pytest.raises(ValueError, match="Horovod's ranks cannot take them"):
        check_can_be_local(keras.optimizers.SGD(), ranks, None)


def test_learners_plan_and_train_in_rounds():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), *map(keras.layers.Dense, (64, 32, 2))])
    model.compile(keras.optimizers.SGD(0.002), loss="mse")
    settings = gc.LocalSteps(3, warmup_steps=1, residual_decay=0.9)
    learners = gc.simulation.Learners(model, 2, "lgreco(method='qsgd')", local_steps=settings)
    data = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")
    batches = [(data[i : i + 4], data[i : i + 4, :2]) for i in range(0, 32, 4)]
    history = learners.fit(batches, epochs=2)
    assert history["loss"][1] < history["loss"][0]
    # In the first epoch, one synchronous step and rounds of 3, 3 and 1 steps.
    assert learners.exchange.exchanges == 1 + 3 + 3
    assert learners.plans
    assert history["payload_bytes"][1] < history["dense_bytes"][1] / 2


def test_config_is_that_of_the_settings():
    settings = gc.LocalSteps(4, keras.optimizers.SGD(0.7, momentum=0.9), 10, 0.95, fragments=3)
    optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(), local_steps=settings)
    config = optimizer.get_config()
    again = gc.CompressedOptimizer.from_config(config)
    assert again.get_config() == config
    assert again.outer_optimizer.momentum == 0.9
    schedule = gc.LocalSteps([(0, 1), (100, 8)])
    assert gc.LocalSteps.of(schedule.get_config()).get_config() == schedule.get_config()
    assert "local_steps" not in gc.CompressedOptimizer(keras.optimizers.SGD()).get_config()


if __name__ == "__main__":
    report(
        {
            "alike": {method: as_data_parallel(method) for method in METHODS},
            **{
                check.__name__: check()
                for check in (
                    averages,
                    with_momentum,
                    warm_up,
                    in_one_graph,
                    decays,
                    not_finite,
                    accumulates,
                    scaled,
                    chosen,
                    chief_saves_alone,
                    fragments,
                    decaying_fragments,
                    overflowing_fragment,
                )
            },
            "averages_of_halves": averages(dtypes=HALVES),
            "momentum": momentum(argument(1)),
            "checkpoints": {method: checkpoints(argument(1), method) for method in RESUMED},
            "other_number": other_number(),
            "outside": outside_of_the_scope(),
        }
    )
