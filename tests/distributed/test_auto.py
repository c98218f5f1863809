"""Real workers probe their collectives: all find the same, and choose the same."""

import pytest

from tests.workers import results, run_workers

CANDIDATES = {
    "optimizer": ["no_compression", "cast", "adacomp"],
    "strategy": ["no_compression", "cast"],  # where Adam's second moment is in front of nothing
}
# Chooses a compressor by a probe, in both ways; and says what `gc.advise` says: WAY.
PROGRAM = """
    import keras
    from tests.distributed.common import Setup, dense_model, digits, state_digest

    import tf_gradcomp as gc
    from tests.ranks import argument, exchange_of, report

    WAY = argument(1)
    setup = Setup(WAY, "auto")
    model = setup.model(
        dense_model, lambda: setup.wrap(keras.optimizers.Adam(1e-2), precondition="auto")
    )
    with setup.strategy.scope():
        advice = gc.advise(model, ["top_k", "adacomp"], compute_seconds=0.5)
    model.fit(*digits(64), batch_size=16, verbose=0, shuffle=False)
    exchange = exchange_of(model)
    report(
        {
            "chosen": exchange.compressor.name,
            "preconditioned": exchange.setup.preconditioner is not None,
            "helped": exchange.compressor.helped_by_precondition,
            "state": sorted(exchange.state),
            "predicted": [[one.method, one.step, one.payload_bytes] for one in advice.predictions],
            "best": advice.best,
            "text": str(advice),
            **state_digest(model),
        }
    )
"""


@pytest.fixture(scope="module", params=["optimizer", "strategy"])
def way(request):
    return request.param


@pytest.fixture(scope="module")
def jobs(way):
    return run_workers(PROGRAM, 2, [way])


@pytest.fixture(scope="module")
def workers(jobs):
    return results(jobs)


def test_all_workers_choose_the_same_and_train_alike(workers, way):
    first, second = workers
    assert first["chosen"] in CANDIDATES[way]
    assert first["chosen"] == second["chosen"]
    assert first["weights"] == second["weights"]
    assert first["slots"] == second["slots"]


def test_preconditioning_follows_the_choice_and_state_covers_all_candidates(workers, way):
    for worker in workers:
        in_front = way == "optimizer"  # the strategy knows no optimizer
        assert worker["preconditioned"] == (worker["helped"] and in_front)
        assert worker["state"] == (["residual", "second_moment"] if in_front else [])


def test_the_chief_logs_the_choice_and_the_predictions_in_one_line(jobs, workers, way):
    lines_by_worker = [
        [line for line in job.stderr.splitlines() if "The probe predicted" in line] for job in jobs
    ]
    assert [len(lines) for lines in lines_by_worker] == [1, 0]
    chosen, predicted = lines_by_worker[0][0].split(" The probe predicted: ")
    names = {"no_compression": "without compression", "adacomp": "by adacomp (the default)"}
    assert names.get(workers[0]["chosen"], workers[0]["chosen"]) in chosen
    assert [part.split()[0] for part in predicted.split(", ")] == CANDIDATES[way]


def test_all_workers_are_given_the_same_advice(workers):
    first, second = workers
    assert first["text"] == second["text"]
    assert [method for method, _, _ in first["predicted"]] == ["no_compression", "top_k", "adacomp"]
    assert all(step > 0.5 for _, step, _ in first["predicted"])  # with the given time of computing
    assert first["best"] == "no_compression"  # no method saves a twentieth of the time of computing


def test_payload_bytes_of_methods_are_known(workers):
    dense, top_k, adacomp = (payload for _, _, payload in workers[0]["predicted"])
    assert dense == 4 * (8 * 32 + 32 + 32 * 3 + 3) + 4  # with a tag
    assert 0 < adacomp < dense
    assert 0 < top_k < dense
