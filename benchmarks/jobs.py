"""Jobs of the network benchmark, as far as all frameworks share them."""

from __future__ import annotations

import numpy as np

NAMES = EXCHANGE, MLP, LSTM, RESNET = "exchange", "mlp", "lstm", "resnet"

TWO_LEVELS = "two levels"  # of two_levels.py

ALL_REDUCE, FLOAT16, NOTHING = "all-reduce", "float16 all-reduce", "no communication"
GOSSIP = "gossip"  # on a ring, by rank 1: see docs/gossip.md
TORCH_ALL_REDUCE = "PyTorch DDP"
TORCH_FLOAT16 = "PyTorch DDP, fp16 hook"
TORCH_POWER_SGD = "PyTorch DDP, PowerSGD hook"
TORCH = (TORCH_ALL_REDUCE, TORCH_FLOAT16, TORCH_POWER_SGD)
HOROVOD_ALL_REDUCE = "Horovod"
HOROVOD_FLOAT16 = "Horovod, fp16"
HOROVOD_ADACOMP = "Horovod, adacomp"
HOROVOD = (HOROVOD_ALL_REDUCE, HOROVOD_FLOAT16, HOROVOD_ADACOMP)
TENSORFLOW_NAME, HOROVOD_NAME, TORCH_NAME = "TensorFlow", "Horovod", "PyTorch"
BACKENDS = {  # the module of each, which worker.py imports
    TENSORFLOW_NAME: "tensorflow_backend",
    HOROVOD_NAME: "horovod_backend",
    TORCH_NAME: "torch_backend",
}
DENSE = {  # what the others of their framework are compared with
    TENSORFLOW_NAME: ALL_REDUCE,
    HOROVOD_NAME: HOROVOD_ALL_REDUCE,
    TORCH_NAME: TORCH_ALL_REDUCE,
}

MLP_LAYERS = (784, 1024, 1024, 512, 10)
LEARNING_RATE, MOMENTUM = 0.01, 0.9
BATCHES = 64
NOISE_PLACES = 1_000_000  # where the noise of a gradient may begin: see gradients.py
BATCH_SIZES = {MLP: 64, LSTM: 16, RESNET: 16}  # of each worker


def framework(contender: str) -> str:
    """Returns the framework that runs a contender in separate processes, a key of `DENSE`."""
    if contender in HOROVOD:
        return HOROVOD_NAME
    return TORCH_NAME if contender in TORCH else TENSORFLOW_NAME


def images(job: str, shape: tuple[int, ...], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Batches of a worker: [batches, samples, *shape] around ten means, and which of them it is.

    The means are near each other, so that there is still something to learn when it is measured.
    """
    means = 0.1 * np.random.default_rng(0).normal(size=(10, *shape))
    random = np.random.default_rng(1 + rank)
    labels = random.integers(10, size=(BATCHES, BATCH_SIZES[job]))
    pixels = means[labels] + random.normal(size=(*labels.shape, *shape))
    return pixels.astype(np.float32), labels.astype(np.int64)


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The shapes of all weights of keras.applications.ResNet50, in some order."""

    def convolution(kernel: int, inputs: int, outputs: int) -> list[tuple[int, ...]]:
        vectors = [(outputs,)] * 3  # the bias, and the scale and offset of its normalization
        return [(kernel, kernel, inputs, outputs), *vectors]

    shapes, inputs = convolution(7, 3, 64), 64
    for blocks, filters in ((3, 64), (4, 128), (6, 256), (3, 512)):
        shapes += convolution(1, inputs, 4 * filters)
        for _ in range(blocks):
            shapes += convolution(1, inputs, filters) + convolution(3, filters, filters)
            shapes += convolution(1, filters, 4 * filters)
            inputs = 4 * filters
    return [*shapes, (inputs, 1000), (1000,)]
