"""The models that the network benchmark trains with TensorFlow, and the data of each worker."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jobs
import keras
import numpy as np
import tensorflow as tf

sys.path.append(str(Path(__file__).resolve().parents[1] / "keras_examples"))

import char_lstm
import texts

Batches = Iterator[tuple[tf.Tensor, tf.Tensor]]

_IMAGES = {jobs.MLP: (jobs.MLP_LAYERS[0],), jobs.RESNET: (32, 32, 3)}


def build(job: str) -> keras.Model:
    """Returns the model of a job, with the same weights in each call."""
    keras.utils.set_random_seed(0)
    if job == jobs.MLP:
        return _mlp()
    return char_lstm.build_model(len(texts.ALPHABET)) if job == jobs.LSTM else resnet()


def batches(job: str, rank: int) -> Batches:
    """Yields a worker's inputs and labels endlessly."""
    return itertools.cycle(_batches(job, rank))


def has_embedding(variables: Sequence[keras.Variable]) -> bool:
    """Returns whether a model has an embedding, whose gradient is gathered and not counted."""
    return any(variable.path.endswith("/embeddings") for variable in variables)


@functools.cache
def _batches(job: str, rank: int) -> list[tuple[tf.Tensor, ...]]:
    arrays = _text(rank) if job == jobs.LSTM else jobs.images(job, _IMAGES[job], rank)
    tensors = [[tf.constant(batch) for batch in array] for array in arrays]
    return list(zip(*tensors, strict=True))


def _text(rank: int) -> tuple[np.ndarray, np.ndarray]:
    size = jobs.BATCHES * jobs.BATCH_SIZES[jobs.LSTM]
    inputs, labels = (
        array[rank * size : (rank + 1) * size] for array in texts.sequences(texts.load(None)[0])
    )
    return tuple(array.reshape(jobs.BATCHES, -1, texts.SEQUENCE) for array in (inputs, labels))


def _mlp() -> keras.Model:
    first, *hidden, last = jobs.MLP_LAYERS
    layers = [keras.layers.Dense(units, activation="relu") for units in hidden]
    return keras.Sequential([keras.Input((first,)), *layers, keras.layers.Dense(last)])


def resnet() -> keras.Model:
    """Returns He et al.'s ResNet-20 for small images, with 0.27 million weights."""
    images = keras.Input(_IMAGES[jobs.RESNET])
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
