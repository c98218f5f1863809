"""What should be equal on all workers is compared: errors name it, or it becomes equal."""

from pathlib import Path

import numpy as np
import pytest

from tests.workers import results, run_workers


@pytest.fixture(scope="module")
def found():
    """Reports of two workers; the program is at the end of this file."""
    return results(run_workers(Path(__file__), 2))


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("rate on the chief", "optimizer's learning_rate: worker 0 has"),
        ("momentum on one worker", "optimizer's momentum: worker 0 has '0.5', worker 1 has '0.9'"),
        ("weights from the first batch", "scale' of worker 1, compared with worker 0"),
        ("spectral normalization in rounds", "kernel' of worker 1, compared with worker 0"),
        ("weights in a loop", "'kernel' of worker 1, compared with worker 0"),
    ],
)
def test_a_difference_is_an_error_that_names_it_on_all_workers(found, case, named):
    for worker in found:
        assert named in worker[case], worker[case]


def test_weights_from_the_first_batch_end_the_job_after_one_step(found):
    for worker in found:
        assert "after the first step" in worker["weights from the first batch"]


@pytest.mark.parametrize("case", ["teacher", "second model"])
def test_variables_that_no_optimizer_trains_become_means_after_local_steps(found, case):
    before = [np.array(worker[case]["before"]) for worker in found]
    assert not np.array_equal(*before)
    mean = (before[0] + before[1]) / 2
    for worker in found:  # one rounding of a sum, and one of its half
        np.testing.assert_allclose(worker[case]["after"], mean, rtol=2.0**-23)
        assert worker[case]["after"] == found[0][case]["after"]


def test_whole_numbers_become_the_chiefs_after_local_steps(found):
    assert [worker["whole number"] for worker in found] == [10, 10]


def test_a_variable_whose_rows_are_in_another_order_becomes_the_chiefs(found):
    """The rows are as long as a table's that the chief and the other worker shuffle differently."""
    assert [worker["rows"] for worker in found] == [list(range(64))] * 2


def test_random_slots_of_an_optimizer_begin_as_the_chiefs(found):
    chief, other = (worker["slots"] for worker in found)
    assert chief["drawn"] != other["drawn"]
    assert [chief["begun"], other["begun"]] == [chief["drawn"]] * 2


def test_slots_of_an_optimizer_are_compared_at_once(found):
    assert all(worker["slots"]["events"] < worker["slots"]["variables"] for worker in found)


def test_weights_that_differ_by_rounding_become_equal(found):
    first, second = (worker["rounding"] for worker in found)
    assert first["before"] != second["before"]
    assert first["after"] == second["after"]


def test_statistics_of_synchronous_steps_stay_each_workers(found):
    first, second = (worker["statistics"] for worker in found)
    assert first != second


def test_only_what_differs_is_sent(found):
    """The frozen layer has 56,000 bytes; a drift and four statistics differ."""
    for worker in found:
        assert 0 < max(worker["sent"]) <= 64


def test_it_can_be_switched_off(found):
    for worker in found:
        assert worker["switched off"] is None


def main():
    import keras
    import tensorflow as tf

    import tf_gradcomp as gc
    from tests.ranks import RANK, report
    from tf_gradcomp.private import tensorflow as tf_private

    strategy = gc.MultiWorkerMirroredStrategy()
    x = np.random.RandomState(0).normal(size=(16, 6)).astype("float32")
    found = {}

    def fit(model, *callbacks, **kwargs):
        """Returns the error that ends training, as text; None if there is none."""
        settings = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 2, **kwargs}
        try:
            model.fit(x, x[:, :1], callbacks=list(callbacks), **settings)
        except gc.WorkersDisagreeError as error:
            return str(error)
        return None

    def compiled(model, inner=None, loss="mse", **kwargs):
        inner = inner or keras.optimizers.SGD(0.1)
        model.compile(gc.CompressedOptimizer(inner, "no_compression", **kwargs), loss)
        return model

    def dense(*layers):
        keras.utils.set_random_seed(0)
        layers = layers or [keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((6,)), *layers])

    class Sets(keras.callbacks.Callback):
        """Calls a function with the model at the end of each epoch."""

        def __init__(self, change):
            super().__init__()
            self.change = change

        def on_epoch_end(self, epoch, logs=None):
            self.change(self.model)

    class Scale(keras.layers.Layer):
        """Divides by the scale of its first batch, as data-dependent initialization does."""

        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="zeros", name="scale")

        def call(self, inputs):
            first = keras.ops.equal(self.scale, 0)
            self.scale.assign(keras.ops.where(first, keras.ops.std(inputs), self.scale))
            return inputs / self.scale

    class Teacher(keras.Model):
        """Has weights that follow the trained ones, and a count of this worker's own."""

        def __init__(self):
            super().__init__()
            self.student, self.teacher = keras.layers.Dense(6), keras.layers.Dense(6)
            for layer in (self.student, self.teacher):
                layer.build((None, 6))
            self.count = self.add_weight(
                shape=(), dtype="int32", initializer="zeros", trainable=False, name="count"
            )
            self.built = True

        def train_step(self, data):
            rows, _ = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.student(rows) - self.teacher(rows)) ** 2) / 2
            variables = self.student.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            for old, new in zip(self.teacher.weights, self.student.weights, strict=True):
                old.assign(0.5 * old + 0.5 * new + 0.1 * tf.reduce_mean(rows))
            self.count.assign(10 + RANK)
            return {"loss": loss}

    class Before(keras.callbacks.Callback):
        """Records weights when an epoch's steps have ended, before workers compare."""

        def on_train_batch_end(self, batch, logs=None):
            found["teacher"] = {"before": self.model.teacher.kernel.numpy().tolist()}

    with strategy.scope():
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=10.0)
        found["rate on the chief"] = fit(compiled(dense()), *[plateau] * (RANK == 0), epochs=4)

        momentum = compiled(dense(), keras.optimizers.SGD(0.1, 0.5))
        change = Sets(lambda model: setattr(model.optimizer.inner_optimizer, "momentum", 0.9))
        found["momentum on one worker"] = fit(momentum, *[change] * (RANK == 1))

        found["weights from the first batch"] = fit(compiled(dense(Scale(), keras.layers.Dense(1))))

        normal = keras.layers.SpectralNormalization(keras.layers.Dense(3))
        rounds = compiled(dense(normal, keras.layers.Dense(1)), local_steps=2)
        found["spectral normalization in rounds"] = fit(rounds, batch_size=4)

        optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(0.1), "no_compression")
        kernel = keras.Variable(np.full((3,), 1.0 + RANK, "float32"), name="kernel")
        optimizer.build([kernel])
        tf.function(lambda: strategy.run(lambda: optimizer.apply([tf.ones(3)], [kernel])))()
        strategy.experimental_local_results(kernel.value)[0].assign([1.0 + RANK] * 3)
        try:
            optimizer.collect_state()
        except gc.WorkersDisagreeError as error:
            found["weights in a loop"] = str(error)

        model = Teacher()
        compiled(model, loss=None, local_steps=2)
        model.optimizer.build(model.student.trainable_variables)
        fit(model, Before(), epochs=1)
        found["teacher"]["after"] = model.teacher.kernel.numpy().tolist()
        found["whole number"] = int(model.count.numpy())

        first, second = dense(), dense(keras.layers.BatchNormalization(), keras.layers.Dense(1))
        compiled(first, local_steps=2)
        first.optimizer.build([*first.trainable_variables, *second.trainable_variables])
        fit(first, epochs=1)
        mean = second.layers[0].moving_mean
        mean.assign(x[RANK])
        before = mean.numpy().tolist()
        first.optimizer.synchronize(second)
        found["second model"] = {"before": before, "after": mean.numpy().tolist()}

        rows = np.repeat(np.arange(64.0, dtype="float32")[:, np.newaxis], 2048, axis=1)
        table = tf.Variable(rows[::-1] if RANK else rows)
        found["rows"] = table.numpy()[:, 0].tolist()

        class Noise(keras.optimizers.Adam):
            """Begins with random moments, from no seed."""

            def build(self, variables):
                super().build(variables)
                moment = self._momentums[0]
                moment.assign(np.random.default_rng(RANK).normal(size=moment.shape))
                self.drawn = moment.numpy().tolist()

        kernels = [keras.Variable(np.ones(3, "float32"), name=f"kernel{i}") for i in range(20)]
        optimizer = gc.CompressedOptimizer(Noise(), "no_compression")
        before = strategy.progress.position()
        optimizer.build(kernels)
        inner = optimizer.inner_optimizer
        found["slots"] = {
            "drawn": inner.drawn,
            "begun": inner._momentums[0].numpy().tolist(),
            "variables": len(inner.variables),
            "events": strategy.progress.position().events - before.events,
        }

        model, seen = compiled(dense()), []

        def round_differently(model):
            kernel = model.layers[-1].kernel
            (copy,) = strategy.experimental_local_results(kernel.value)
            copy.assign(np.nextafter(kernel.numpy(), np.float32(np.inf if RANK else -np.inf)))
            seen.append(kernel.numpy().tolist())

        assert fit(model, Sets(round_differently)) is None
        assert fit(model, epochs=1) is None
        found["rounding"] = {
            "before": seen[0],
            "after": model.layers[-1].kernel.numpy().tolist(),
        }

        norm = keras.layers.BatchNormalization()
        assert fit(compiled(dense(norm, keras.layers.Dense(1)))) is None
        found["statistics"] = norm.moving_mean.numpy().tolist()

        sent, add = [], tf_private.sum_over_workers

        def recorded(strategy, values):
            if tf.executing_eagerly():
                sent.append(values.dtype.size * int(tf.size(values)))
            return add(strategy, values)

        tf_private.sum_over_workers = recorded
        norm = keras.layers.BatchNormalization(center=False, scale=False)
        frozen = keras.layers.Dense(2000, trainable=False)
        layers = frozen, keras.layers.Dense(2), norm
        assert fit(compiled(dense(*layers), local_steps=2), epochs=1) is None
        tf_private.sum_over_workers = add
        found["sent"] = sent

        strategy.compare_variables = False
        found["switched off"] = fit(compiled(dense()), *[plateau] * (RANK == 0), epochs=4)
    report(found)


if __name__ == "__main__":
    main()
