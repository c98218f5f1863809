"""The variables, gradients and settings of the tests of Muon in rounds; workers use them, too."""

import numpy as np

PATHS = ["tall", "wide", "embedding", "bias"]
SHAPES = [(8, 4), (4, 6), (5, 4), (8,)]
SETTINGS = {"learning_rate": 2.0**-5, "weight_decay": 0.5, "adam_weight_decay": 0.25}
OUTER = {"learning_rate": 0.75, "momentum": 0.875}
METHODS = {
    "no_compression": "no_compression",
    "top_k": "top_k(density=0.25)",
    "qsgd": "qsgd(bits=2, bucket_size=32)",
}
CLIPS = {"clipnorm": 4.0, "global_clipnorm": 8.0}
STEPS = 3  # of a round


def initial():
    """Returns the initial weights."""
    rng = np.random.default_rng(2)
    return [rng.normal(size=shape).astype("float32") for shape in SHAPES]


def gradients(steps, seed=3):
    """Returns each worker's share of the gradients: [step][worker][variable]."""
    rng = np.random.default_rng(seed)
    return [
        [[rng.normal(size=shape).astype("float32") for shape in SHAPES] for _ in range(2)]
        for _ in range(steps)
    ]


def of_different_sizes(steps):
    """Returns steps whose gradients differ in size, so that clipping changes the momentum."""
    return [
        [[size * gradient for gradient in gradients] for gradients in worker_gradients]
        for size, worker_gradients in zip((1.0, 0.125, 16.0, 0.25), steps, strict=True)
    ]


def with_missing(steps):
    """Returns steps without gradients of some variables, the same on both workers."""
    for step, index in ((0, 0), (1, 2), (1, 3), (4, 1)):
        for worker_gradients in steps[step]:
            worker_gradients[index] = None
    return steps
