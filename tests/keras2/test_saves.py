"""Jobs of Keras 2 resume from their saves in each format, with residuals."""

import os
from pathlib import Path

import pytest

from tests.keras2.common import compiled, fit, new_strategy
from tests.keras2.jobs import (
    HAS_ADDONS,
    RESTORED,
    by_horovod,
    by_strategy,
    needs_horovod,
    tf_keras,
)
from tests.keras2.optimizers import OPTIMIZERS
from tests.keras2.saving import folder_of_rank, loaded, saved, seen
from tests.ranks import argument, compressed, data, digest, report

PROGRAM = Path(__file__)  # each worker runs this file
LATER = ("h5", "checkpoint")  # of those, the ones that it trains on with


def optimizer_saves(name, strategy):
    def make():
        return compressed(OPTIMIZERS[name](), "adacomp")

    model = compiled(make, strategy)
    fit(model, *data(4))
    before = seen(model)
    result = {"before": before}
    for form in FORMATS:
        other = loaded(saved(model, name, form), form, make, strategy)
        result[form] = seen(other)
        if form in LATER:
            fit(other, *data(3, seed=2))
            result[f"{form}, later"] = digest(other.trainable_variables)
    return result


SAVED = ["Adam", "MovingAverage"] if HAS_ADDONS else ["Adam"]
FORMATS = ["h5", "keras", "tf", "checkpoint"]


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    return by_strategy(PROGRAM, tmp_path_factory.mktemp("saves"), ",".join(SAVED))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", SAVED)
def test_a_job_resumes_from_its_save(saves, name, form):
    first, second = (worker[name] for worker in saves)
    assert sum(first["before"]["residuals"]) > 0
    for worker in (first, second):
        assert worker[form] == {
            **first["before"],
            "residuals": pytest.approx(first["before"]["residuals"], rel=RESTORED),
        }
    if form in ("h5", "checkpoint"):
        assert first[f"{form}, later"] == second[f"{form}, later"]


@tf_keras
@needs_horovod
def test_ranks_of_horovod_resume_from_a_save(tmp_path):
    workers = by_horovod(PROGRAM, tmp_path, "legacy Adam")
    for form in FORMATS:
        test_a_job_resumes_from_its_save(workers, "legacy Adam", form)


if __name__ == "__main__":
    os.makedirs(folder_of_rank())
    strategy = new_strategy()
    report({name: optimizer_saves(name, strategy) for name in argument(2).split(",")})
