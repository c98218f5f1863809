"""What the network benchmark trains and exchanges with TensorFlow: models, data and gradients."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import turns

sys.path.append(str(Path(__file__).resolve().parent / "programs"))

import char_lstm
import texts

Batches = Iterator[tuple[tf.Tensor, tf.Tensor]]
Reduction = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]

_IMAGES = {turns.MLP: (turns.MLP_LAYERS[0],), turns.RESNET: (32, 32, 3)}


def build(job: str) -> keras.Model:
    """Returns the model of a job, with the same weights in each call."""
    keras.utils.set_random_seed(0)
    if job == turns.MLP:
        return _mlp()
    return char_lstm.build_model(len(texts.ALPHABET)) if job == turns.LSTM else _resnet()


def batches(job: str, rank: int) -> Batches:
    """Yields a worker's inputs and labels endlessly."""
    return itertools.cycle(_batches(job, rank))


def has_embedding(variables: Sequence[keras.Variable]) -> bool:
    """Returns whether a model has an embedding, whose gradient is gathered and not counted."""
    return any(variable.path.endswith("/embeddings") for variable in variables)


@functools.cache
def _batches(job: str, rank: int) -> list[tuple[tf.Tensor, ...]]:
    arrays = _text(rank) if job == turns.LSTM else turns.images(job, _IMAGES[job], rank)
    tensors = [[tf.constant(batch) for batch in array] for array in arrays]
    return list(zip(*tensors, strict=True))


def _text(rank: int) -> tuple[np.ndarray, np.ndarray]:
    size = turns.BATCHES * turns.BATCH_SIZES[turns.LSTM]
    inputs, labels = (
        array[rank * size : (rank + 1) * size] for array in texts.sequences(texts.load(None)[0])
    )
    return tuple(array.reshape(turns.BATCHES, -1, texts.SEQUENCE) for array in (inputs, labels))


def _mlp() -> keras.Model:
    first, *hidden, last = turns.MLP_LAYERS
    layers = [keras.layers.Dense(units, activation="relu") for units in hidden]
    return keras.Sequential([keras.Input((first,)), *layers, keras.layers.Dense(last)])


def _resnet() -> keras.Model:
    """Returns He et al.'s ResNet-20 for small images, with 0.27 million weights."""
    images = keras.Input(_IMAGES[turns.RESNET])
    x = _convolution(images, 16)
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        x = _block(x, filters, strides)
        for _ in range(2):
            x = _block(x, filters, 1)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, keras.layers.Dense(10)(x))


def _block(x: keras.KerasTensor, filters: int, strides: int) -> keras.KerasTensor:
    y = _convolution(x, filters, strides)
    y = _convolution(y, filters, relu=False)
    if strides > 1:
        x = _convolution(x, filters, strides, kernel=1, relu=False)
    return keras.layers.ReLU()(x + y)


def _convolution(
    x: keras.KerasTensor, filters: int, strides: int = 1, kernel: int = 3, relu: bool = True
) -> keras.KerasTensor:
    x = keras.layers.Conv2D(filters, kernel, strides, padding="same", use_bias=False)(x)
    x = keras.layers.BatchNormalization()(x)
    return keras.layers.ReLU()(x) if relu else x


class Gradients:
    """The gradients of a step, a different stream on each worker.

    Gradients are distributed as in AdaComp's acceptance test: each weight has a mean, drawn once
    from N(0, 0.02^2), and noise of scale 0.3 in each step. The noise is drawn once as a long
    vector, which each step reads from another offset, because drawing it would take longer than
    most exchanges.
    """

    def __init__(self, variables: Sequence[keras.Variable], seed: int) -> None:
        self._sizes = [math.prod(variable.shape) for variable in variables]
        self._random = tf.random.Generator.from_seed(seed)
        self._noise = self._random.normal([sum(self._sizes) + turns.NOISE_PLACES], stddev=0.3)
        self._means = [tf.random.normal(variable.shape, stddev=0.02) for variable in variables]
        self.values = [tf.Variable(mean) for mean in self._means]
        shapes = [mean.shape for mean in self._means]
        self._handed_over = tf.queue.FIFOQueue(1, [tf.float32] * len(shapes), shapes)

    @tf.function(autograph=False)
    def draw(self) -> None:
        """Draws the gradients of the next step."""
        start = self._random.uniform([], maxval=turns.NOISE_PLACES, dtype=tf.int32)
        noise = tf.split(self._noise[start : start + sum(self._sizes)], self._sizes)
        for mean, part, value in zip(self._means, noise, self.values, strict=True):
            value.assign(mean + tf.reshape(part, mean.shape))

    @tf.function(autograph=False)
    def hand_over(self) -> None:
        """Draws the gradients of the next step, for `take`."""
        self.draw()
        self._handed_over.enqueue([tf.raw_ops.DeepCopy(x=value) for value in self.values])

    def take(self) -> list[tf.Tensor]:
        """Returns the gradients that `draw` has prepared.

        As after a backward pass, nothing else uses their memory.
        """
        taken = self._handed_over.dequeue()
        return list(taken) if isinstance(taken, (list, tuple)) else [taken]


def on_replica(
    strategy: tf.distribute.Strategy,
    reduction: Reduction,
    take: Callable[[], Sequence[tf.Tensor]],
) -> Callable[[], object]:
    """Returns a function that reduces the gradients on all replicas.

    The function takes the gradients itself, because Python takes milliseconds to pass so many
    arguments.
    """
    return tf.function(
        lambda: strategy.run(lambda: reduction(take())),
        autograph=False,
    )


def all_reduce(gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """The sum over the replicas, as TensorFlow computes it."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)


def all_reduce_float16(gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """The sum over the replicas of numbers rounded to 16 bits."""
    totals = all_reduce([tf.cast(gradient, tf.float16) for gradient in gradients])
    return [tf.cast(total, tf.float32) for total in totals]


def mean_over_workers(strategy: tf.distribute.Strategy) -> Callable[[float], float]:
    """Returns the mean of a number over the workers, once all workers have called this."""

    def mean(value: tf.Tensor) -> tf.Tensor:
        placed = tf.identity(value)  # an argument is on no device
        return tf.distribute.get_replica_context().all_reduce("mean", placed)

    on_all = tf.function(lambda number: strategy.run(mean, (number,)), autograph=False)
    local = strategy.experimental_local_results
    return lambda number: float(local(on_all(tf.constant(number, tf.float32)))[0])
