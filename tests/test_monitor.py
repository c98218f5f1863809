"""Tests `CompressionMonitor`: its logs, its output, and its counts."""

from __future__ import annotations

import csv
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradcomp as gc
from tests.reference import adacomp
from tests.replicas import collective
from tf_gradcomp.groups import messages

LOGS = [
    "payload_bytes",
    "sent_bytes",
    "dense_bytes",
    "compression_ratio",
    "fewer_bytes",
    "skipped_steps",
    "residual_norm",
]
SIZES = [30 * 64, 64, 64 * 3, 3]
HEADER = 56 + 4  # and a word of bits: which gradients of Adam begin in this step


def data(bad_batch=None):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(64, 30)), generator.normal(size=(64, 3))
    if bad_batch is not None:
        x[16 * bad_batch + 3] = np.inf  # a batch has 16 samples, 8 for each replica
    return x.astype("float32"), y.astype("float32")


def build(optimizer=None, strategy=None, **kwargs):
    with (strategy or collective()).scope():
        model = keras.Sequential(
            [keras.Input((30,)), keras.layers.Dense(64, name="a"), keras.layers.Dense(3, name="b")],
            name="model",
        )
        if optimizer is None:
            optimizer = gc.CompressedOptimizer(keras.optimizers.Adam(0.01), **kwargs)
        model.compile(optimizer, loss="mse")
    return model


def fit(model, *callbacks, epochs=2, verbose=0, bad_batch=None, table=False):
    monitor = gc.callbacks.CompressionMonitor(table=table)
    x, y = data(bad_batch)
    return model.fit(
        x,
        y,
        batch_size=16,
        epochs=epochs,
        shuffle=False,
        verbose=verbose,
        callbacks=[monitor, *callbacks],
    )


class Payloads:
    """Records the bytes of each payload, which the oracle reads from the encoder's output."""

    def __init__(self, monkeypatch):
        self.bytes = []
        encode = gc.ops.adacomp_encode

        @functools.wraps(encode)
        def noting(residuals, gradients, step, **layout):
            payload, tensor_bytes = encode(residuals, gradients, step, **layout)
            shapes = [gradient.shape for gradient in gradients]

            def note(words, bin_sizes):
                values = adacomp.decode_payload(words, shapes, bin_sizes.numpy())
                self.bytes.append(HEADER + sum(map(self._tensor_bytes, values, bin_sizes.numpy())))

            tf.py_function(note, [payload, layout["bin_sizes"]], [])
            return payload, tensor_bytes

        monkeypatch.setattr(gc.ops, "adacomp_encode", noting)

    @staticmethod
    def _tensor_bytes(values, bin_size):
        """Scale and length, then a code for each entry, and one for each bin without any."""
        bins = -(-values.size // bin_size)
        padded = np.pad(values.reshape(-1), (0, bins * bin_size - values.size))
        sent = np.count_nonzero(padded.reshape(bins, bin_size), axis=1)
        codes = np.maximum(sent, 1).sum() * (1 if bin_size < 64 else 2)
        return 8 + 4 * -(-codes // 4)


def test_history_has_all_logs_for_each_epoch():
    history = fit(build()).history
    for name in LOGS:
        assert len(history[name]) == 2, name
    assert history["skipped_steps"] == [0, 0]
    assert all(norm > 0 for norm in history["residual_norm"])


def test_payload_bytes_equal_an_independent_count(monkeypatch):
    payloads = Payloads(monkeypatch)
    model = build()
    model.run_eagerly = True  # where the replicas encode in turn
    history = fit(model).history
    assert len(payloads.bytes) == 2 * 4 * 2
    first = payloads.bytes[0::2]
    means = [np.mean(first[:4]), np.mean(first[4:])]
    assert history["payload_bytes"] == pytest.approx(means)


def test_ratios_follow_from_the_bytes():
    history = fit(build()).history
    assert history["dense_bytes"] == [4 * sum(SIZES)] * 2
    for dense, payload, sent, ratio, wire in zip(
        *(history[name] for name in LOGS[2:3] + LOGS[:2] + LOGS[3:5]), strict=True
    ):
        assert ratio == pytest.approx(dense / payload)
        # Two replicas: a ring all-reduce sends all elements once, and a gather the longer payload.
        assert wire == pytest.approx(dense / sent)
        assert sent > payload


def test_sent_bytes_are_the_longest_payload_and_its_length():
    whole = gc.compressors.AdaComp(dict.fromkeys(["dense", "vector"]))
    history = fit(build(compressor=whole), epochs=1).history
    payload = HEADER + sum(8 + 4 * size for size in SIZES)
    assert history["payload_bytes"] == [payload]
    assert history["sent_bytes"] == [payload + 4]
    assert history["residual_norm"] == [0]


@pytest.mark.parametrize("verbose", [1, 2])
def test_the_progress_bar_shows_two_of_them(capsys, verbose):
    fit(build(), epochs=1, verbose=verbose)
    output = capsys.readouterr().out
    assert "fewer_bytes: " in output
    for name in set(LOGS) - {"fewer_bytes"}:
        assert name not in output
    assert len(fit(build(), epochs=1, verbose=verbose, bad_batch=1).history) == len(LOGS) + 1
    assert "skipped_steps: 1" in capsys.readouterr().out


def test_batches_have_them_as_well():
    seen = []

    class Batches(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(set(logs))

    fit(build(), Batches(), epochs=1)
    assert all(set(LOGS) - {"residual_norm"} <= names for names in seen)
    assert len(seen) == 4


def test_tensorboard_and_csv_have_them(tmp_path):
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fit(
        build(),
        keras.callbacks.TensorBoard(tmp_path / "board"),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
    )
    events = tensorboard.EventAccumulator(str(tmp_path / "board" / "train"))
    events.Reload()
    tags = {tag for kind in events.Tags().values() if isinstance(kind, list) for tag in kind}
    assert {f"epoch_{name}" for name in LOGS} <= tags
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert set(LOGS) <= set(rows[0])


@pytest.mark.parametrize("reader", ["TensorBoard", "CSVLogger", "ProgbarLogger"])
def test_warns_after_a_callback_that_will_not_see_its_logs(tmp_path, reader):
    arguments = {"TensorBoard": [tmp_path], "CSVLogger": [tmp_path / "log.csv"]}
    before = getattr(keras.callbacks, reader)(*arguments.get(reader, []))
    monitor = gc.callbacks.CompressionMonitor(table=False)
    with pytest.warns(UserWarning, match=rf"comes after {reader} in the list.*put.*first"):
        build().fit(*data(), batch_size=64, verbose=0, callbacks=[before, monitor])


def test_does_not_warn_in_the_first_place(recwarn):
    fit(build(), epochs=1)
    assert not [warning for warning in recwarn if "CompressionMonitor" in str(warning.message)]


def test_prints_a_table_by_variable(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    model = build()
    history = fit(model, epochs=1, table=True).history
    output = capsys.readouterr().out
    assert "Payload of one exchange, in bytes, mean of 4:" in output
    for spec in model.optimizer.exchange.specs:
        (row,) = [line for line in output.splitlines() if spec.path in line]
        assert row.split()[:3] == [spec.path, spec.kind, f"{spec.elements:,}"]
    (header,) = [line for line in output.splitlines() if "header" in line]
    assert header.split() == ["header", str(HEADER)]
    (total,) = [line for line in output.splitlines() if line.startswith("total payload")]
    assert total.split()[2:] == [f"{sum(SIZES):,}", f"{history['payload_bytes'][0]:,.0f}"]
    sent, fewer = history["sent_bytes"][0], history["fewer_bytes"][0]
    first = f"This worker sent {sent:,.0f} bytes in each exchange instead of {4 * sum(SIZES):,}"
    assert f"{first}: {fewer:,.1f} times fewer." in output
    fit(model, epochs=1, table=True)
    assert "Payload of one exchange" not in capsys.readouterr().out  # once for a model


@pytest.mark.parametrize(("table", "rows"), [(True, 10), ("all", 24)])
def test_the_table_has_the_largest_variables_and_fits(capsys, monkeypatch, table, rows):
    monkeypatch.setenv("COLUMNS", "69")  # of 80, behind "[worker 0] "
    with collective().scope():
        names = [f"a_rather_long_name_{i}" for i in range(12)]
        layers = [keras.layers.Dense(40 - 2 * i, name=name) for i, name in enumerate(names)]
        model = keras.Sequential([keras.Input((30,)), *layers], name="m" * 50)
        model.compile(gc.CompressedOptimizer("sgd"), loss="mse")
    x = np.zeros((16, 30), "float32")
    monitor = gc.callbacks.CompressionMonitor(table=table)
    model.fit(x, np.zeros((16, 18)), verbose=0, callbacks=[monitor])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 69
    named = [line.split() for line in lines if "_name_" in line]
    assert len(named) == rows
    assert all(row[0].startswith("\N{HORIZONTAL ELLIPSIS}/a_rather_long_name_") for row in named)
    elements = [int(row[2].replace(",", "")) for row in named]
    others = [line.split() for line in lines if line.startswith("14 others")]
    if table is True:
        assert elements == sorted(elements, reverse=True)
        elements.append(int(others[0][2].replace(",", "")))
    assert sum(elements) == model.count_params()


def test_a_model_that_is_too_small_is_told_of(capsys):
    with collective().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(gc.CompressedOptimizer("sgd"), loss="mse")
    monitor = gc.callbacks.CompressionMonitor()
    history = model.fit(
        np.ones((8, 2), "float32"), np.ones((8, 1)), verbose=0, callbacks=[monitor]
    ).history
    more = history["sent_bytes"][0] / 12  # three weights as float32
    assert more > 1
    output = " ".join(capsys.readouterr().out.split())
    assert f"instead of 12: {more:,.1f} times MORE. The model is too small" in output


def test_a_table_that_travels_sparse_is_in_the_ratios_and_in_the_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    rows, width, used = 1000, 8, 8 * 5
    with collective().scope():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Embedding(rows, width),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        policy = gc.Policy(max_dense_elements=rows * width - 1)
        model.compile(gc.CompressedOptimizer("sgd", policy=policy), loss="mse")
    x = np.random.default_rng(0).integers(rows, size=(64, 5))
    history = model.fit(
        x,
        np.zeros((64, 1), "float32"),
        batch_size=16,
        verbose=0,
        callbacks=[gc.callbacks.CompressionMonitor()],
    ).history
    elements = rows * width + 5 * width + 1
    table, rest = used * (4 * width + 4), history["payload_bytes"][0]
    assert history["dense_bytes"] == [4 * elements]
    assert table < rest < table + 4 * (5 * width + 1) + 48 + 2 * 8
    assert history["compression_ratio"] == [pytest.approx(4 * elements / rest)]
    assert history["sent_bytes"][0] >= table
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "embeddings" in line]
    assert row.split()[3] == f"{table:,}"


def test_the_table_can_be_left_out(capsys):
    fit(build(), epochs=1)
    assert "Payload of one exchange" not in capsys.readouterr().out


def test_the_table_covers_one_fit_and_not_those_before(capsys):
    model = build()
    fit(model, epochs=1)
    fit(model, epochs=1, table=True)
    assert "mean of 4:" in capsys.readouterr().out


def test_counts_skipped_steps():
    model = build()
    history = fit(model, bad_batch=1).history
    assert history["skipped_steps"] == [1, 2]
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 6
    for weight in model.get_weights():
        assert np.isfinite(weight).all()


def test_looks_through_a_loss_scaler():
    with collective().scope():
        inner = gc.CompressedOptimizer(keras.optimizers.Adam(0.01))
        scaler = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0)
    assert set(LOGS) <= set(fit(build(scaler), epochs=1).history)


def test_with_one_replica_nothing_is_exchanged(capsys):
    history = fit(build(strategy=tf.distribute.get_strategy()), table=True).history
    assert history["skipped_steps"] == [0, 0]
    assert history["residual_norm"] == [0, 0]
    assert "payload_bytes" not in history
    assert "Payload of one exchange" not in capsys.readouterr().out


@pytest.mark.parametrize("make", [collective, tf.distribute.get_strategy, None])
def test_without_compression_the_callback_gives_a_notice_and_no_logs(make, capsys, caplog):
    strategy = make() if make else gc.MultiWorkerMirroredStrategy()
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.01)
    messages.forget()
    history = fit(build(optimizer, strategy), table=True).history
    assert set(history) == {"loss"}
    assert "Payload of one exchange" not in capsys.readouterr().out
    assert "nothing compresses the gradients of this model. Wrap its optimizer" in caplog.text


def test_no_notice_if_the_strategy_compresses(caplog):
    messages.forget()
    strategy = gc.MultiWorkerMirroredStrategy(compressor="adacomp")
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.01)
    fit(build(optimizer, strategy))
    assert "nothing compresses" not in caplog.text
