"""Processes with several replicas: these sum gradients, which the processes exchange as one each.

Their weights, sent bytes and state are compared with a job of one replica in each process, which
has the same part of each batch.
"""

import functools
import os
import signal
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.bounds import assert_close, training
from tests.distributed.common import classification_loss, scalar
from tests.ranks import RANK, SIZE, argument, digest, exchange_of, inner_of, report
from tests.workers import results, run_workers
from tf_gradcomp.groups.means import means_over_replicas
from tf_gradcomp.private import keras3 as keras_private
from tf_gradcomp.private import tensorflow as tf_private

PROGRAM = Path(__file__)  # each worker runs this file
BATCH, STEPS, BAD_STEP, TABLE = 32, 8, 3, 20
FEW = 2
ADACOMP = gc.compressors.AdaComp(bin_sizes=20)
AUTO = gc.compressors.Auto(["no_compression", ADACOMP])
TABLE_APART = gc.Policy(max_dense_elements=TABLE)


def data():
    """Rows for all replicas, and their weights: one of the last replica's makes NaN in a step."""
    rng = np.random.default_rng(1)
    words = rng.integers(0, TABLE, size=(BATCH * STEPS, 4)).astype("int32")
    weights = np.ones(BATCH * STEPS, "float32")
    weights[BATCH * (BAD_STEP + 1) - 1] = np.nan
    return words, (words.sum(1) % 3).astype("int32"), weights


def built(
    optimizer,
    compressor,
    seed=0,
    policy=None,
    precondition="auto",
    dtype="float32",
    local_steps=lambda: None,
    hidden=(),
    **compile_args,
):
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    keras.mixed_precision.set_global_policy(dtype)
    with strategy.scope():
        layers = [
            keras.layers.Input((4,), dtype="int32"),
            keras.layers.Embedding(TABLE, 4),
            keras.layers.Flatten(),
            *(keras.layers.Dense(units, activation="tanh") for units in hidden),
            keras.layers.Dense(3, dtype="float32"),
        ]
        model = keras.Sequential(layers)
        if not BY_STRATEGY:
            optimizer = gc.CompressedOptimizer(
                optimizer(), compressor, policy, precondition, local_steps=local_steps()
            )
        else:
            optimizer = optimizer()
        model.compile(optimizer, classification_loss(), **compile_args)
        model.optimizer.build(model.trainable_variables)
    return model


def batches(steps):
    """Returns each process' part of each batch, for any number of replicas."""

    def process_batches(context):
        rows = np.arange(BATCH * steps).reshape(steps, SIZE, -1)[:, RANK].ravel()
        local = tf.data.Dataset.from_tensor_slices(tuple(values[rows] for values in data()))
        return local.batch(context.get_per_replica_batch_size(BATCH))

    return strategy.distribute_datasets_from_function(process_batches)


def fit(model, steps=STEPS, **settings):
    model.fit(batches(steps), steps_per_epoch=steps, verbose=0, **settings)


@functools.cache
def step_of(model):
    return tf.function(lambda *batch: strategy.run(model.train_step, [batch]))


def take_steps(model, steps=STEPS):
    """Trains in a loop, which TensorFlow traces in less time than `fit`.

    Few steps are eager, which takes less time than to trace one.
    """
    eager = lambda *batch: strategy.run(model.train_step, [batch])  # noqa: E731
    for batch in batches(steps):
        (step_of(model) if steps > FEW else eager)(*batch)


def train(optimizer, compressor, steps=STEPS, by=take_steps, **settings):
    model = built(optimizer, compressor, **settings)
    by(model, steps)
    if "local_steps" in settings:
        model.optimizer.synchronize()
    return {**seen_of(model), "values": values_of(model)}


def values_of(model):
    return [np.asarray(variable) for variable in model.trainable_variables]


def seen_of(model):
    exchange = exchange_of(model)
    traffic = exchange.traffic()
    variables = [
        v.value for v in (*model.trainable_variables, *inner_of(model.optimizer).variables)
    ]
    each = [strategy.experimental_local_results(variable) for variable in variables]
    return {
        "replicas": [digest(values) for values in zip(*each, strict=True)],
        "exchanges": exchange.exchanges,
        "skipped": scalar(exchange.skipped_steps),
        "payload bytes": traffic.payload_bytes,
        "sent bytes": traffic.sent_bytes,
        "dense bytes": traffic.dense_bytes,
        "state": sums(exchange),
        "replicated": sum(
            isinstance(v, tf.distribute.DistributedValues) for v in exchange.variables
        ),
    }


def sums(exchange):
    """Returns the contents of a checkpoint; a collective."""
    return {
        name: [exchange.saving.read(variable) for variable in variables]
        for name, variables in exchange.state.items()
    }


def sgd(**settings):
    return lambda: keras.optimizers.SGD(0.1, **settings)


def adam(**settings):
    return lambda: keras.optimizers.Adam(1e-2, epsilon=0.05, **settings)


def planned():
    model = built(sgd(), gc.compressors.LGreCo("top_k(density=0.05)"), hidden=[64, 32])
    take_steps(model)
    plan = exchange_of(model).plan_settings()
    take_steps(model)
    return {
        **seen_of(model),
        "values": values_of(model),
        "plan": plan.settings,
        "ratio": plan.ratio,
    }


def handed_over():
    """Moves the inner optimizer's second moments to the processes."""
    before = built(adam(), ADACOMP, precondition=None)
    take_steps(before, 2)
    path = gc.worker_path(SAVED / "inner.weights.h5")
    before.save_weights(path)
    model = built(adam(), ADACOMP)
    model.load_weights(path)
    take_steps(model, 2)
    return {**seen_of(model), "values": values_of(model)}


def taken_over():
    """Shares out the gradients that a job of one replica had accumulated amid a round."""
    model = built(adam(gradient_accumulation_steps=2), ADACOMP)
    for accumulator in keras_private.accumulators(inner_of(model.optimizer)):
        accumulator.assign(np.ones(accumulator.shape))
    take_steps(model, 1)
    accumulators = model.optimizer.variables[-len(model.trainable_variables) :]
    return [np.asarray(accumulator.value) for accumulator in accumulators]


def rounds(**settings):
    nesterov = keras.optimizers.SGD(0.5, momentum=0.75, nesterov=True)
    return gc.LocalSteps(3, nesterov, **settings)


def within_a_round():
    """Returns the weights of each replica within a round, after one step, and rolled back."""
    model = built(sgd(), "top_k", local_steps=lambda: 3)
    optimizer, weights = model.optimizer, model.trainable_variables

    def step():
        def replica_step():
            rank = tf.distribute.get_replica_context().replica_id_in_sync_group
            gradient = tf.cast(rank + 1, tf.float32)
            optimizer.apply([tf.fill(v.shape, gradient) for v in weights], weights)

        strategy.run(replica_step)

    def seen():
        each = [strategy.experimental_local_results(variable.value) for variable in weights]
        return [digest(values) for values in zip(*each, strict=True)]

    common = seen()
    step()
    with optimizer.exchange.hooks.rolled_back():
        undone = seen()
    return {"common": common, "separate": seen(), "rolled back": undone}


def statistics():
    """Each replica has its own number in all statistics, and one of them is not finite."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
        model.compile(gc.CompressedOptimizer(sgd()(), local_steps=3), "mse")
        model.optimizer.build(model.trainable_variables)
    each = [strategy.experimental_local_results(v.value) for v in model.non_trainable_variables]
    for copies in each:
        for i, copy in enumerate(copies):
            number = REPLICAS * RANK + i
            copy.assign(np.full(4, np.inf if number == REPLICAS else number))
    model.optimizer.synchronize(model)
    return [copy.numpy() for copies in each for copy in copies]


def any_way():
    """Runs the checks that suit one replica in each process, too."""
    scalecom = gc.compressors.ScaleCom(20, warmup_steps=2)
    return {
        "no_compression": train(sgd(momentum=0.9), "no_compression"),
        "adacomp": trained_and_saved(),
        "scalecom": train(adam(gradient_accumulation_steps=2), scalecom),
        "table": train(sgd(), ADACOMP, policy=TABLE_APART),
        "lgreco": planned(),
        "handed over": handed_over(),
        "taken over": taken_over(),
        "rounds": train(
            sgd(), "top_k", by=fit, local_steps=lambda: rounds(warmup_steps=2, fragments=2)
        ),
        "updates": train(
            adam(gradient_accumulation_steps=2), "no_compression", local_steps=lambda: 3
        ),
        "gossip": train(sgd(), "no_compression", local_steps=lambda: gc.Gossip(rank=1)),
        "within": within_a_round(),
        "statistics": statistics(),
        # A job with several replicas in each process does this eagerly, the other one in a graph.
        "eager": train(sgd(momentum=0.9), "no_compression", 2, fit, run_eagerly=REPLICAS > 1),
    }


def mixed_float16():
    model = built(adam(), ADACOMP, dtype="mixed_float16", steps_per_execution=2)
    fit(model)
    return {**seen_of(model), "scale": scalar(model.optimizer.dynamic_scale)}


def checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def trained_and_saved():
    model = built(adam(clipnorm=0.1), ADACOMP)
    fit(model)
    model.save_weights(gc.worker_path(SAVED / "of.weights.h5"))
    checkpoint(model).write(gc.worker_path(SAVED / "tf"))
    return {**seen_of(model), "values": values_of(model)}


def load():
    seen = {}
    model = built(adam(), ADACOMP, seed=1)
    model.load_weights(LOADED / "of.weights.h5")
    seen[".weights.h5"] = seen_of(model)
    model = built(adam(), ADACOMP, seed=1)
    checkpoint(model).read(str(LOADED / "tf")).assert_consumed()
    seen["tf"] = seen_of(model)
    take_steps(model, FEW)
    seen["later"] = seen_of(model)
    return seen


def die_in_a_step():
    model = built(sgd(), "adacomp")

    def die(batch, logs):
        if RANK == 1 and batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    fit(model, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=die)])


def by_hand(reduce):
    """Reduces in a custom step a tensor of each replica, and a tensor that is equal on all
    replicas."""
    alike = tf.ones([30])
    with strategy.scope():
        variables = [tf.Variable(alike), tf.Variable(alike)]

    @tf.function
    def step():
        return strategy.run(lambda: reduce([tf.ones([30]), alike], variables))

    each = [strategy.experimental_local_results(total) for total in step()]
    return [variable.numpy() for variables in each for variable in variables]


def in_a_branch(gradients, variables):
    return tf.cond(
        tf.reduce_sum(gradients[0]) > 0,
        lambda: strategy.reduce_gradients(gradients, variables),
        lambda: gradients,
    )


def local_steps_refused():
    try:
        built(sgd(), "adacomp", local_steps=lambda: 3)
    except ValueError as error:
        return str(error)
    return None


def error_in_a_branch():
    try:
        by_hand(in_a_branch)
    except RuntimeError as error:
        return str(error)
    return None


def means_of_a_step():
    """Returns Keras' means of a step's results: numbers of each replica, and an equal number."""

    def step():
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        class_values = tf.cast(rank, tf.float16) + tf.constant([1, 2, 4], tf.float16)
        large = tf.constant(2.0**24) + 4.0 * tf.cast(rank, tf.float32)
        return {"classes": class_values, "large": large, "rank": rank, "alike": tf.constant(7.0)}

    in_a_graph = tf.function(lambda: means_over_replicas(strategy, strategy.run(step)))
    means = [in_a_graph(), means_over_replicas(strategy, strategy.run(step))]
    return [
        {name: (value.dtype.name, value.numpy().tolist()) for name, value in mean.items()}
        for mean in means
    ]


def main():
    if BY_STRATEGY:
        seen = {"table": train(sgd(), ADACOMP)}
        seen["by hand"] = by_hand(strategy.reduce_gradients)
        seen["in a branch"] = error_in_a_branch()
        report(seen)
        return
    if FLAT:
        report({"adacomp": trained_and_saved(), "refused": local_steps_refused()})
        return
    seen = {"loaded": load(), **any_way(), "means": means_of_a_step()}
    if REPLICAS > 1:
        seen["mixed_float16"] = mixed_float16()
        seen["auto"] = train(sgd(), AUTO, 2)
    report(seen)
    if REPLICAS > 1:
        die_in_a_step()


LOCAL = ["rounds", "updates", "gossip"]  # in which each process has its own inner optimizer
TRAINED = ["no_compression", "adacomp", "scalecom", "table", "handed over", "eager", *LOCAL]
CHECKS = [*TRAINED, "lgreco"]  # for which a last bit may decide which entry is sent
FORMATS = [".weights.h5", "tf"]
# With a momentum of 0.9, SGD(0.1) moves a weight in 8 steps by at most 5.7 times a single step.
# Adam(0.01) has an epsilon of 0.05. Sums are over 16 rows, 16 inputs and 3 classes.
APART = training(gain=0.57, terms=16 + 16 + 3, steps=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    names = ("flat", "two levels", "one replica")
    return {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in names}


def run(replicas, *args, check=True):
    return run_workers(PROGRAM, 2, [replicas, *args], check=check)


@pytest.fixture(scope="module")
def flat(folders):
    """Runs two processes of two replicas; each replica exchanges with all other replicas."""
    workers = run(2, folders["flat"], "nothing", "flat")
    return results(workers)


@pytest.fixture(scope="module")
def ended(folders, flat):
    """Two processes of two replicas, on two levels; in the end, the second one is killed."""
    return run(2, folders["two levels"], folders["flat"], check=False)


@pytest.fixture(scope="module")
def two_level(ended):
    return results(ended)


@pytest.fixture(scope="module")
def one_replica(folders, two_level):
    """Two processes of one replica."""
    workers = run(1, folders["one replica"], folders["two levels"])
    return results(workers)


@pytest.fixture(scope="module")
def by_strategy():
    """As `two_level`, by a compressor on the strategy."""
    return results(run(2, "nothing", "nothing", "strategy"))


@pytest.fixture(scope="module")
def flat_by_strategy():
    """As `flat`, by a compressor on the strategy."""
    return results(run(2, "nothing", "nothing", "flat strategy"))


@pytest.fixture(params=["by_strategy", "flat_by_strategy"])
def with_strategy(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("check", TRAINED)
def test_trains_as_one_replica_in_each_process(two_level, one_replica, check):
    ours, theirs = two_level[0][check], one_replica[0][check]
    for value, expected in zip(ours["values"], theirs["values"], strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=APART)
    assert set(ours["state"]) == set(theirs["state"])
    for name, values in theirs["state"].items():
        largest = max(np.abs(value).max() for value in values)
        for value, expected in zip(ours["state"][name], values, strict=True):
            np.testing.assert_allclose(value, expected, rtol=0, atol=APART * largest)


@pytest.mark.parametrize("check", CHECKS)
def test_sends_the_bytes_of_one_replica_in_each_process(two_level, one_replica, check):
    for ours, theirs in zip(two_level, one_replica, strict=True):
        for count in ("exchanges", "payload bytes", "sent bytes", "dense bytes"):
            assert ours[check][count] == theirs[check][count] > 0


@pytest.mark.parametrize("check", [*CHECKS, "auto", "mixed_float16"])
def test_all_replicas_have_bit_equal_weights_and_slots(two_level, check):
    each = [worker[check]["replicas"] for worker in two_level]
    assert [len(digests) for digests in each] == [2, 2]
    assert [len(set(digests)) for digests in each] == [1, 1]
    assert each[0] == each[1] or check in LOCAL
    assert two_level[0][check].get("values") == two_level[1][check].get("values")


@pytest.mark.parametrize("check", LOCAL)
def test_only_the_process_of_a_replica_that_is_not_finite_skips_a_local_step(two_level, check):
    assert [worker[check]["skipped"] for worker in two_level] == [0, 1]


def test_processes_differ_within_a_round_and_their_replicas_do_not(two_level):
    first, second = (worker["within"] for worker in two_level)
    for seen in (first, second):
        assert len(set(seen["separate"])) == 1
        assert seen["rolled back"] == seen["common"] == first["common"]
    assert len({first["separate"][0], second["separate"][0], first["common"][0]}) == 3


def test_statistics_are_means_over_all_replicas_on_which_they_are_finite(two_level, one_replica):
    for workers, mean in ((two_level, (0 + 1 + 3) / 3), (one_replica, 0)):
        for worker in workers:
            np.testing.assert_allclose(worker["statistics"], np.float32(mean), rtol=1e-6)


def test_local_steps_of_replicas_that_exchange_by_themselves_are_refused(flat):
    for worker in flat:
        assert "two_level=False" in worker["refused"]


@pytest.mark.parametrize(
    ("check", "skipped"),
    [("no_compression", 1), ("adacomp", 1), ("scalecom", 1), ("table", 1), ("lgreco", 2)],
)
def test_a_step_that_is_not_finite_on_one_replica_is_skipped_by_all(two_level, check, skipped):
    for worker in two_level:
        assert worker[check]["skipped"] == skipped
        assert all(np.isfinite(value).all() for value in worker[check]["values"])


def test_loss_scale_follows_what_all_replicas_saw(two_level):
    for worker in two_level:
        assert worker["mixed_float16"]["skipped"] == 1
        assert worker["mixed_float16"]["scale"] == 2**14  # half of Keras' initial one


def test_a_plan_equals_the_plan_of_one_replica_in_each_process(two_level, one_replica):
    plans = {str(worker["lgreco"]["plan"]) for worker in (*two_level, *one_replica)}
    assert len(plans) == 1
    assert two_level[0]["lgreco"]["ratio"] > 1


def test_means_of_what_a_step_returns_are_over_all_replicas(two_level, one_replica):
    for workers, rank in ((two_level, 1.5), (one_replica, 0.5)):
        for worker in workers:
            for means in worker["means"]:
                assert means == {
                    "classes": ["float16", [1 + rank, 2 + rank, 4 + rank]],
                    "large": ["float32", 2**24 + 4 * rank],
                    "rank": ["float64", rank],
                    "alike": ["float32", 7],
                }


def test_state_is_kept_once_in_each_process(two_level, flat):
    for worker in two_level:
        assert worker["adacomp"]["replicated"] == 0
    assert flat[0]["adacomp"]["replicated"] > 0  # else this test would see nothing


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("job", ["from one level to two", "from two levels to one"])
def test_nothing_is_lost_in_a_checkpoint(request, format_, job):
    jobs = ("flat", "two_level") if "to two" in job else ("two_level", "one_replica")
    (before, *_), after = (request.getfixturevalue(name) for name in jobs)
    for worker in after:
        loaded = worker["loaded"][format_]
        assert set(loaded["replicas"]) == set(before["adacomp"]["replicas"])
        assert loaded["exchanges"] == before["adacomp"]["exchanges"]
        for name, values in before["adacomp"]["state"].items():
            assert max(np.abs(value).max() for value in values) > 0
            for value, expected in zip(loaded["state"][name], values, strict=True):
                assert_close(value, expected, terms=4 + 1)  # a quarter of it, four times


def test_sums_accumulated_by_one_replica_are_divided_among_all(two_level, one_replica):
    ours, theirs = (workers[0]["taken over"] for workers in (two_level, one_replica))
    for total, expected in zip(ours, theirs, strict=True):
        assert_close(total, expected, terms=16 + 16 + 3)
        np.testing.assert_allclose(total, 1, atol=0.1)  # and the gradients of a step


def test_training_resumes_from_a_checkpoint_of_another_form(two_level, one_replica):
    for workers in (two_level, one_replica):
        later = [worker["loaded"]["later"] for worker in workers]
        assert len({digest for seen in later for digest in seen["replicas"]}) == 1
        for seen in later:
            assert seen["exchanges"] == workers[0]["loaded"]["tf"]["exchanges"] + 2


def test_compressor_on_the_strategy_trains_to_the_last_bit_alike(by_strategy, two_level):
    ours, theirs = by_strategy[0]["table"], two_level[0]["table"]
    assert ours["values"] == theirs["values"]
    assert ours["sent bytes"] == theirs["sent bytes"]


def test_all_replicas_are_equal_with_a_compressor_on_the_strategy(with_strategy):
    digests = [digest for worker in with_strategy for digest in worker["table"]["replicas"]]
    assert len(digests) == 4
    assert len(set(digests)) == 1
    assert {worker["table"]["skipped"] for worker in with_strategy} == {1}


def test_gradients_reduced_by_hand_are_sums_over_all_replicas(with_strategy):
    for worker in with_strategy:
        for total in worker["by hand"]:
            np.testing.assert_array_equal(total, np.full(30, 4.0))


def test_reducing_in_a_branch_is_refused_with_the_way_out(with_strategy):
    for worker in with_strategy:
        assert "reduce gradients outside it" in worker["in a branch"]


def test_survivor_of_a_killed_process_ends_with_a_named_error(ended):
    survivor, dead = ended
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, None)
    assert "tensorflow.python.framework.errors_impl.UnavailableError" in survivor.stderr


if __name__ == "__main__":
    REPLICAS, SAVED, LOADED = int(argument(1)), Path(argument(2)), Path(argument(3))
    FLAT, BY_STRATEGY = (word in argument(4, "") for word in ("flat", "strategy"))
    tf_private.use_logical_cpus(REPLICAS)
    strategy = gc.MultiWorkerMirroredStrategy(
        compressor=ADACOMP if BY_STRATEGY else None,
        policy=TABLE_APART if BY_STRATEGY else None,
        two_level=not FLAT,
    )
    main()
