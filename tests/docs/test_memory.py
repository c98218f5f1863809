"""The page on memory says what each method keeps."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest

import tf_gradcomp as gc
from tests.replicas import collective, method_names

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "memory.md").read_text()


def stated():
    """The number of copies by compressor, as the first table has it."""
    listed = [
        (name, int(copies))
        for names, copies in re.findall(r"^\| (`.+`) \| (\d) \|", PAGE, re.M)
        for name in re.findall("`(.+?)`", names)
    ]
    (default,) = re.findall(r"^\| any method that is not listed here \| (\d) \|", PAGE, re.M)
    named = {name.partition("(")[0] for name, _ in listed}
    return [*listed, *((name, int(default)) for name in method_names() if name not in named)]


def copies_of_the_model(compressor, inner, **settings):
    with collective().scope():
        layers = [keras.layers.Dense(256), keras.layers.Dense(256), keras.layers.Dense(8)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        optimizer = gc.CompressedOptimizer(inner(**settings), compressor)
        optimizer.build(model.trainable_variables)
    state = optimizer.exchange.state.values()
    elements = sum(int(np.prod(variable.shape)) for kept in state for variable in kept)
    return elements / model.count_params()


@pytest.mark.parametrize(("compressor", "copies"), stated())
def test_a_method_keeps_as_many_copies_as_stated(compressor, copies):
    assert copies <= copies_of_the_model(compressor, keras.optimizers.SGD) < copies + 0.1


@pytest.mark.parametrize("compressor", ["no_compression", "adacomp"])
def test_adam_adds_one_copy_and_amsgrad_two(compressor):
    without = copies_of_the_model(compressor, keras.optimizers.SGD)
    assert copies_of_the_model(compressor, keras.optimizers.Adam) == without + 1
    assert copies_of_the_model(compressor, keras.optimizers.Adam, amsgrad=True) == without + 2
