"""The sums of the cost model, and the sentence made of them."""

import dataclasses

import pytest

from tf_gradcomp.advice.cost_model import (
    Curve,
    Kind,
    Prediction,
    ProbeResult,
    SentRequest,
    Work,
    advice_for_one_replica,
    advice_on,
    enough_local_steps,
    predict,
    verdict,
)

pytestmark = pytest.mark.quick

SUM, GATHER = Kind("AllReduce", "float32"), Kind("AllGather", "int32")
LATENCY, PER_BYTE = 0.002, 1e-7


def line(places):
    return [(index, LATENCY + PER_BYTE * index) for index in places]


def prediction(method, compute=0.0, transfer=0.0, like_dense=True):
    return Prediction(method, compute, 0.001, 0.002, transfer, 0.001, 10.0, 20.0, like_dense)


@pytest.mark.parametrize("sent_bytes", [0, 500, 1000, 30_000, 64_000, 9_000_000])
def test_latency_and_bandwidth_are_found_again_also_beyond_what_was_measured(sent_bytes):
    curve = Curve.through(line([1000, 8000, 64_000]))
    assert curve.seconds(sent_bytes) == pytest.approx(LATENCY + PER_BYTE * sent_bytes)
    assert curve.latency == pytest.approx(LATENCY)


def test_between_two_points_it_is_a_line():
    curve = Curve([(100, 1.0), (200, 1.5), (300, 4.0)])
    assert curve.seconds(150) == pytest.approx(1.25)
    assert curve.seconds(250) == pytest.approx(2.75)
    assert curve.seconds(500) == pytest.approx(9.0)


def test_fewer_bytes_take_no_longer_than_more():
    curve = Curve.through([(100, 5.0), (200, 1.0), (300, 2.0)])
    assert curve.seconds(100) == 1.0
    assert curve.latency == 1.0


def test_one_point_determines_no_time_per_byte():
    assert Curve([(100, 3.0)]).seconds(1e9) == 3.0


def test_a_step_is_the_sum_of_its_parts():
    work = Work(0.010, 0.005, 800.0, [SentRequest(GATHER, 1000.0), SentRequest(SUM, 2000.0)])
    curves = {kind: Curve.through(line([0, 10_000]), 0.25) for kind in (SUM, GATHER)}
    found = predict("some", work, curves, compute=0.1)
    assert found.latency == pytest.approx(2 * LATENCY)
    assert found.transfer == pytest.approx(3000 * PER_BYTE)
    assert found.exchange == pytest.approx(0.015 + 2 * LATENCY + 3000 * PER_BYTE)
    assert found.step == pytest.approx(found.exchange + 0.1)
    assert (found.payload_bytes, found.sent_bytes) == (800, 3000)
    assert found.noise == 0.5


def test_so_many_local_steps_suffice_that_exchanges_take_a_tenth_of_the_time():
    one = prediction("adacomp", compute=0.010, transfer=0.006)
    assert one.exchange == pytest.approx(0.010)
    assert enough_local_steps(one) == 9  # an exchange of 10 ms and nine steps of 10 ms
    assert enough_local_steps(prediction("adacomp", compute=1.0)) == 1
    assert enough_local_steps(prediction("adacomp")) is None


def test_a_sample_is_scaled_to_the_model():
    work = Work(0.010, 0.005, 800.0, [SentRequest(SUM, 1000.0)]).scaled(3.0, 2.0)
    requests = [SentRequest(SUM, 2000.0)]
    assert work == Work(pytest.approx(0.03), pytest.approx(0.015), 1600.0, requests)


def test_the_report_names_the_method_to_use():
    slow, fast = prediction("dense", 0.1, 0.3), prediction("adacomp", 0.1)
    assert verdict([slow, fast]) == (
        'Use compressor="adacomp": about 3.9 times faster (104.0 instead of 404.0 ms a step).'
    )
    exchanges = [dataclasses.replace(one, compute=0.0) for one in (slow, fast)]
    assert "76.0 times faster (4.0 instead of 304.0 ms an exchange)" in verdict(exchanges)


def test_the_report_limits_its_promise_of_accuracy():
    slow = prediction("dense", 0.1, 0.3)
    untried, worse = (prediction("qsgd", like_dense=known) for known in (None, False))
    assert verdict([slow, untried]).endswith(
        "did not measure whether this method trains like uncompressed."
    )
    assert verdict([slow, worse]).endswith("this method trained less well than uncompressed.")


@pytest.mark.parametrize("baseline_transfer", [0.0, 0.003])
def test_the_report_warns_that_compression_will_not_pay(baseline_transfer):
    dense, other = prediction("dense", 0.1, baseline_transfer), prediction("cast", 0.1, 0.001)
    assert verdict([dense, other]).startswith("Compression will not pay: ")
    assert advice_on(ProbeResult([dense, other]), 0.1).best == "dense"


def test_nothing_is_decided_within_the_spread_of_the_measurements():
    slow = dataclasses.replace(prediction("dense", 0.1, 0.020), noise=0.008)
    fast = dataclasses.replace(prediction("cast", 0.1, 0.006), noise=0.008)
    says = "Not decided: cast is the fastest (110.0 instead of 124.0 ms a step), but the "
    assert verdict([slow, fast]).startswith(f"{says}measurements vary by 16.0 ms.")
    assert advice_on(ProbeResult([slow, fast]), 0.1).best == "dense"
    clear = dataclasses.replace(fast, noise=0.001)
    assert verdict([slow, clear]).startswith('Use compressor="cast"')


def test_advice_is_a_sentence_and_a_table_of_four_columns():
    sparse = prediction("top_k(density=0.5)", like_dense=None)
    predictions = [prediction("dense", transfer=0.3), sparse]
    advice = advice_on(ProbeResult(predictions), 0.1)
    assert advice.best == "top_k(density=0.5)"
    text = str(advice)
    assert all(one.method in text for one in predictions)
    assert text.startswith('Use compressor="top_k(density=0.5)": about 3.9 times faster')
    assert max(map(len, text.splitlines())) <= 78
    rows = [line.split() for line in text.splitlines()]
    assert ["dense", "404.0", "1.0", "20", "B", "yes"] in rows
    assert ["top_k(density=0.5)", "104.0", "3.9", "20", "B", "not", "tried"] in rows
    assert "100.0 ms is computing and 304.0 ms exchanging" in text
    assert "With top_k(density=0.5) and local_steps=1 or more" in " ".join(text.split())
    assert all(one.method in advice.details for one in predictions)
    assert [one.compute for one in advice.predictions] == [0.1, 0.1]


def test_the_report_warns_that_gradients_of_embeddings_count_as_dense():
    probed = ProbeResult([prediction("dense"), prediction("cast")], ["a/embeddings"])
    assert "The gradient of 'a/embeddings' was counted as dense" in advice_on(probed, 0.1).verdict
    assert "counted as dense" not in advice_on(probed._replace(tables=[]), 0.1).verdict


def test_one_replica_has_nothing_to_exchange():
    advice = advice_for_one_replica("no_compression")
    assert advice.best == "no_compression"
    assert str(advice) == "Compression will not pay: one worker exchanges nothing."
