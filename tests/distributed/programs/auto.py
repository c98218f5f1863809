"""Chooses a compressor by a probe, in both ways; and says what `gc.advise` says: WAY."""

import keras
from common import Setup, dense_model, digits, state_digest

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
