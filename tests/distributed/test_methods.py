"""Tests each method between real workers: a bad step, a killed worker, and more workers that
resume.

A gradient of worker 1 is not finite in one step. A worker's arguments:

    train FOLDER               trains with each method in turn, with a backup after the epoch
    killed METHOD              trains until worker 1 kills itself
    resume FOLDER METHOD ...   trains with each of these in turn, from where its backup was made
"""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.bounds import assert_close, training
from tests.distributed.common import (
    Setup,
    classification_loss,
    dense_model,
    digits,
    scalar,
    state_digest,
    state_sums,
)
from tests.ranks import RANK, SIZE, argument, exchange_of, report
from tests.workers import results, run_workers
from tf_gradcomp import compressors

PROGRAM = Path(__file__)  # each worker runs this file
BATCH, STEPS, BAD_STEP, RATE = 32, 8, 3, 0.1


def data():
    x, y = digits(BATCH * STEPS)
    x[BATCH * BAD_STEP + BATCH // SIZE] = np.nan
    return x, y


COMPRESSORS = {
    **{name: name for name in compressors.names()},
    "bfloat16": compressors.Cast("bfloat16"),
    "warmed up": compressors.ScaleCom(20, value_bits=16, warmup_steps=BAD_STEP + 2),
    "arc_top_k": compressors.ArcTopK(0.2, rank=2, block=8),
    "alternating": compressors.PowerSGD(2, alternate=True),
}


def built(name):
    setup = Setup("optimizer", COMPRESSORS[name])
    model = setup.model(dense_model, lambda: setup.wrap(keras.optimizers.SGD(RATE)))
    with setup.strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model, exchange_of(model)


def values(model):
    return [np.asarray(variable) for variable in model.trainable_variables]


def loss(model):
    x, y = digits(BATCH * STEPS)
    return float(classification_loss()(y, model(x)))


def train(folder, name):
    model, exchange = built(name)
    before = loss(model)
    model.fit(*data(), batch_size=BATCH, verbose=0, shuffle=False, callbacks=[backup(folder, name)])
    traffic = exchange.traffic()
    return {
        **state_digest(model),
        "improved": loss(model) < before,
        "values": values(model),
        "state": state_sums(exchange),
        "skipped": scalar(exchange.skipped_steps),
        "payload bytes": traffic.payload_bytes / traffic.exchanges,
        "sent bytes": traffic.sent_bytes / traffic.exchanges,
        "dense bytes": traffic.dense_bytes / traffic.exchanges,
        "tensor bytes": sum(traffic.tensor_bytes.values()) / traffic.exchanges,
    }


def killed(name):
    model, _ = built(name)

    def die(batch, logs):
        if RANK == 1 and batch == BAD_STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    death = keras.callbacks.LambdaCallback(on_train_batch_end=die)
    model.fit(*data(), batch_size=BATCH, verbose=0, shuffle=False, callbacks=[death])


def backup(folder, name):
    return gc.callbacks.BackupAndRestore(Path(folder, name), delete_checkpoint=False)


def resume(folder, name):
    model, exchange = built(name)
    restored = {}

    def note_restored(logs):
        restored.update(
            {
                "values": values(model),
                "state": state_sums(exchange),
                "weights before": state_digest(model)["weights"],
            }
        )

    watch = keras.callbacks.LambdaCallback(on_train_begin=note_restored)
    fitted = model.fit(
        *digits(BATCH * STEPS),
        batch_size=3 * BATCH // 2,
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=[backup(folder, name), watch],
    )
    return {
        **restored,
        **state_digest(model),
        "epochs": fitted.epoch,
        "skipped": scalar(exchange.skipped_steps),
    }


SUMMING = {"no_compression": 1, "cast": 2, "bfloat16": 2}
METHODS = compressors.names()
# By sums and broadcasts; a job that gathers is killed in test_two_level.py.
STATES = ["adacomp", "alternating", "cast", "lgc", "lgreco", "power_sgd"]  # each keeps other state
quick = pytest.mark.quick("CompressedOptimizer")
every_method = pytest.mark.parametrize("method", [*METHODS, "bfloat16", "warmed up", "alternating"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("backups")


@pytest.fixture(scope="module")
def workers(folder):
    return results(run_workers(PROGRAM, 2, ["train", folder]))


@pytest.fixture(scope="module")
def resumed(workers, folder):
    return results(run_workers(PROGRAM, 3, ["resume", folder, *STATES]))


@quick
@every_method
def test_weights_and_slots_are_bit_equal(workers, method):
    first, second = (worker[method] for worker in workers)
    assert first["weights"] == second["weights"]
    assert first["slots"] == second["slots"]


@quick
@every_method
def test_the_bad_step_is_skipped_by_all_and_training_continues(workers, method):
    for worker in workers:
        assert worker[method]["skipped"] == 1
        assert worker[method]["improved"]
        assert all(np.isfinite(values).all() for values in worker[method]["values"])


@quick
@every_method
def test_the_bytes_of_the_tensors_are_in_the_payload(workers, method):
    for worker in workers:
        assert 0 < worker[method]["tensor bytes"] <= worker[method]["payload bytes"]


def test_survivor_of_a_sum_ends_with_a_named_error():
    """Kills a worker in a sum; test_lost_workers.py does so in a gather and in a broadcast."""
    survivor, dead = run_workers(PROGRAM, 2, ["killed", "no_compression"], check=False)
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, None)
    assert "tensorflow.python.framework.errors_impl.UnavailableError" in survivor.stderr


@pytest.mark.parametrize("method", STATES)
def test_more_workers_resume_from_a_backup(workers, resumed, method):
    saved = workers[0][method]
    for worker in resumed:
        after = worker[method]
        assert after["epochs"] == [1]
        assert after["values"] == saved["values"]
        assert set(after["state"]) == set(saved["state"])
        for name, variables in saved["state"].items():
            for restored, before in zip(after["state"][name], variables, strict=True):
                assert_close(restored, before, terms=3 + 1)  # a third of it, three times
        assert after["skipped"] == 1
        assert after["weights"] == resumed[0][method]["weights"]


@quick
@pytest.mark.parametrize("method", SUMMING)
def test_sums_count_as_sent_in_a_ring(workers, method):
    for worker in workers:
        seen = worker[method]
        tag = {4: 4, 2: 8}[4 // SUMMING[method]]  # bytes, at most
        assert 0 < seen["payload bytes"] - seen["dense bytes"] / SUMMING[method] <= tag
        assert seen["sent bytes"] == pytest.approx(seen["payload bytes"], abs=2)  # of two workers


@quick
@pytest.mark.parametrize(("method", "dtype"), [("cast", "float16"), ("bfloat16", "bfloat16")])
def test_casting_trains_as_without_compression(workers, method, dtype):
    # Both workers round their gradients, and so does the sum.
    bound = training(RATE, terms=3, steps=STEPS, dtype=dtype)
    for worker in workers:
        for cast, dense in zip(
            worker[method]["values"], worker["no_compression"]["values"], strict=True
        ):
            np.testing.assert_allclose(cast, dense, rtol=0, atol=bound)


if __name__ == "__main__":
    mode = argument(1)
    if mode == "killed":
        killed(argument(2))
    elif mode == "train":
        report({name: train(argument(2), name) for name in COMPRESSORS})
    else:
        report({name: resume(argument(2), name) for name in sys.argv[3:]})
