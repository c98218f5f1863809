"""The optimizers of these tests, by name."""

import importlib.util

import tensorflow as tf

keras = tf.keras
legacy = keras.optimizers.legacy

EPSILON = 0.05  # of Adam, for `tests.bounds.training`
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(1e-2, epsilon=EPSILON),
    "AdamW": lambda: keras.optimizers.AdamW(1e-2, epsilon=EPSILON),
    "Nadam": lambda: keras.optimizers.Nadam(1e-2, epsilon=EPSILON),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "EMA": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "loss scale": lambda: keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=16
    ),
    "legacy SGD": lambda: legacy.SGD(0.1, momentum=0.9),
    "legacy Adam": lambda: legacy.Adam(1e-2, epsilon=EPSILON),
    "legacy Nadam": lambda: legacy.Nadam(1e-2, epsilon=EPSILON),
    "legacy clipnorm": lambda: legacy.SGD(0.1, clipnorm=0.05),
    "legacy loss scale": lambda: keras.mixed_precision.LossScaleOptimizer(
        legacy.SGD(0.1), initial_scale=16
    ),
}
if importlib.util.find_spec("tensorflow_addons"):
    import tensorflow_addons as tfa

    OPTIMIZERS |= {
        "LAMB": lambda: tfa.optimizers.LAMB(1e-2, epsilon=EPSILON),
        "LazyAdam": lambda: tfa.optimizers.LazyAdam(1e-2, epsilon=EPSILON),
        "tfa AdamW": lambda: tfa.optimizers.AdamW(1e-3, 1e-2, epsilon=EPSILON),
        "RectifiedAdam": lambda: tfa.optimizers.RectifiedAdam(1e-2, epsilon=EPSILON),
        "MovingAverage": lambda: tfa.optimizers.MovingAverage(
            tfa.optimizers.LAMB(1e-2, epsilon=EPSILON)
        ),
        "SWA": lambda: tfa.optimizers.SWA(legacy.Adam(1e-2, epsilon=EPSILON), 2, 2),
        "Lookahead": lambda: tfa.optimizers.Lookahead(
            tfa.optimizers.LazyAdam(1e-2, epsilon=EPSILON), 3
        ),
        "SWA of Lookahead": lambda: tfa.optimizers.SWA(
            tfa.optimizers.Lookahead(tfa.optimizers.LAMB(1e-2, epsilon=EPSILON), 3), 2, 2
        ),
    }


def layer_optimizers():
    """Returns optimizers that identify the layers of `words_model` by the names of weights."""
    if not importlib.util.find_spec("tensorflow_addons"):
        return {}

    def multi_optimizer():
        dense = [
            f"{layer}/{kind}:0" for layer in ("dense", "dense_1") for kind in ("kernel", "bias")
        ]
        first = {
            "optimizer": legacy.Adam(1e-2, epsilon=EPSILON),
            "weights": ["embedding/embeddings:0"],
        }
        others = {"optimizer": legacy.SGD(0.1), "weights": dense}
        return tfa.optimizers.MultiOptimizer(optimizer_specs=[first, others])

    return {"MultiOptimizer": multi_optimizer}
