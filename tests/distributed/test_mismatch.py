"""Workers that differ end with an error that names the difference."""

import sys
from pathlib import Path

import keras
import pytest

import tf_gradcomp as gc
from tests.distributed.common import digits
from tests.ranks import RANK, report
from tests.replicas import method_names
from tests.workers import results, run_workers
from tf_gradcomp import compressors
from tf_gradcomp.groups import agreement
from tf_gradcomp.private import tensorflow as tf_private

PROGRAM = Path(__file__)  # each worker runs this file
ODD = RANK == 1
x, y = digits(64, features=8)


def strategy_with(**kwargs):
    return gc.MultiWorkerMirroredStrategy(**kwargs)


def versions():
    original = agreement.package_versions
    if ODD:
        agreement.package_versions = lambda: {**original(), "keras": "1.2.3"}
    strategy_with()


def settings_of_the_strategy():
    strategy_with(compressor=gc.compressors.AdaComp(50 if ODD else 500), two_level=not ODD)


def replicas_of_each():
    """As where a GPU of a machine is broken."""
    tf_private.use_logical_cpus(1 if ODD else 2)
    strategy_with()


def train(strategy, layers=2, classes=3, optimizer=None, rows=64, call="fit", **fit_arguments):
    keras.backend.clear_session()
    with strategy.scope():
        hidden = [keras.layers.Dense(8) for _ in range(layers)]
        model = keras.Sequential([keras.layers.Input((8,)), *hidden, keras.layers.Dense(classes)])
        model.compile(
            optimizer() if optimizer else gc.CompressedOptimizer("adam"),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return getattr(model, call)(x[:rows], y[:rows], batch_size=32, verbose=0, **fit_arguments)


class MoreSlots(keras.optimizers.SGD):
    """Has one more variable on a worker whose program is another version."""

    def build(self, variables):
        super().build(variables)
        if ODD:
            self.more = self.add_variable((3,), name="more")


# For each method two settings that workers may not have side by side.
C = gc.compressors
METHODS = {
    **{name: (C.get(name), C.get(f"{name}(warmup_steps=1)")) for name in method_names()},
    "auto": (C.Auto(["cast"]), C.Auto(["cast", "adacomp"])),
    "adacomp": (C.AdaComp(7), C.AdaComp(8)),
    "cast": (C.Cast("float16"), C.Cast("bfloat16")),
    "lgc": (C.LGC(), C.LGC(guard=0.4)),
    "lgreco": (C.LGreCo(), C.LGreCo("qsgd")),
    "power_sgd": (C.PowerSGD(1), C.PowerSGD(2)),
    "qsgd": (C.QSGD(4), C.QSGD(8)),
    "random_k": (C.RandomK(0.1), C.RandomK(0.2)),
    "scalecom": (C.ScaleCom(beta=0.1), C.ScaleCom(beta=1.0)),
    "top_k": (C.TopK(0.1), C.TopK(0.2)),
}
MODELS = {
    "more layers": lambda s: train(s, layers=3 if ODD else 2),
    "fewer layers": lambda s: train(s, layers=1 if ODD else 2),
    "classes": lambda s: train(s, classes=4 if ODD else 3),
    "inner optimizer": lambda s: train(
        s, optimizer=lambda: gc.CompressedOptimizer("sgd" if ODD else "adam")
    ),
    "clipping": lambda s: train(
        s,
        optimizer=lambda: gc.CompressedOptimizer(
            keras.optimizers.SGD(clipnorm=1.0 if ODD else 2.0)
        ),
    ),
    "slots": lambda s: train(s, optimizer=lambda: gc.CompressedOptimizer(MoreSlots())),
    "reduction": lambda s: train(
        s, optimizer=lambda: gc.CompressedOptimizer("sgd", reduction="mean" if ODD else "sum")
    ),
    "wrapped": lambda s: train(
        s, optimizer=lambda: "sgd" if ODD else gc.CompressedOptimizer("sgd")
    ),
    "policy": lambda s: train(
        s,
        optimizer=lambda: gc.CompressedOptimizer(
            "sgd", policy=gc.Policy(max_dense_elements=5 if ODD else 6)
        ),
    ),
    "rows": lambda s: train(s, rows=64 if ODD else 32),
    "rows for validation": lambda s: train(s, validation_data=(x[32 * ODD :], y[32 * ODD :])),
    "call": lambda s: train(s, call="evaluate" if ODD else "fit", rows=64 if ODD else 32),
    "steps": lambda s: train(s, steps_per_epoch=1 + ODD),
    **{
        name: lambda s, two=two: train(s, optimizer=lambda: gc.CompressedOptimizer("sgd", two[ODD]))
        for name, two in METHODS.items()
    },
}
STRATEGIES = {
    "versions": versions,
    "settings of the strategy": settings_of_the_strategy,
    "replicas of each": replicas_of_each,
}


def models():
    """Runs each check; workers that raise at the same place can continue together."""
    strategy = strategy_with()
    return {name: ending(lambda run=run: run(strategy)) for name, run in MODELS.items()}


def ending(run):
    try:
        run()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": None, "text": ""}


@pytest.fixture(scope="module")
def mismatches():
    return results(run_workers(PROGRAM, 2, ["models"]))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("more layers", "creating variable"),
        ("fewer layers", "creating variable"),
        ("classes", "(8, 4)"),
        ("inner optimizer", "inner optimizer's class: worker 0 has '\"Adam\"'"),
        ("clipping", "inner optimizer's clipnorm: worker 0 has '2.0', worker 1 has '1.0'"),
        ("slots", "more: worker 0 has nothing, worker 1 has '(3,) float32'"),
        ("reduction", "reduction: worker 0 has 'sum', worker 1 has 'mean'"),
        ("wrapped", "creating variable"),
        ("policy", "max_dense_elements"),
        ("rows", "number of batches (for data of unequal sizes: dataset.repeat()"),
        ("rows for validation", "number of batches"),
        ("call", "next action: worker 0 has 'fit', worker 1 has 'evaluate'; number of batches"),
        ("steps", "worker 0 has 1, worker 1 has 2"),
        *((method, "compressor") for method in compressors.names()),
    ],
)
def test_every_worker_reports_the_difference_in(mismatches, what, named):
    for worker in mismatches:
        assert worker[what]["error"] == "WorkersDisagreeError"
        assert named in worker[what]["text"]
        assert "worker 0 has" in worker[what]["text"]
        assert "worker 1 has" in worker[what]["text"]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("versions", ["keras: "]),
        (
            "settings of the strategy",
            ["compressor of the strategy: ", "two_level: worker 0 has True"],
        ),
        ("replicas of each", ["replicas in a worker: worker 0 has 2, worker 1 has 1"]),
    ],
)
def test_every_worker_ends_when_they_differ_in(what, named):
    for worker in run_workers(PROGRAM, 2, [what], check=False):
        assert worker.returncode == 1
        last = worker.stderr.rstrip().splitlines()[-1]
        assert "WorkersDisagreeError" in last
        assert all(name in last for name in named)


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "models":
        report(models())
    else:
        STRATEGIES[what]()
