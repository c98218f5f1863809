"""Tests the `CompressedOptimizer` of Keras 2 in one process, and its refusals."""

import contextlib
import importlib.util
import pkgutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import adam_bound, assert_close, rounding
from tests.keras2.models import small_model
from tests.keras2.optimizers import OPTIMIZERS
from tests.replicas import copies, mirrored, stepper
from tests.workers import run_workers
from tf_gradcomp.adam.preconditioner import SECOND_MOMENT
from tf_gradcomp.groups import messages
from tf_gradcomp.keras.common import fit as fit_module
from tf_gradcomp.keras.keras2.adam import momentum_only
from tf_gradcomp.keras_version import install_patches
from tf_gradcomp.private import keras2 as keras_private
from tf_gradcomp.private import patching
from tf_gradcomp.private.patching import PATCHES

pytestmark = pytest.mark.tf_keras
keras = tf.keras
legacy = keras.optimizers.legacy
needs_addons = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_addons") is None, reason="tensorflow-addons is not there"
)
ALONE = [
    name for name in ("EMA", "loss scale", "legacy Adam", "LazyAdam", "SWA") if name in OPTIMIZERS
]
PRECONDITIONED = {
    "Adam": lambda **settings: keras.optimizers.Adam(0.05, **settings),
    "AdamW": lambda **settings: keras.optimizers.AdamW(0.05, 0.1, **settings),
    "Nadam": lambda **settings: keras.optimizers.Nadam(0.05, **settings),
    "legacy Adam": lambda **settings: legacy.Adam(0.05, **settings),
    "legacy Nadam": lambda **settings: legacy.Nadam(0.05, **settings),
}
if importlib.util.find_spec("tensorflow_addons"):
    import tensorflow_addons as tfa

    PRECONDITIONED |= {
        "tfa AdamW": lambda **settings: tfa.optimizers.AdamW(0.1, 0.05, **settings),
        "LAMB": lambda **settings: tfa.optimizers.LAMB(0.05, **settings),
    }
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not there"
)


def trained(optimizer, epochs=2):
    model = small_model(optimizer)
    x = np.arange(24).reshape(12, 2) % 6
    model.fit(x, x.sum(1), batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("name", ALONE)
def test_one_replica_trains_as_the_inner_optimizer(name):
    plain, wrapped = (
        trained(OPTIMIZERS[name]()),
        trained(gc.CompressedOptimizer(OPTIMIZERS[name]())),
    )
    for ours, theirs in zip(wrapped.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(wrapped.optimizer.iterations.numpy()) == 6


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_config_round_trips(name):
    optimizer = gc.CompressedOptimizer(OPTIMIZERS[name](), "adacomp(bin_sizes=20)")
    again = gc.CompressedOptimizer.from_config(optimizer.get_config())
    assert type(again.inner_optimizer) is type(optimizer.inner_optimizer)
    assert again.get_config() == optimizer.get_config()


def test_the_learning_rate_belongs_to_the_inner_optimizer():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    for inner, lag in ((legacy.SGD(schedule), 0), (keras.optimizers.SGD(schedule), 1)):
        model = trained(gc.CompressedOptimizer(inner), epochs=1)
        assert float(model.optimizer.learning_rate) == 0.5 * 0.5 ** (3 - lag)
    for inner in (legacy.SGD(0.5), keras.optimizers.SGD(0.5)):
        optimizer = gc.CompressedOptimizer(inner)
        optimizer.lr = 0.25
        assert float(inner.learning_rate) == 0.25


def test_weights_of_an_optimizer_that_was_not_wrapped_are_taken():
    plain, wrapped = (
        trained(legacy.Adam(0.1)),
        small_model(gc.CompressedOptimizer(legacy.Adam(0.1))),
    )
    wrapped.optimizer.build(wrapped.trainable_variables)
    wrapped.optimizer.set_weights(plain.optimizer.get_weights())
    for ours, theirs in zip(
        wrapped.optimizer.inner_optimizer.weights, plain.optimizer.weights, strict=True
    ):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_weights_of_others_are_refused():
    model = trained(gc.CompressedOptimizer(legacy.SGD(0.1)))
    with pytest.raises(ValueError, match="belong to another optimizer or compressor"):
        model.optimizer.set_weights([np.zeros(3)] * 2)


def test_horovods_callback_may_not_broadcast_separate_state():
    *_, last = trained(gc.CompressedOptimizer(legacy.SGD(0.1))).optimizer.variables()
    with pytest.raises(ValueError, match="BroadcastInitialState"):
        last.assign(last.numpy())


def test_a_keras_2_optimizer_is_needed():
    with pytest.raises(TypeError, match="expected a Keras 2 optimizer such as"):
        gc.CompressedOptimizer(object())


def test_it_is_wrapped_once():
    with pytest.raises(ValueError, match="already compressed"):
        gc.CompressedOptimizer(gc.CompressedOptimizer("adam"))


def test_an_optimizer_that_reduces_by_itself_is_refused():
    with pytest.raises(ValueError, match="its own gradient_aggregator"):
        gc.CompressedOptimizer(legacy.SGD(0.1, gradient_aggregator=lambda pairs: pairs))


@needs_addons
def test_averages_go_inside():
    import tensorflow_addons as tfa

    with pytest.raises(TypeError):
        tfa.optimizers.MovingAverage(gc.CompressedOptimizer(legacy.SGD(0.1)))
    reduces = legacy.SGD(0.1, gradient_aggregator=lambda pairs: pairs)
    with pytest.raises(ValueError, match=r"CompressedOptimizer\(MovingAverage\(optimizer\)\)"):
        gc.CompressedOptimizer(tfa.optimizers.MovingAverage(reduces))


@needs_addons
def test_averages_are_given_to_the_model():
    import tensorflow_addons as tfa

    model = trained(gc.CompressedOptimizer(tfa.optimizers.MovingAverage(legacy.SGD(0.1), 0.5)))
    weights = model.get_weights()
    model.optimizer.assign_average_vars(model.trainable_variables)
    assert any((a != b).any() for a, b in zip(model.get_weights(), weights, strict=True))


@needs_horovod
def test_horovods_optimizer_is_refused_inside_and_outside():
    import horovod.tensorflow.keras as hvd

    hvd.init()
    inner = hvd.DistributedOptimizer(legacy.SGD(0.1))
    with pytest.raises(ValueError, match="does not work inside or around"):
        gc.CompressedOptimizer(inner)
    with pytest.raises(ValueError, match="does not work inside or around"):
        hvd.DistributedOptimizer(gc.CompressedOptimizer(legacy.SGD(0.1)))


def test_preconditioning_is_for_adams_family():
    with pytest.raises(ValueError, match=r'precondition="local" is for Adam.*received SGD'):
        gc.CompressedOptimizer("sgd", precondition="local")


def variables_and_gradients(step=0):
    """Two new variables, and their gradients in a step."""
    generator = np.random.default_rng(step)
    shapes = [(8, 5), (5,)]
    variables = [tf.Variable(np.full(shape, 0.5, "float32")) for shape in shapes]
    return variables, [generator.normal(size=shape).astype("float32") for shape in shapes]


def momentum_step(optimizer, gradients, variables, delayed=False, divided=2):
    """A step in which the first variables' gradients are divided."""
    with momentum_only(optimizer, variables[:divided], [tf.constant(delayed)] * divided):
        pairs = zip(map(tf.constant, gradients), variables, strict=True)
        keras_private.apply(optimizer, list(pairs), aggregate=False)


@pytest.mark.parametrize("name", PRECONDITIONED)
def test_momentum_steps_equal_keras_where_the_second_moment_is_constant(name):
    (plain, gradients), (stepped, _) = variables_and_gradients(), variables_and_gradients()
    optimizer, momentum = (PRECONDITIONED[name](epsilon=1e-12) for _ in range(2))
    sizes = [np.abs(gradient) + 0.1 for gradient in gradients]
    for optimizer_of, variables in ((optimizer, plain), (momentum, stepped)):
        keras_private.build(optimizer_of, variables)
    for sign in (1, 1, -1, 1, -1, -1, -1):
        pairs = zip([tf.constant(sign * size) for size in sizes], plain, strict=True)
        keras_private.apply(optimizer, list(pairs), aggregate=False)
        momentum_step(momentum, [np.full_like(size, sign) for size in sizes], stepped)
    for first, second in zip(plain, stepped, strict=True):
        largest = np.abs(first.numpy()).max()  # of the weights: also steps of Lamb are no longer
        assert_close(first, second, adam_bound(), steps=7, scale=largest)


@pytest.mark.parametrize("name", PRECONDITIONED)
def test_a_delayed_gradient_goes_past_the_momentum(name):
    weights = []
    for settings, delayed in (({}, True), ({"beta_1": 0.0}, False)):
        optimizer = PRECONDITIONED[name](**settings)
        variables, _ = variables_and_gradients()
        keras_private.build(optimizer, variables)
        for step in range(3):
            momentum_step(optimizer, variables_and_gradients(step)[1], variables, delayed)
        weights.append(variables)
        if delayed:
            assert not any(slot.numpy().any() for slot in _slots(optimizer, "momentums", variables))
    for first, second in zip(*weights, strict=True):
        assert_close(first, second, terms=20, steps=3)


def test_nadam_multiplies_its_momentums_once_in_a_step_also_in_a_graph():
    """Keras' own does so once for each variable; here it steps with one of the two."""
    optimizer, expected = keras.optimizers.Nadam(), 1.0
    variables, gradients = variables_and_gradients()
    keras_private.build(optimizer, variables)
    step = tf.function(lambda: momentum_step(optimizer, gradients, variables, divided=1))
    for index in range(1, 4):
        step()
        expected *= 0.9 * (1 - 0.5 * 0.96**index)
        product, _ = keras_private.nadam_schedule(optimizer, tf.float32)
        assert float(product) == pytest.approx(expected, rel=rounding(1, terms=4, steps=3))


@pytest.mark.parametrize("name", ["Nadam", "legacy Nadam"])
def test_second_moments_are_handed_over_and_given_back(name):
    """From two replicas to one, and to two again, by what files hold."""

    def job(replicas, saved=None):
        strategy = mirrored(replicas)
        with strategy.scope():
            variables, _ = variables_and_gradients()
            inner = PRECONDITIONED[name](beta_2=0.9)
            optimizer = gc.CompressedOptimizer(inner, "top_k(density=1.0)", precondition="local")
            optimizer.build(variables)
        if saved:
            optimizer.set_weights(saved)
        step = stepper(
            strategy,
            lambda grads: optimizer.apply_gradients(list(zip(grads, variables, strict=True))),
        )
        return optimizer, variables, strategy, step

    def moments(parts):
        optimizer, _, strategy, _ = parts
        return [copies(strategy, v) for v in optimizer.exchange.state[SECOND_MOMENT]]

    def saved(parts):
        return [np.array(weight.numpy()) for weight in parts[0].variables]

    given = [[variables_and_gradients(10 * replica)[1] for replica in (1, 2)] for _ in range(3)]
    first = job(2)
    for gradients in given:
        first[3](gradients)
    single = job(1, saved(first))
    single[3](given[0][:1])
    slots = [slot.numpy() for slot in _slots(single[0].inner_optimizer, "velocities", single[1])]
    for slot, before, gradient in zip(slots, moments(first), given[0][0], strict=True):
        assert_close(slot, 0.9 * sum(before) + 0.1 * gradient**2, adam_bound(0.9))
    many = job(2, saved(single))
    many[3](given[0])
    for slot, after, *gradients in zip(slots, moments(many), *given[0], strict=True):
        for moment, gradient in zip(after, gradients, strict=True):
            assert_close(moment, 0.9 * slot / 2 + 0.1 * gradient**2, adam_bound(0.9))


def _slots(optimizer, kind, variables):
    return keras_private.slots(optimizer, kind, variables)


def test_parts_for_keras_3_say_so():
    with pytest.raises(ImportError, match=r"for Keras 3, and tf\.keras is Keras 2 here"):
        importlib.import_module("tf_gradcomp.keras.keras3.optimizer")


def test_kinds_are_read_off_a_model():
    model = small_model("sgd")
    kinds = gc.Policy.from_model(model).kinds
    assert sorted(kinds.values()) == ["dense", "embedding", "vector"]


# A test for each private name of Keras 2 and tensorflow-addons.


def test_is_loss_scaler():
    for inner in (legacy.SGD(0.1), keras.optimizers.SGD(0.1)):
        assert keras_private.is_loss_scaler(keras.mixed_precision.LossScaleOptimizer(inner))
        assert not keras_private.is_loss_scaler(inner)


@needs_addons
def test_within():
    import tensorflow_addons as tfa

    inner = legacy.SGD(0.1)
    outer = tfa.optimizers.SWA(tfa.optimizers.Lookahead(inner))
    assert list(keras_private.within(outer))[::2] == [outer, inner]


def test_build_and_variables_of():
    variable = tf.Variable([1.0, 2.0], name="weights")
    for optimizer in (legacy.Adam(), keras.optimizers.Adam()):
        keras_private.build(optimizer, [variable])
        names = [v.name for v in keras_private.variables_of(optimizer, [variable])]
        assert len([name for name in names if "weights" in name]) == 2


def test_variables_are_in_order_after_a_checkpoint(tmp_path):
    variables = [tf.Variable([1.0, 2.0], name=name) for name in ("first", "second")]
    saved, restored = legacy.Adam(), legacy.Adam()
    keras_private.build(saved, variables)
    path = tf.train.Checkpoint(variables=variables, optimizer=saved).save(str(tmp_path / "saved"))
    tf.train.Checkpoint(variables=variables, optimizer=restored).restore(path)
    keras_private.build(restored, variables)

    def names(optimizer):
        return [v.name for v in keras_private.variables_of(optimizer, variables)]

    assert names(restored) == names(saved)


def test_clip():
    variable, gradient = tf.Variable([0.0, 0.0]), tf.constant([3.0, 4.0])
    for optimizer in (legacy.SGD(clipnorm=1.0), keras.optimizers.SGD(clipnorm=1.0)):
        (clipped,) = keras_private.clip(optimizer, [gradient], [variable])
        assert_close(clipped, [0.6, 0.8], terms=5)


def test_slots():
    variable = tf.Variable([1.0, 2.0])
    for optimizer in (legacy.Adam(amsgrad=True), keras.optimizers.Adam(amsgrad=True)):
        keras_private.build(optimizer, [variable])
        keras_private.apply(optimizer, [(tf.constant([1.0, 1.0]), variable)], aggregate=True)
        for kind, value in (("momentums", 0.1), ("velocities", 0.001), ("velocity_hats", 0.001)):
            (slot,) = keras_private.slots(optimizer, kind, [variable])
            assert_close(slot, [value, value], adam_bound())


install_patches()  # which makes the table complete


def replace(monkeypatch, test, by):
    """Has `by` replace the functions whose replacements have a test of this name."""
    chosen = [patch for patch in PATCHES if patch.test == test]
    for patch in chosen:
        owner_name, _, name = patch.target.rpartition(".")
        owner = pkgutil.resolve_name(owner_name)
        monkeypatch.setattr(owner, name, vars(owner).get(name, getattr(owner, name)))
    patching.apply([patch._replace(by=by) for patch in chosen], "", "", pytest.fail)


def noting(seen):
    def by(original, *args, **kwargs):
        seen.append(args)
        return original(*args, **kwargs)

    return by


def test_handle_data(monkeypatch):
    seen = []

    def by(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        if kwargs.get("distribute", True):
            seen.append(self.inferred_steps)

    replace(monkeypatch, "test_handle_data", by)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((5, 1), "float32")
    keras.layers.Normalization().adapt(x)  # without a strategy
    model.fit(x, x, batch_size=2, verbose=0, validation_data=(x, x), validation_batch_size=5)
    model.evaluate(tf.data.Dataset.from_tensors((x, x)).filter(lambda *_: True), verbose=0)
    model.predict(x, batch_size=1, steps=4, verbose=0)
    assert seen == [3, 1, None, 4]


OF_KERAS_2 = [patch for patch in PATCHES if "keras" in patch.target]


@pytest.mark.parametrize("patch", OF_KERAS_2, ids=lambda patch: patch.target)
def test_each_patch_has_a_test(patch):
    assert callable(globals().get(patch.test)), patch.test


def test_no_protection_is_off_here():
    program = "import tf_gradcomp as gc; gc.CompressedOptimizer('sgd')"
    (worker,) = run_workers(program, 1)
    assert "is off" not in worker.stderr


def test_reduce_gradients(monkeypatch):
    def twice(original, self, grads_and_vars):
        return [(2 * gradient, variable) for gradient, variable in original(self, grads_and_vars)]

    replace(monkeypatch, "test_reduce_gradients", twice)
    for optimizer in (keras.optimizers.SGD(1.0), legacy.SGD(1.0)):
        variable = tf.Variable([0.0])
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])
        assert variable.numpy().tolist() == [-2]


def test_save(tmp_path, monkeypatch):
    seen = []
    replace(monkeypatch, "test_save", noting(seen))
    model = small_model("sgd")
    model.fit(np.zeros((4, 2), "int32"), np.zeros(4), verbose=0)
    for name in (names := ["m.keras", "m.h5", "folder"]):
        model.save(tmp_path / name)
    for name in (weights := ["w.h5", "w.weights.h5", "checkpoint"]):
        model.save_weights(tmp_path / name)
    assert [Path(path).name for _, path, *_ in seen] == [*names, *weights]


def test_a_wrapped_model_is_saved_in_each_format(tmp_path):
    model = small_model(gc.CompressedOptimizer("sgd"))
    model.fit(np.zeros((4, 2), "int32"), np.zeros(4), verbose=0)
    for _ in range(2):  # the second time over the first
        for name in ("m.keras", "m.h5", "folder"):
            model.save(tmp_path / name)
            keras.models.load_model(tmp_path / name)
        for name in ("w.h5", "w.weights.h5", "checkpoint"):
            model.save_weights(tmp_path / name)
            small_model("sgd").load_weights(tmp_path / name)
        model.save_weights(tmp_path / "by_keyword", save_format="HDF5 ")
        model.save_weights(tmp_path / "by_position", True, "h5")
    assert not list(tmp_path.glob(".*"))


def test_logs_are_written_where_the_chief_does_not_write(monkeypatch, tmp_path):
    monkeypatch.setattr(fit_module.files, "log_path", lambda _, path, *__: f"{path}-elsewhere")
    logs = (
        keras.callbacks.TensorBoard(str(tmp_path / "logs")),
        keras.callbacks.CSVLogger(str(tmp_path / "a")),
    )
    data = np.zeros((4, 2), "int32"), np.zeros(4)
    small_model(gc.CompressedOptimizer("sgd")).fit(*data, verbose=0, callbacks=logs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-elsewhere", "logs-elsewhere"]


class _Listed(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.events = []

    def set_model(self, model):
        super().set_model(model)
        self.listed = fit_module.callbacks_of_fit()

    def on_epoch_begin(self, epoch, logs=None):
        self.events.append("begin")

    def on_epoch_end(self, epoch, logs=None):
        self.events.append("end")


def test_fit(monkeypatch):
    callback = _Listed()
    for name in ("release", "collect_at_epoch_end", "synchronize"):
        monkeypatch.setattr(fit_module.files, name, lambda _, n=name: callback.events.append(n))
    for name in ("compare_settings", "compare_first_step"):
        note = lambda _, n=name: callback.events.append(n)  # noqa: E731
        monkeypatch.setattr(fit_module.equality, name, note)
    data = {"batch_size": 2, "verbose": 2, "callbacks": [callback]}
    model = small_model(gc.CompressedOptimizer("sgd"))
    x, y = np.zeros((4, 2), "int32"), np.zeros(4)
    model.fit(x, y, **data)
    steps = ["begin", "compare_settings", "compare_first_step", "collect_at_epoch_end", "end"]
    assert callback.events == ["release", *steps]
    kinds = [type(one) for one in callback.listed]
    assert kinds[1:4] == [_Listed, keras.callbacks.History, keras.callbacks.ProgbarLogger]
    callback.events.clear()
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    assert callback.events == ["synchronize"] * 2


test_evaluate = test_predict = test_fit


@pytest.mark.parametrize("module", [keras.callbacks, gc.callbacks], ids=["keras", "gc"])
def test_a_restarted_job_says_that_it_begins_from_zero(tmp_path, monkeypatch, caplog, module):
    caplog.set_level("INFO", "tf_gradcomp")
    monkeypatch.setenv("GRADCOMP_RESTARTS", "1")
    folder = str(tmp_path / "backup")
    without = "gradcomp run would restart this job from zero, because fit saves nothing"
    gone = f"job begins from zero, because there is no backup in {folder!r}"
    for saves, logged in (
        (False, [without]),
        (True, [gone]),
        (True, []),  # it finds the backup of the job before
    ):
        messages.forget()
        caplog.clear()
        backup = module.BackupAndRestore(folder, delete_checkpoint=False)
        model = small_model(gc.CompressedOptimizer(keras.optimizers.SGD(0.1)))
        data = np.zeros((4, 2), "int32"), np.zeros(4)
        model.fit(*data, verbose=0, epochs=2, callbacks=[backup] if saves else [])
        assert [line for line in (without, gone) if line in caplog.text] == logged


def test_reduce_outputs(monkeypatch):
    seen = []
    replace(monkeypatch, "test_reduce_outputs", noting(seen))
    small_model("sgd").fit(np.zeros((4, 2), "int32"), np.zeros(4), verbose=0)
    assert seen


def test_mark_results(monkeypatch):
    seen = []
    replace(monkeypatch, "test_mark_results", noting(seen))
    metric = keras.metrics.Mean()
    metric.update_state([1.0, 3.0])
    assert float(metric.result()) == 2
    assert len(seen) == 1


def test_results_of_metrics(monkeypatch):
    by = lambda original, self: {**original(self), "more": 1.0}  # noqa: E731
    replace(monkeypatch, "test_results_of_metrics", by)
    history = small_model("sgd").fit(np.zeros((4, 2), "int32"), np.zeros(4), verbose=0)
    assert history.history["more"] == [1]


def test_looks_for_nans():
    for inner in (legacy.SGD(0.1), keras.optimizers.SGD(0.1)):
        assert not keras_private.looks_for_nans(inner)
        keras.mixed_precision.LossScaleOptimizer(inner)
        assert keras_private.looks_for_nans(inner)


def test_own_variables_of_a_loss_scaler():
    scaler = keras.mixed_precision.LossScaleOptimizer(legacy.SGD(0.1), initial_scale=8)
    counter, scale = keras_private.state_variables(scaler)
    assert (int(counter), float(scale)) == (0, 8.0)


def test_layers_of():
    model = small_model("sgd")
    assert keras_private.layers_of(model)[0] is model


class _Epoch(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.found = keras_private.initial_position(self.model, 1)


def test_initial_position(tmp_path):
    for epochs, found in ((2, (0, 0)), (3, (2, 0))):
        epoch = _Epoch()
        backup = keras.callbacks.BackupAndRestore(str(tmp_path), delete_checkpoint=False)
        x = np.zeros((4, 2), "int32")
        given = {"epochs": epochs, "verbose": 0, "callbacks": [backup, epoch]}
        small_model("sgd").fit(x, np.zeros(4), **given)
        assert epoch.found == found


class _Fails(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3 and self.model.optimizer.iterations > 6:
            raise KeyboardInterrupt


def test_a_job_resumes_from_a_backup_within_an_epoch(tmp_path):
    x, y = np.arange(48).reshape(24, 2) % 6, np.arange(24) % 2
    steps = []
    for extra in ([], [_Fails()], []):
        backup = gc.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=4)
        model = small_model(gc.CompressedOptimizer(keras.optimizers.Adam(0.01)))
        given = {"epochs": 3, "batch_size": 4, "shuffle": False, "verbose": 0}
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(x, y, callbacks=[backup, *extra], **given)
        steps.append(int(model.optimizer.iterations))
    assert steps == [18, 9, 18]


def test_a_callback_that_comes_too_late_warns(tmp_path):
    model = small_model(gc.CompressedOptimizer("sgd"))
    late = [keras.callbacks.CSVLogger(tmp_path / "log.csv"), gc.callbacks.CompressionMonitor()]
    data = np.zeros((4, 2), "int32"), np.zeros(4)
    with pytest.warns(UserWarning, match="CompressionMonitor comes after CSVLogger"):
        model.fit(*data, verbose=0, callbacks=late)
