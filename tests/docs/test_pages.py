"""Tests the programs of the documentation's pages on two workers against the pages' text."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import training
from tests.docs import programs
from tests.workers import OPTIMIZED, results, run_workers

PAGES = [*programs.SECTIONS, "checkpoints", "data"]
ROWS_OF_FILES = (40, 200, 90)
# SGD(0.05) on a squared error, whose curvature is 2. A gradient is the mean of 2 (prediction - y) x
# over 32 rows, whose terms are 8 on average at most, and a prediction is a sum over 8 inputs.
TRAINED = training(gain=2 * 0.05, terms=32 + 8, steps=3 * 8, gradients=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def found(folder):
    """Returns the findings of two workers, by page."""
    random = np.random.default_rng(1)
    for index, rows in enumerate(ROWS_OF_FILES):
        with tf.io.TFRecordWriter(str(folder / f"{index}.tfrecord")) as writer:
            for x in random.normal(size=(rows, 8)).astype("float32"):
                writer.write(example(x=x, y=[x.sum()]))
    args = [",".join(PAGES), folder]
    workers = run_workers(Path(programs.__file__), args=args, env=OPTIMIZED)
    return results(workers)


def example(**features):
    lists = {
        name: tf.train.Feature(float_list=tf.train.FloatList(value=values))
        for name, values in features.items()
    }
    return tf.train.Example(features=tf.train.Features(feature=lists)).SerializeToString()


@pytest.mark.parametrize("page", PAGES)
def test_all_workers_train_the_same_model(found, page):
    chief, other = (report[page]["weights"] for report in found)
    assert chief == other
    assert np.isfinite(chief).all()


@pytest.mark.parametrize(
    "page",
    [
        *("train_step", "several_models", "fine_tuning", "learning_rate", "precision", "fit"),
        "muon",
    ],
)
def test_the_loss_falls(found, page):
    losses = found[0][page]["losses"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_a_train_step_on_two_workers_trains_as_in_one_process(found):
    single = programs.given(tf.distribute.get_strategy(), None)
    for weights, expected in zip(
        found[0]["train_step"]["uncompressed"],
        programs.train_step_uncompressed(single),
        strict=True,
    ):
        np.testing.assert_allclose(weights, expected, rtol=0, atol=TRAINED)


def test_both_optimizers_of_a_gan_exchange_compressed(found):
    gan = found[0]["gan"]
    assert gan["compressors"] == ["adacomp", "cast"]
    assert gan["exchanges"] == [16, 16]
    assert all(gan["smaller"])
    assert gan["metrics"] == ["discriminator_loss", "generator_loss"]


def test_several_models_train_in_one_program(found):
    models = found[0]["several_models"]
    assert models["rows"] == 1024
    assert len(models["together"]) == 16
    assert models["together"][-1] < models["together"][0]


def test_gradients_of_frozen_layers_are_not_sent(found):
    assert found[0]["fine_tuning"]["elements"] == [33, 33 + 8 * 32 + 32]


def test_fit_stops_early_on_all_workers(found):
    chief, other = (report["fit"]["epochs"] for report in found)
    assert chief == other < 20


def test_the_schedule_ends_with_the_training(found):
    assert found[0]["learning_rate"]["rate"] == 0
    assert found[0]["learning_rate"]["steps"] == 80


def test_accumulation_exchanges_at_every_second_step(found):
    assert found[0]["precision"]["outer"] == "LossScaleOptimizer"
    assert found[0]["precision"]["exchanges"] == 4 * 8 // 2


def test_a_model_predicts_the_same_without_its_wrapper(found):
    for report in found:
        assert report["checkpoints"]["rows"] == 1024
        assert report["checkpoints"]["difference"] == 0
        assert report["checkpoints"]["optimizer"] == "Adam"


def test_the_inner_optimizer_continues_alone(found, folder):
    names = programs.given(tf.distribute.get_strategy(), folder)
    exec(programs.code("checkpoints", single=True), names)
    adam = names["again"].optimizer
    assert type(adam) is keras.optimizers.Adam
    assert all(np.max(velocity.numpy()) > 0 for velocity in adam._velocities)
    before = names["again"].evaluate(names["x"], names["y"], verbose=0)
    names["again"].fit(names["x"], names["y"], batch_size=32, verbose=0)
    assert names["again"].evaluate(names["x"], names["y"], verbose=0) < before


def test_all_workers_shuffle_alike(found):
    chief, other = (report["data"]["first"] for report in found)
    assert chief == other


def test_kernels_of_attention_are_orthogonalized_as_matrices(found):
    adam = found[0]["muon"]["adam"]
    assert len([path for path in adam if path.endswith("bias")]) == len(adam) - 1 == 1 + 4 + 1
    assert "logits/kernel" in adam
    model = programs.attention()
    kernels = [v for v in model.trainable_variables if len(v.shape) == 3]
    assert len(kernels) == 4
    for kernel in kernels:
        width = kernel.shape[-1] if "attention_output" in kernel.path else kernel.shape[0]
        shape = (-1, width) if "attention_output" in kernel.path else (width, -1)
        start = kernel.numpy()
        matrix = keras.Variable(start.reshape(shape))
        flat, optimizer = keras.optimizers.Muon(0.02), programs.AttentionMuon(0.02)
        for seed in range(3):
            gradient = np.random.default_rng(seed).normal(size=kernel.shape).astype("float32")
            optimizer.apply([gradient], [kernel])
            flat.apply([gradient.reshape(shape)], [matrix])
        np.testing.assert_array_equal(kernel.numpy().reshape(matrix.shape), matrix.numpy())
        assert np.any(kernel.numpy() != start)
