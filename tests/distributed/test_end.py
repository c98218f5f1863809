"""Tests the normal teardown of Python at the end of a job, as users have it."""

import pytest

from tests.workers import run_workers

PROGRAM = """
import os, pathlib, sys, time
*_, way = sys.argv
if "itself" not in sys.argv:  # programs of other tests are gone at once: see tests/preloaded.py
    python = os.environ["PRELOADED_PYTHON"]
    os.execv(python, [python, __file__, "itself", way])

import keras, numpy as np, tf_gradcomp as gc

compressor = "top_k" if way == "strategy" else None
strategy = gc.MultiWorkerMirroredStrategy(compressor=compressor)
other = pathlib.Path(__file__).with_name("other.pid")
if not gc.is_chief(strategy):
    other.write_text(str(os.getpid()))
x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
models = []  # still there when Python ends
for method in ["adacomp", "power_sgd"]:
    with strategy.scope():
        optimizer = keras.optimizers.Adam()
        if way == "optimizer":
            optimizer = gc.CompressedOptimizer(optimizer, method)
        models.append(keras.Sequential([keras.layers.Dense(16), keras.layers.Dense(1)]))
        models[-1].compile(optimizer=optimizer, loss="mse")
    monitor = gc.callbacks.CompressionMonitor()
    models[-1].fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[monitor])
print("trained", flush=True)
if gc.is_chief(strategy):  # ends last: the other may log an error if it outlives the chief
    while os.path.exists(f"/proc/{other.read_text()}"):
        time.sleep(0.05)
"""


@pytest.mark.parametrize("way", ["optimizer", "strategy"])
def test_python_tears_down_a_job_silently(way):
    for worker in run_workers(PROGRAM, args=[way]):
        assert worker.stdout.endswith("trained")
        lines = [line for line in worker.stderr.splitlines() if "oneDNN" not in line]
        assert not [line for line in lines if "rror" in line or "race" in line]
