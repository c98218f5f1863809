"""Learners in one process; that they train as real workers do is in tests/distributed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_gradcomp as gc

BATCH = 64


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype("float32"), y.astype("int32")


def new_model(optimizer=None, **compile_args):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(100, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss=loss, **compile_args)
    return model


def batches(digits):
    return tf.data.Dataset.from_tensor_slices(digits).batch(BATCH, drop_remainder=True)


def test_one_learner_without_compression_is_keras_own_training(digits):
    alone, simulated = new_model(), new_model()
    alone.fit(batches(digits), shuffle=False, verbose=0)
    gc.simulation.Learners(simulated, 1, "no_compression").fit(batches(digits))
    for expected, actual in zip(alone.variables, simulated.variables, strict=True):
        np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("learners", [2, 16])
def test_learners_share_a_batch_as_one_would_take_it(digits, learners):
    alone, shared = new_model(), new_model()
    first = gc.simulation.Learners(alone, 1, "no_compression").fit(batches(digits))
    second = gc.simulation.Learners(shared, learners, "no_compression").fit(batches(digits))
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
    for expected, actual in zip(alone.variables, shared.variables, strict=True):
        np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("learners", [2, 8])
def test_compressed_training_learns_and_counts(digits, learners):
    model = new_model(keras.optimizers.SGD(0.1, momentum=0.9), metrics=["accuracy"])
    history = gc.simulation.Learners(model, learners).fit(
        batches(digits), epochs=6, validation_data=digits
    )
    assert history["val_accuracy"][-1] > 0.9
    assert history["compression_ratio"][-1] > 40
    assert history["skipped_steps"] == [0] * 6
    assert history["residual_norm"][-1] > 0
    # A ring passes on the payloads of all others but one.
    assert history["sent_bytes"][-1] >= (learners - 1) * history["payload_bytes"][-1]
    assert history["sent_bytes"][-1] < (learners - 1) * history["dense_bytes"][-1]


def test_what_is_summed_does_not_grow_with_the_number_of_learners(digits):
    sent = [
        gc.simulation.Learners(new_model(), learners, "cast").fit(batches(digits))["sent_bytes"][0]
        for learners in (2, 16)
    ]
    assert sent[1] < 2 * sent[0]


def test_repeats_bit_by_bit(digits):
    def run():
        model = new_model()
        gc.simulation.Learners(model, 4).fit(batches(digits))
        return [variable.numpy() for variable in model.variables]

    for first, second in zip(run(), run(), strict=True):
        np.testing.assert_array_equal(first, second)


def test_steps_of_a_graph_do_the_same(digits):
    """Also with a warm-up, by which the conversations of a step differ."""

    def run(graph):
        model = new_model(keras.optimizers.Adam())
        compressor = "lgreco(method='top_k', warmup_steps=3)"
        learners = gc.simulation.Learners(model, 2, compressor, graph=graph)
        return learners.fit(batches(digits).take(6), epochs=2), model.variables

    (expected, weights), (history, of_graph) = run(graph=False), run(graph=True)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-3, err_msg=name)
    for one, other in zip(weights, of_graph, strict=True):
        np.testing.assert_allclose(other.numpy(), one.numpy(), rtol=1e-3, atol=1e-4)


def test_256_learners(digits):
    x, y = digits
    report = gc.simulation.Learners(new_model(), 256).train_on_batch(x[:512], y[:512])
    assert report.finite
    assert report.payload_bytes < report.dense_bytes


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(digits):
    x, y = digits[0][:BATCH].copy(), digits[1][:BATCH]
    x[-1] = np.nan  # of the last learner
    model = new_model()
    before = [variable.numpy() for variable in model.variables]
    learners = gc.simulation.Learners(model, 4)
    assert not learners.train_on_batch(x, y).finite
    for expected, actual in zip(before, model.trainable_variables, strict=False):
        np.testing.assert_array_equal(actual.numpy(), expected)
    kept = [any(np.any(r.numpy()) for r in residuals) for residuals in learners.residuals]
    assert kept == [True, True, True, False]


def test_nested_inputs_and_tables_of_embeddings():
    words, numbers = (
        keras.Input((3,), dtype="int32", name="words"),
        keras.Input((2,), name="numbers"),
    )
    embedded = keras.layers.Flatten()(keras.layers.Embedding(20, 4)(words))
    joined = keras.layers.Concatenate()([embedded, numbers])
    model = keras.Model({"words": words, "numbers": numbers}, keras.layers.Dense(1)(joined))
    model.compile("sgd", "mse")
    x = {"words": np.ones((8, 3), "int32"), "numbers": np.ones((8, 2), "float32")}
    report = gc.simulation.Learners(model, 4).train_on_batch(x, np.ones((8, 1), "float32"))
    assert report.finite


@pytest.mark.parametrize("learners", [0, -1, 2.0, None], ids=repr)
def test_numbers_of_learners_that_are_none(learners):
    with pytest.raises(ValueError, match="a number of at least 1"):
        gc.simulation.Learners(new_model(), learners)


def test_a_batch_that_cannot_be_shared_out(digits):
    learners = gc.simulation.Learners(new_model(), 3)
    with pytest.raises(ValueError, match="a batch of 64 cannot be shared out equally among 3"):
        learners.train_on_batch(digits[0][:64], digits[1][:64])


def test_models_that_cannot_be_simulated():
    bare = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"must be built, and compiled"):
        gc.simulation.Learners(bare, 2)
    compressed = new_model(gc.CompressedOptimizer("sgd"))
    with pytest.raises(ValueError, match="optimizer is compressed already"):
        gc.simulation.Learners(compressed, 2)
    with (
        tf.distribute.MirroredStrategy(["CPU:0"]).scope(),
        pytest.raises(ValueError, match="leave the strategy's scope"),
    ):
        gc.simulation.Learners(new_model(), 2)


def test_a_sum_that_float16_cannot_hold_skips_the_step():
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="float16")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(keras.optimizers.SGD(0.001), "mse")
    # Each of the two gradients is -50,000.
    x, y = np.full((2, 1), 200, "float16"), np.full((2, 1), 250, "float16")
    report = gc.simulation.Learners(model, 2, "no_compression").train_on_batch(x, y)
    assert not report.finite
    assert layer.kernel.numpy() == 0


def test_a_large_table_that_is_touched_all_over_is_summed_whole():
    table = keras.layers.Embedding(10, 4, embeddings_initializer="zeros")
    model = keras.Sequential([keras.Input((20,), dtype="int32"), table])
    model.compile("sgd", "mse")
    learners = gc.simulation.Learners(model, 4, "adacomp", gc.Policy(max_dense_elements=39))
    whole = np.arange(80).reshape(4, 20) % 10
    report = learners.train_on_batch(whole, np.ones((4, 20, 4), "float32"))
    vote = 1.5 * (4 + 4)  # with a tag
    assert report.sent_bytes == 1.5 * 4 * 10 * 4 + vote
    np.testing.assert_allclose(table.embeddings.numpy(), np.full((10, 4), 0.01 * 2 / 40), rtol=1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, loss_scale_factor=1024.0),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    ],
    ids=["factor", "scaler", "accumulation"],
)
def test_optimizers_whose_settings_learners_do_not_follow_are_refused(optimizer):
    with pytest.raises(ValueError, match="scales losses or accumulates gradients"):
        gc.simulation.Learners(new_model(optimizer()), 2)


class HasUnused(keras.Model):
    """A model with a weight that the loss does not depend on."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.unused = self.add_weight(shape=(3,), initializer="ones", name="unused")

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize("compressor", ["no_compression", "adacomp"])
def test_weights_without_a_gradient_stay_as_they_are(compressor):
    model = HasUnused()
    model.build((None, 2))
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.1, global_clipnorm=0.1), "mse")
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    learners = gc.simulation.Learners(model, 2, compressor)
    report = learners.train_on_batch(x, y, similarity=True)
    assert report.dense_bytes == 4 * 3
    assert model.dense.bias.numpy() != 0
    np.testing.assert_array_equal(model.unused.numpy(), np.ones(3))
