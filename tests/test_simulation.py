"""Learners in one process; that they train as real workers do is in tests/distributed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_gradcomp as gc
from tests.bounds import adam_bound, assert_close, rounding, training
from tests.distributed.local_learners import KeepsNorms

BATCH = 64
INPUTS, HIDDEN, CLASSES = 64, 100, 10
TERMS = BATCH + INPUTS + HIDDEN  # of the sums that make a gradient
STEPS = 4


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype("float32"), y.astype("int32")


def new_model(optimizer=None, **compile_args):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((INPUTS,)),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(CLASSES),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss=loss, **compile_args)
    return model


def exact_model(optimizer):
    """A model whose gradients are exact in float32, so that rounding changes no selection.

    Gradients are sums of a pixel, in 16ths, times a digit and a class, and are equal in each step.
    """
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((INPUTS,)), keras.layers.Dense(CLASSES)])
    classes = tf.range(CLASSES, dtype=tf.float32)
    model.compile(optimizer, lambda y, output: y * tf.linalg.matvec(output, classes))
    return model


def adam_steps_bound(steps, rate=0.001):
    """Returns how far exact gradients move weights apart, which are below 1."""
    return rounding(1, terms=2, steps=steps) + rounding(rate, adam_bound(), steps)


def batches(digits):
    return tf.data.Dataset.from_tensor_slices(digits).batch(BATCH, drop_remainder=True)


def one_batch(digits):
    """Returns a dataset with one step per epoch, so that an epoch's loss is a step's loss."""
    return batches(digits).take(1)


def assert_trained_alike(model, second, bound):
    for weight, like in zip(model.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(weight, like, rtol=0, atol=bound)


def assert_same_first_loss(history, other):
    assert_close(history["loss"][0], other["loss"][0], TERMS)


@pytest.mark.parametrize("learners", [1, 2, 16])
def test_learners_without_compression_share_a_batch_as_keras_takes_it(digits, learners):
    single, shared = new_model(), new_model()
    expected = single.fit(one_batch(digits), epochs=STEPS, verbose=0).history
    simulated = gc.simulation.Learners(shared, learners, "no_compression")
    assert_same_first_loss(simulated.fit(one_batch(digits), epochs=STEPS), expected)
    assert_trained_alike(shared, single, training(0.1, TERMS, STEPS))


def test_compressed_training_learns_and_counts(digits):
    learners, model = 4, new_model(keras.optimizers.SGD(0.1, momentum=0.9), metrics=["accuracy"])
    history = gc.simulation.Learners(model, learners).fit(
        batches(digits), epochs=4, validation_data=digits
    )
    assert history["val_accuracy"][-1] > 0.9
    assert history["compression_ratio"][-1] > 40
    assert history["skipped_steps"] == [0] * 4
    assert history["residual_norm"][-1] > 0
    # In a ring, a learner forwards all payloads except one.
    assert history["sent_bytes"][-1] >= (learners - 1) * history["payload_bytes"][-1]
    assert history["sent_bytes"][-1] < (learners - 1) * history["dense_bytes"][-1]


def test_bytes_of_sums_do_not_grow_with_the_number_of_learners(digits):
    sent = [
        gc.simulation.Learners(new_model(), learners, "cast").fit(one_batch(digits))["sent_bytes"]
        for learners in (2, 16)
    ]
    assert sent[1][0] < 2 * sent[0][0]


def test_repeats_bit_by_bit(digits):
    def run():
        model = new_model()
        gc.simulation.Learners(model, 4).fit(batches(digits).take(STEPS))
        return [variable.numpy() for variable in model.variables]

    for first, second in zip(run(), run(), strict=True):
        np.testing.assert_array_equal(first, second)


def test_steps_of_a_graph_do_the_same(digits):
    """Also tests a warm-up, with which the conversations of a step differ."""

    def run(graph):
        model = exact_model(keras.optimizers.Adam())
        compressor = "lgreco(method='top_k', warmup_steps=3)"
        learners = gc.simulation.Learners(model, 2, compressor, graph=graph)
        return learners.fit(batches(digits).take(6), epochs=2), model

    (expected, model), (history, traced_model) = run(graph=False), run(graph=True)
    for name in ("payload_bytes", "sent_bytes", "dense_bytes", "skipped_steps"):
        assert history[name] == expected[name]
    # Both orders of the operations of Adam, and of the sums of squares, are right.
    assert_close(
        history["residual_norm"], expected["residual_norm"], INPUTS * CLASSES + adam_bound()
    )
    assert_trained_alike(traced_model, model, adam_steps_bound(12))


def test_one_learner_trains_and_reports_as_a_job_of_one_worker(digits):
    single, simulated = (new_model(keras.optimizers.Adam(0.01, epsilon=0.1)) for _ in range(2))
    expected = single.fit(one_batch(digits), epochs=STEPS, verbose=0).history
    history = gc.simulation.Learners(simulated, 1, "adacomp").fit(one_batch(digits), epochs=STEPS)
    assert_same_first_loss(history, expected)
    bound = training(0.01 / 0.1, TERMS, STEPS) + adam_steps_bound(STEPS, rate=0.01)
    assert_trained_alike(simulated, single, bound)
    nothing = ("payload_bytes", "sent_bytes", "skipped_steps", "residual_norm")
    assert [history[name] for name in nothing] == [[0] * STEPS] * 4
    assert np.isnan(history["compression_ratio"][0])


def test_skipped_steps_are_counted_from_the_start(digits):
    x, y = digits[0][: 2 * BATCH].copy(), digits[1][: 2 * BATCH]
    x[3] = np.nan
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    learners = gc.simulation.Learners(new_model(), 2)
    assert learners.fit(data, epochs=3)["skipped_steps"] == [1, 2, 3]
    assert learners.fit(data)["skipped_steps"] == [4]


def test_the_loss_of_an_epoch_is_the_mean_over_rows(digits):
    x, y = digits
    data = tf.data.Dataset.from_tensor_slices((x[:40], y[:40])).batch(32)
    model = new_model(keras.optimizers.SGD(0.0))
    expected = model.fit(data, shuffle=False, verbose=0).history
    assert_same_first_loss(gc.simulation.Learners(model, 2, "no_compression").fit(data), expected)


def test_weights_are_their_averages_in_the_end(digits):
    def optimizer():
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)

    single, simulated = new_model(optimizer()), new_model(optimizer())
    single.fit(batches(digits).take(STEPS), shuffle=False, verbose=0)
    gc.simulation.Learners(simulated, 2, "no_compression").fit(batches(digits).take(STEPS))
    assert_trained_alike(simulated, single, training(0.1, TERMS, STEPS))


OF_ADAM = [
    lambda: keras.optimizers.Adam(0.001),
    lambda: keras.optimizers.Adam(0.001, amsgrad=True),
    lambda: keras.optimizers.Nadam(0.001),
]
OF_ADAM_IDS = ["adam", "amsgrad", "nadam"]


@pytest.mark.parametrize("compressor", ["no_compression", "adacomp"])
@pytest.mark.parametrize("optimizer", OF_ADAM, ids=OF_ADAM_IDS)
def test_a_second_fit_continues_like_a_single_fit(digits, optimizer, compressor):
    at_once, in_turn = exact_model(optimizer()), exact_model(optimizer())
    data = batches(digits).take(STEPS)
    arguments = {"compressor": compressor, "precondition": "local"}
    gc.simulation.Learners(at_once, 2, **arguments).fit(data, epochs=2)
    learners = gc.simulation.Learners(in_turn, 2, **arguments)
    for _ in range(2):
        learners.fit(data)
    assert_trained_alike(in_turn, at_once, adam_steps_bound(2 * STEPS))


def longest_moves(train, model, digits, steps):
    """By how much `train` moves any weight in one step, for each of some batches."""
    moves = []
    for batch in batches(digits).take(steps):
        before = model.get_weights()
        train(tf.data.Dataset.from_tensors(batch))
        moves.append(
            max(np.abs(a - b).max() for a, b in zip(model.get_weights(), before, strict=True))
        )
    return moves


@pytest.mark.parametrize("after", ["fit", "other learners"])
@pytest.mark.parametrize("optimizer", OF_ADAM, ids=OF_ADAM_IDS)
def test_training_after_learners_takes_steps_of_the_same_size(digits, optimizer, after):
    dense, model = new_model(optimizer()), new_model(optimizer())
    dense.fit(batches(digits), shuffle=False, verbose=0)
    expected = longest_moves(lambda batch: dense.fit(batch, verbose=0), dense, digits, steps=5)
    gc.simulation.Learners(model, 2, "adacomp", precondition="local").fit(batches(digits))
    others = gc.simulation.Learners(model, 4, "no_compression", precondition="local")
    train = others.fit if after != "fit" else lambda batch: model.fit(batch, verbose=0)
    moves = longest_moves(train, model, digits, steps=5)
    assert max(moves) <= 1.5 * max(expected)
    assert max(moves) >= max(expected) / 1.5


def test_learners_continue_training_by_keras(digits):
    dense, model = (new_model(keras.optimizers.Adam(0.001)) for _ in range(2))
    for one in (dense, model):
        one.fit(batches(digits), shuffle=False, verbose=0)
    expected = longest_moves(lambda batch: dense.fit(batch, verbose=0), dense, digits, steps=1)
    learners = gc.simulation.Learners(model, 2, "no_compression", precondition="local")
    assert longest_moves(learners.fit, model, digits, steps=1) == pytest.approx(expected, rel=0.1)


def test_weights_whose_gradients_come_late_move_no_farther_than_new_ones(digits):
    def largest_move(updates):
        model = new_model(keras.optimizers.Adam(0.01))
        learners = gc.simulation.Learners(model, 2)
        model.optimizer.iterations.assign(updates)
        moves = []
        for x, y in batches(digits).take(10):
            before = model.get_weights()
            learners.train_on_batch(x, y)
            pairs = zip(model.get_weights(), before, strict=True)
            moves += [np.abs(after - value).max() for after, value in pairs]
        return max(moves)

    assert largest_move(3000) <= largest_move(0)


def test_weights_whose_gradients_are_zeros_at_first_move_no_farther_than_new_ones(digits):
    def largest_move(steps_of_zeros):
        model = new_model(keras.optimizers.Adam(0.01, beta_2=0.9))
        learners = gc.simulation.Learners(model, 2)
        first, moves = model.trainable_variables[0], []
        for x, y in batches(digits).take(10).repeat(4).take(steps_of_zeros):
            learners.train_on_batch(tf.zeros_like(x), y)
        for x, y in batches(digits).take(10):
            before = first.numpy()
            learners.train_on_batch(x, y)
            moves.append(np.abs(first.numpy() - before).max())
        return max(moves)

    assert largest_move(40) <= 1.2 * largest_move(0)


def test_second_moments_are_handed_back_where_training_is_stopped(digits):
    def stop(report):
        raise KeyboardInterrupt

    model = new_model(keras.optimizers.Adam(0.001))
    learners = gc.simulation.Learners(model, 2, precondition="local")
    with pytest.raises(KeyboardInterrupt):
        learners.fit(batches(digits), on_step=stop)
    assert all(np.any(v.numpy()) for v in model.optimizer.variables if "velocity" in v.path)


@pytest.mark.parametrize("method", [gc.compressors.TopK(0.25, momentum=0.5), KeepsNorms()], ids=str)
def test_rounds_keep_nothing_of_gradients_but_what_waits(digits, method):
    rate, data = 2.0**-9, list(batches(digits).take(4))
    plain, model = (exact_model(keras.optimizers.SGD(rate)) for _ in range(2))
    settings = gc.LocalSteps(2, warmup_steps=2)
    learners = gc.simulation.Learners(model, 2, method, local_steps=settings)
    norms = [learners.exchange.replica(i).job_state().get("norms") for i in range(2)]
    if method.name == "keeps_norms":
        for of_one in norms:
            of_one.assign(tf.ones_like(of_one))

    def waiting():
        return [
            sum(r.numpy() for r in residuals) for residuals in zip(*learners.residuals, strict=True)
        ]

    for x, y in data[:2]:
        learners.train_on_batch(x, y)
    waits, before = waiting(), model.get_weights()
    learners.train_on_batch(*data[2])
    for learner in range(2):
        kept = learners.exchange.replica(learner).state().values()
        assert not any(np.any(variable) for variables in kept for variable in variables)
        assert norms[learner] is None or not np.any(norms[learner])
    learners.train_on_batch(*data[3])
    starts = [w - rate * rest for w, rest in zip(before, waits, strict=True)]
    ends = [w - rest for w, rest in zip(model.get_weights(), waiting(), strict=True)]
    before = plain.get_weights()
    for x, y in data[2:]:
        plain.train_on_batch(x, y)
    moved = [a - b for a, b in zip(plain.get_weights(), before, strict=True)]
    for start, end, expected in zip(starts, ends, moved, strict=True):
        # Gradients are at most 9 * 9; the other numbers are below 2.
        np.testing.assert_allclose(end - start, expected, rtol=0, atol=rounding(2, 4, steps=4))


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
    words, values = (
        keras.Input((3,), dtype="int32", name="words"),
        keras.Input((2,), name="numbers"),
    )
    embedded = keras.layers.Flatten()(keras.layers.Embedding(20, 4)(words))
    joined = keras.layers.Concatenate()([embedded, values])
    model = keras.Model({"words": words, "numbers": values}, keras.layers.Dense(1)(joined))
    model.compile("sgd", "mse")
    x = {"words": np.ones((8, 3), "int32"), "numbers": np.ones((8, 2), "float32")}
    report = gc.simulation.Learners(model, 4).train_on_batch(x, np.ones((8, 1), "float32"))
    assert report.finite


@pytest.mark.parametrize("learners", [0, -1, 2.0, True, None], ids=repr)
def test_numbers_of_learners_that_are_none(learners):
    with pytest.raises(ValueError, match="a whole number of at least 1"):
        gc.simulation.Learners(new_model(), learners)


def test_a_batch_that_cannot_be_shared_out(digits):
    learners = gc.simulation.Learners(new_model(), 3)
    with pytest.raises(ValueError, match="a batch of 64 cannot be divided equally among 3"):
        learners.train_on_batch(digits[0][:64], digits[1][:64])


@pytest.mark.parametrize("labels", [32, 96])
def test_inputs_and_labels_of_unequal_lengths(digits, labels):
    learners = gc.simulation.Learners(new_model(), 2)
    with pytest.raises(ValueError, match=f"must have as many rows; received 64, {labels}"):
        learners.train_on_batch(digits[0][:64], digits[1][:labels])


def test_lists_of_numbers_are_taken_as_arrays(digits):
    x, y = digits[0][:64], digits[1][:64]
    reports = [
        gc.simulation.Learners(new_model(), 2).train_on_batch(*batch)
        for batch in ((x, y), (x.tolist(), list(y)))
    ]
    assert reports[0].loss == reports[1].loss
    history = gc.simulation.Learners(new_model(), 2).fit([(x.tolist(), y.tolist())])
    assert history["loss"] == [reports[0].loss]


def test_a_batch_without_labels(digits):
    with pytest.raises(ValueError, match="received None for one of them"):
        gc.simulation.Learners(new_model(), 2).train_on_batch(digits[0][:64], None)


def test_validation_data_may_have_weights_of_samples(digits):
    x, y = (part[:64] for part in digits)
    weights = np.linspace(0, 1, 64)
    model = new_model(keras.optimizers.SGD(0.0))
    for data in ((x, y), [x, y], (x, y, weights)):
        history = gc.simulation.Learners(model, 2).fit([(x, y)], validation_data=data)
        sample_weights = data[2] if len(data) > 2 else None
        expected = model.evaluate(x, y, sample_weight=sample_weights, verbose=0)
        assert history["val_loss"] == [pytest.approx(expected, rel=rounding(1, terms=64))]
    with pytest.raises(ValueError, match="received 4 parts"):
        gc.simulation.Learners(model, 2).fit([(x, y)], validation_data=(x, y, weights, 3))


def test_models_that_cannot_be_simulated():
    bare = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"must be built, and compiled"):
        gc.simulation.Learners(bare, 2)
    compressed = new_model(gc.CompressedOptimizer("sgd"))
    with pytest.raises(ValueError, match="optimizer is already compressed"):
        gc.simulation.Learners(compressed, 2)
    with (
        tf.distribute.MirroredStrategy(["CPU:0"]).scope(),
        pytest.raises(ValueError, match="leave the strategy's scope"),
    ):
        gc.simulation.Learners(new_model(), 2)


class OwnStep(keras.Sequential):
    """Trains by its own train_step."""

    def train_step(self, data):
        return super().train_step(data)


def test_a_model_with_its_own_train_step_is_refused():
    model = OwnStep([keras.Input((64,)), keras.layers.Dense(10)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"OwnStep has its own train_step.*compute_loss"):
        gc.simulation.Learners(model, 2)


def test_adafactor_is_warned_of_as_in_a_job():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adafactor(0.01), "mse")
    gc.simulation.Learners(model, 1, "adacomp")
    with pytest.warns(UserWarning, match="Adafactor makes NaN"):
        gc.simulation.Learners(model, 2, "adacomp")


def test_a_loss_that_is_a_sum_is_one_over_learners_as_over_workers(digits):
    histories, models = [], []
    for learners in (1, 4):
        models.append(new_model(keras.optimizers.SGD(0.001)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        models[-1].compile(models[-1].optimizer, loss)
        simulated = gc.simulation.Learners(models[-1], learners, "no_compression")
        histories.append(simulated.fit(one_batch(digits), epochs=STEPS))
    assert_same_first_loss(histories[1], histories[0])
    assert histories[0]["loss"][0] > 50  # the sum over 64 rows
    assert_trained_alike(*models, training(BATCH * 0.001, TERMS, STEPS))
    assert tf.distribute.get_strategy().num_replicas_in_sync == 1  # as before


class OwnLoss(keras.Sequential):
    """Computes its loss itself, and divides it as programs for several workers do."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        return tf.reduce_mean(tf.square(y_pred - y)) / replicas


def test_a_custom_loss_is_divided_where_a_job_would_divide_it():
    x = np.linspace(-1, 1, 32).reshape(8, 4).astype("float32")
    weights = []
    for learners in (1, 2):
        keras.utils.set_random_seed(0)
        model = OwnLoss([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.5))
        simulated = gc.simulation.Learners(model, learners, "no_compression")
        simulated.train_on_batch(x, x[:, :2])
        weights.append(model.get_weights())
    for expected, actual in zip(*weights, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=training(0.5, 8 + 4, 1))


def test_a_model_that_was_compiled_again_needs_new_learners(digits):
    model = new_model()
    learners = gc.simulation.Learners(model, 2)
    learners.fit(batches(digits).take(1))
    model.compile("sgd", model.loss)
    with pytest.raises(ValueError, match="compiled again"):
        learners.fit(batches(digits).take(1))


def test_float8_layers_are_refused_as_in_a_job():
    layer = keras.layers.Dense(4, dtype="float8_from_float32")
    model = keras.Sequential([keras.Input((8,)), layer])
    model.compile("sgd", "mse")
    gc.simulation.Learners(model, 1)
    with pytest.raises(ValueError, match=r"kernel_scale.* are new values for these variables"):
        gc.simulation.Learners(model, 2)


def test_a_batch_with_weights_of_samples_is_refused(digits):
    weighted = tf.data.Dataset.from_tensor_slices((*digits, digits[1])).batch(BATCH)
    with pytest.raises(ValueError, match=r"pair of inputs and labels.*tuple of 3"):
        gc.simulation.Learners(new_model(), 2).fit(weighted)


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
    assert_close(table.embeddings, np.full((10, 4), 0.01 * 2 / 40), terms=80)


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


class AddPositions(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.positions = keras.layers.Embedding(3, 4)

    def call(self, x):
        return x + self.positions(keras.ops.arange(3))


@pytest.mark.parametrize("graph", [False, True])
def test_tables_of_positions_and_of_words_train_as_in_one_process(graph):
    words = np.tile(np.arange(6).reshape(2, 3), (8, 1))  # the same for each learner
    y = words.sum(1, keepdims=True).astype("float32")
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                *(keras.Input((3,), dtype="int32"), keras.layers.Embedding(6, 4), AddPositions()),
                *(keras.layers.Flatten(), keras.layers.Dense(1)),
            ]
        )
        model.compile(keras.optimizers.Adam(0.1, epsilon=0.5), "mse")
        models.append(model)
    single, shared = models
    single.fit(words, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    learners = gc.simulation.Learners(shared, 4, "no_compression", graph=graph)
    learners.fit([(words[:8], y[:8]), (words[8:], y[8:])], epochs=3)
    # Sums are over 8 rows, 3 words and 12 inputs, of gradients below 100.
    bound = training(gain=0.1 / 0.5, terms=8 + 3 + 12, steps=6, gradients=100)
    for expected, actual in zip(single.get_weights(), shared.get_weights(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)
