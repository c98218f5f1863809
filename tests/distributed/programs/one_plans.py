"""Trains by L-GreCo with a plan after each epoch, which worker 1 knows nothing of."""

import keras
from common import Setup, digits

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
