"""Tests `gc.Autoencoder` and `AutoencoderTraining`: learning, logs, and phases."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close
from tests.reference.lgc import whole_run_ratio
from tests.replicas import collective, copies, stepper
from tf_gradcomp.compressors.lgc.autoencoder import Architecture, Network
from tf_gradcomp.compressors.lgc.job_state import (
    CODING,
    COLLECTED,
    COLLECTING,
    NORMS,
    STAGE,
    SWITCHING,
    WANTED,
    WEIGHTS,
    AutoencoderHook,
    TrainingStep,
)
from tf_gradcomp.exchange.exchange import residual_norm
from tf_gradcomp.groups import messages
from tf_gradcomp.keras.callbacks.autoencoder_training import autoencoder_of

BATCH, STEPS = 24, 8
DENSE, TRAINING = 2, 7
# The mean of two entries, twice: little is missed of values in their order.
PAIRS = {"encoder": [[1, 2, 2]], "decoder": [[1, 2, 2]], "slope": 1.0}
WEIGHTS_OF_PAIRS = {
    "all_reduce": [0.5, 0.5, 0, 1, 1, 0, 0.5, 0],
    "parameter_server": [0.5, 0.5, 0, 1, 1, 0, 0.5, 0.5, 0],
}


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(BATCH * STEPS, 30)).astype("float32")
    return x, x @ generator.normal(size=(30, 4)).astype("float32")


def layers():
    sizes = [keras.layers.Dense(40, activation="tanh"), keras.layers.Dense(40)]
    return keras.Sequential([keras.Input((30,)), *sizes, keras.layers.Dense(4)])


def method(pattern="all_reduce", **settings):
    return gc.compressors.LGC(
        pattern,
        **{
            "density": 0.1,
            "warmup_steps": DENSE,
            "training_steps": TRAINING,
            "guard": 0.9,
            "autoencoder": {**PAIRS, "weights": WEIGHTS_OF_PAIRS[pattern]},
            **settings,
        },
    )


def compiled(compressor, strategy=None, inner=None, precondition="auto"):
    keras.utils.set_random_seed(1)
    with (strategy or collective()).scope():
        model = layers()
        inner = type(inner).from_config(inner.get_config()) if inner else keras.optimizers.SGD(0.01)
        wrapped = gc.CompressedOptimizer(inner, compressor, precondition=precondition)
        model.compile(wrapped, "mse")
    return model


def fit(model, *callbacks, epochs=3):
    return model.fit(
        *data(),
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    ).history


class Watch(keras.callbacks.Callback):
    """Records the logs and the phases of all replicas after each step."""

    def __init__(self):
        super().__init__()
        self.logs, self.phases = [], []

    def on_train_batch_end(self, batch, logs=None):
        exchange = self.model.optimizer.exchange
        self.logs.append(dict(logs))
        self.phases.append({int(p) for p in copies(collective(), exchange.job_state[STAGE])})


class Frozen(keras.callbacks.Callback):
    """Reverts a step's changes of the biases, so that kernels' gradients stay zeros."""

    def on_train_batch_end(self, batch, logs=None):
        for variable in self.model.trainable_variables:
            if "bias" in variable.path:
                variable.assign(0 * variable)


# The model.


@pytest.mark.parametrize("innovations", [False, True])
def test_it_is_the_network_of_the_method_and_can_be_saved(innovations, tmp_path):
    model = gc.Autoencoder(innovations)
    assert model.count_params() == 216_677 + innovations
    assert model.encoder.count_params() == 172_996
    assert model.decoder.count_params() == 43_648
    vectors = np.random.default_rng(0).normal(size=(3, 48, 1)).astype("float32")
    added = np.random.default_rng(1).normal(size=(3, 48, 1)).astype("float32")
    network = Network(Architecture(), tf.constant(model.flat_weights()), innovations)
    latents = network.encode(vectors[:, :, 0])
    np.testing.assert_allclose(model.encoder(vectors), latents, rtol=1e-4, atol=1e-5)
    given = added if innovations else None
    decoded = network.output(network.expand(latents), None if given is None else given[:, :, 0])
    np.testing.assert_allclose(model(vectors, given)[:, :, 0], decoded, rtol=1e-4, atol=1e-5)
    model.save(tmp_path / "autoencoder.keras")
    loaded = keras.models.load_model(tmp_path / "autoencoder.keras")
    np.testing.assert_array_equal(loaded.flat_weights(), model.flat_weights())
    pattern = "parameter_server" if innovations else "all_reduce"
    compressor = gc.compressors.LGC(pattern, autoencoder=loaded)
    np.testing.assert_array_equal(compressor.architecture.weights, model.flat_weights())
    with pytest.raises(ValueError, match=f"create a model with innovations={not innovations}"):
        gc.compressors.LGC("all_reduce" if innovations else "parameter_server", autoencoder=loaded)


def test_innovations_count_as_they_are_from_the_start():
    """Training moves their weight by a thousandth in a step."""
    model = gc.Autoencoder(innovations=True)
    vectors, added = np.random.default_rng(0).normal(size=(2, 3, 48, 1)).astype("float32")
    whole = model(vectors, added).numpy()
    scale = np.abs(whole).max() + np.abs(added).max()
    assert_close(whole - model(vectors), added, terms=4, scale=scale)


def test_it_can_be_made_where_keras_has_channels_first():
    keras.config.set_image_data_format("channels_first")
    try:
        model = gc.Autoencoder()
    finally:
        keras.config.set_image_data_format("channels_last")
    np.testing.assert_array_equal(model.flat_weights(), gc.Autoencoder().flat_weights())


def test_making_one_leaves_keras_random_numbers_alone():
    keras.utils.set_random_seed(4)
    expected = keras.random.normal((3,))
    keras.utils.set_random_seed(4)
    first, second = gc.Autoencoder(), gc.Autoencoder()
    np.testing.assert_array_equal(keras.random.normal((3,)), expected)
    np.testing.assert_array_equal(first.flat_weights(), second.flat_weights())
    assert np.any(gc.Autoencoder(seed=1).flat_weights() != first.flat_weights())


# The training.


@pytest.mark.parametrize("pattern", ["all_reduce", "parameter_server"])
def test_phases_follow_each_other_on_all_replicas_and_logs_tell(pattern, caplog):
    steps = 2 * TRAINING
    model, watch = compiled(method(pattern, training_steps=steps)), Watch()
    training = gc.callbacks.AutoencoderTraining(learning_rate=0.02)
    history = fit(model, training, watch)
    assert all(len(phase) == 1 for phase in watch.phases)
    phases = [logs["lgc_phase"] for logs in watch.logs]
    assert phases == sorted(phases)
    assert phases.count(1) == DENSE - 1  # it is that of the next step
    # Up to three steps until the first replica leads, in each change; and one for the weights.
    assert steps <= phases.count(2) <= steps + 7
    assert phases[-1] == history["lgc_phase"][-1] == 3
    assert not any(logs["autoencoder_error"] for logs in watch.logs[:DENSE])
    errors = [logs["autoencoder_error"] for logs in watch.logs if logs["autoencoder_error"]]
    assert errors[-1] < errors[0]
    assert all(("share_error" in logs) == (logs["lgc_phase"] == 3) for logs in watch.logs)
    exchange = model.optimizer.exchange
    first, second = copies(collective(), exchange.job_state[WEIGHTS])
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(training.autoencoder.flat_weights(), first)
    assert exchange.hooks.get(AutoencoderHook).facts(exchange.replica().job_state()).keys() == {
        "phase of LGC",
        "checksum of the autoencoder's weights",
    }
    local_values = {v.path for v in (*model.variables, *model.optimizer.inner_optimizer.variables)}
    assert not any("lgc" in path or "conv1d" in path for path in local_values)
    assert "residuals are three times" not in caplog.text
    for residual in exchange.residuals:
        for local in collective().experimental_local_results(residual):
            local.assign(local * 100)
    history = fit(model, training, watch, epochs=1)
    assert history["lgc_phase"] == [4]
    assert all(len(phase) == 1 for phase in watch.phases)
    assert caplog.text.count("residuals are three times as large as when") == 1
    assert "did not fall below guard" not in caplog.text


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_residuals_of_variables_that_take_turns_are_watched_as_well(density):
    strategy = collective()
    with strategy.scope():
        variables = [keras.Variable(np.zeros((40, 30), "float32"), name=name) for name in "ab"]
        compressor = method(density=density, overrides={"": density})
        optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(0.0), compressor)
        optimizer.build(variables)
    steps = [
        stepper(strategy, lambda g, v=v: optimizer.apply(g, [v]), graph=True) for v in variables
    ]
    training, exchange = gc.callbacks.AutoencoderTraining(), optimizer.exchange
    phases, generator = [], np.random.default_rng(0)

    def two_steps():
        for step in steps:
            gradients = generator.laplace(size=(2, 1, 40, 30)).astype("float32")
            step([list(replica_gradients) for replica_gradients in gradients])
            phases.append(training.train(exchange)["lgc_phase"])

    while phases.count(3) < 8:  # each replica has led in steps of both variables
        two_steps()
    for local in collective().experimental_local_results(exchange.residuals[1]):
        local.assign(10 * local + 10)
    for _ in range(4):
        two_steps()
    assert phases[-1] == 4


@pytest.mark.parametrize(("saved", "resumed"), [("local", None), (None, "local")])
def test_with_other_units_of_gradients_growth_is_measured_again(saved, resumed, tmp_path):
    """Residuals that are divided by second moments are hundreds of times as large."""

    def new(precondition):
        adam = keras.optimizers.Adam(1e-3)
        return compiled(method(), inner=adam, precondition=precondition)

    model = new(saved)
    assert fit(model, gc.callbacks.AutoencoderTraining())["lgc_phase"][-1] == 3
    model.save_weights(tmp_path / "job.weights.h5")
    model = new(resumed)
    with collective().scope():
        model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "job.weights.h5")
    history = fit(model, gc.callbacks.AutoencoderTraining(), epochs=1)
    assert history["lgc_phase"] == [3]
    exchange = model.optimizer.exchange
    kept = np.linalg.norm(copies(collective(), exchange.job_state[NORMS])[0])
    assert 1 / 20 < kept / (2 * residual_norm(exchange)) < 20


def test_a_guard_extends_training_and_then_entries_are_sent_in_few_bits(caplog):
    model, watch = compiled(method(guard=1e-9)), Watch()
    fit(model, gc.callbacks.AutoencoderTraining(), watch)
    phases = [logs["lgc_phase"] for logs in watch.logs]
    assert 3 not in phases
    assert phases[-1] == 4
    assert 2 * TRAINING <= phases.count(2) <= 2 * TRAINING + 5
    assert "did not fall below guard=1e-09 in 14 training steps" in caplog.text


@pytest.mark.parametrize("pattern", ["all_reduce", "parameter_server"])
def test_gradients_of_zeros_do_not_pass_the_guard(pattern):
    """Zeros don't show that anything can be decoded."""
    model = compiled(method(pattern, training_steps=4))
    # Behind inputs of zeros, only the bias of the last layer has a gradient.
    x, y = data()
    training = gc.callbacks.AutoencoderTraining()
    logs = model.fit(
        0 * x, y - y + 0.5, batch_size=BATCH, epochs=2, verbose=0, callbacks=[Frozen(), training]
    ).history
    assert logs["autoencoder_error"][-1] == 1
    assert logs["lgc_phase"][-1] == 4


@pytest.fixture(scope="module")
def in_phase_3(tmp_path_factory):
    """Returns the saved state of a job that uses its autoencoder."""
    model = compiled(method())
    assert fit(model, gc.callbacks.AutoencoderTraining())["lgc_phase"][-1] == 3
    path = tmp_path_factory.mktemp("lgc") / "job.weights.h5"
    model.save_weights(path)
    return path


@pytest.mark.parametrize(
    "changed",
    [{"innovation": 0.02}, {"autoencoder": {**PAIRS, "slope": 0.5}}],
    ids=["innovation", "slope"],
)
def test_weights_learnt_for_other_settings_are_not_used(in_phase_3, changed):
    """An autoencoder of the same shapes would decode something else."""
    model, watch = compiled(method(**changed)), Watch()
    with collective().scope():
        model.optimizer.build(model.trainable_variables)
    model.load_weights(in_phase_3)
    fit(model, gc.callbacks.AutoencoderTraining(), watch, epochs=1)
    assert [logs["lgc_phase"] for logs in watch.logs] == [2] * STEPS


@pytest.mark.parametrize(
    ("value", "wanted"), [(0.5, SWITCHING), (np.nan, COLLECTING), (np.inf, COLLECTING)]
)
def test_weights_that_the_last_step_made_not_finite_do_not_come_into_use(value, wanted):
    model = compiled(method())
    with collective().scope():
        model.optimizer.build(model.trainable_variables)
    state = autoencoder_of(model.optimizer.exchange)
    weights = np.full(state.job_state[WEIGHTS].shape, value, "float32")
    state.learn(weights, [TrainingStep(TRAINING, loss=0.1, error=0.1)])
    assert state.job_state[WANTED].numpy() == wanted


def test_without_the_library_the_job_continues_with_one_notice(caplog):
    messages.forget()
    caplog.set_level(logging.INFO, "tf_gradcomp")
    model, watch = compiled(method()), Watch()
    fit(model, watch, epochs=1)
    assert watch.phases[-1] == {0}
    assert caplog.text.count("LGC sums the entries that a leader chooses until") == 1
    assert caplog.text.count("LGC does not know the first and the last layer") == 1


def test_with_other_methods_or_one_replica_it_does_nothing():
    training = gc.callbacks.AutoencoderTraining()
    for model in (compiled("top_k"), compiled(method(), tf.distribute.get_strategy())):
        model.optimizer.build(model.trainable_variables)
        assert autoencoder_of(model.optimizer.exchange) is None
        assert training.train(model.optimizer.exchange) == {}
    plain = layers()
    plain.compile("sgd", "mse")
    assert "lgc_phase" not in fit(plain, training, epochs=1)
    assert training.autoencoder is None


def test_it_warns_behind_readers():
    model = layers()
    model.compile(gc.CompressedOptimizer("sgd"), "mse")
    late = keras.callbacks.ProgbarLogger(), gc.callbacks.AutoencoderTraining()
    with pytest.warns(UserWarning, match="AutoencoderTraining comes after ProgbarLogger"):
        fit(model, *late, epochs=1)


# Learners.


def learners(number, compressor):
    keras.utils.set_random_seed(0)
    model = layers()
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return gc.simulation.Learners(model, number, compressor, gc.Policy.from_model(model))


def batches(size=BATCH):
    return tf.data.Dataset.from_tensor_slices(data()).batch(size)


@pytest.mark.parametrize(("pattern", "number"), [("all_reduce", 4), ("parameter_server", 3)])
def test_learners_train_it_and_count_the_whole_run(pattern, number):
    compressor = method(pattern, training_steps=4)
    group, payloads, phases = learners(number, compressor), [], []

    def note(report):
        payloads.append(report.payload_bytes)
        phases.append(autoencoder_of(group.exchange).stage)
        states = [group.exchange.replica(learner).job_state() for learner in range(number)]
        assert len({int(state[STAGE]) for state in states}) == 1

    history = group.fit(batches(), epochs=3, on_step=note)
    assert history["lgc_phase"][-1] == 3
    assert history["loss"][-1] < history["loss"][0]
    dense, summing, coding = payloads[0], payloads[DENSE], payloads[-1]
    switched = phases.index(CODING)
    collecting = payloads[switched - 1]
    assert coding < summing < dense
    weights = 4 * compressor.architecture.parameters(pattern != "all_reduce")
    # Twelve bytes of the summing steps are news of the training.
    expected = summing - 12 / number + weights / number
    assert payloads[switched] == pytest.approx(expected, abs=2)
    gathered = payloads.count(collecting)
    summed = switched + 1 - DENSE - gathered
    expected = whole_run_ratio(
        len(payloads),
        DENSE,
        gathered,
        (dense / collecting, dense / coding),
        (summed * (summing - coding) + weights / number) / dense,
    )
    assert len(payloads) * dense / sum(payloads) == pytest.approx(expected, rel=1e-3)


def test_training_starts_from_the_weights_of_a_model_that_is_given():
    given = gc.Autoencoder(**PAIRS, seed=3)
    group = learners(2, method(autoencoder=given))
    training = gc.callbacks.AutoencoderTraining(keras.optimizers.SGD(0.0))
    group.fit(batches(), training=training)
    assert autoencoder_of(group.exchange).last_learned >= 4
    np.testing.assert_array_equal(autoencoder_of(group.exchange).weights, given.flat_weights())


def test_training_uses_all_steps_since_the_last_call_and_reports_overwritten_steps(
    caplog, monkeypatch
):
    monkeypatch.setattr("tf_gradcomp.compressors.lgc.job_state.KEPT_VECTORS", 6)
    group = learners(2, method(training_steps=100))
    training = gc.callbacks.AutoencoderTraining()
    x, y = data()
    for _step in range(DENSE + 2):
        group.train_on_batch(x[:BATCH], y[:BATCH])
        training.train(group.exchange)
    before = autoencoder_of(group.exchange).last_learned
    for missed, steps in ((False, 3), (True, 5)):
        for _ in range(steps):
            group.train_on_batch(x[:BATCH], y[:BATCH])
        values = [vector.number for vector in autoencoder_of(group.exchange).new_vectors()]
        collected = int(group.exchange.replica().job_state()[COLLECTED])
        assert values == list(range(collected - 2, collected + 1))
        training.train(group.exchange)
        assert autoencoder_of(group.exchange).last_learned == collected
        assert ("vectors of 2 steps were overwritten" in caplog.text) == missed
    assert collected == before + 8
