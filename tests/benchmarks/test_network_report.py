"""Tests the figures of the network benchmark's report."""

import network_report
import pytest
import turns

MLP = {"job": turns.MLP, "workers": 2}


def record(contender, milliseconds, *, link="100 Mbit/s", counted=None, carried=400.0, stages=None):
    return {
        **MLP,
        "link": link,
        "contender": contender,
        "seconds": [value / 1e3 for value in milliseconds],
        "page_faults": [1000, 3000],
        "interface_bytes": 1.05 * carried,
        "carried_bytes": carried,
        "counted_bytes": counted,
        "stages": stages,
    }


@pytest.fixture
def records():
    stages = {"encode": 0.002, "decode": 0.001}
    return [
        record(turns.ALL_REDUCE, [790, 800, 900], counted=9_000_000, carried=9_090_400),
        record("adacomp", [20, 16, 24], counted=20_000, carried=21_400, stages=stages),
        record("cast", [400], counted=4_000_000, carried=4_200_400, stages=stages),
        record(turns.NOTHING, [10], counted=0.0),
        record(turns.TORCH_ALL_REDUCE, [900], counted=9_000_000, carried=9_000_400),
        record(turns.TORCH_POWER_SGD, [90], carried=110_400),
    ]


@pytest.fixture
def measured(records):
    records[1]["predicted"] = 0.009  # of the exchange, in seconds
    unshaped = [
        {**record, "link": "unshaped", "seconds": [milliseconds / 1e3]}
        for record, milliseconds in zip(records, (20, 40, 10, 5, 30, 30), strict=True)
    ]
    raw = [
        {"workers": 2, "link": "100 Mbit/s", "Mbit/s": 100.0, "Mbit/s both ways": 90.0, "ms": 0.05},
        {"workers": 2, "link": "unshaped", "Mbit/s": 10_000.0, "ms": 0.02},
    ]
    return {"about": {"machine": "some"}, "raw": raw, "records": records + unshaped}


def by_name(records):
    return {row.name: row for row in network_report.rows(records)}


def test_speed_ups_are_over_the_dense_run_of_the_same_framework(records):
    rows = by_name(records)
    assert (rows["adacomp"].median, rows["adacomp"].least, rows["adacomp"].most) == (20, 16, 24)
    assert rows["adacomp"].speed_up == pytest.approx(40)
    assert rows["adacomp"].page_faults == 2000
    assert rows[turns.TORCH_POWER_SGD].speed_up == pytest.approx(10)


def test_our_count_is_held_against_the_interface(records):
    rows = by_name(records)
    assert rows[turns.ALL_REDUCE].agrees
    assert rows["cast"].agrees is False
    assert rows["adacomp"].agrees is None  # too little is sent
    assert rows["adacomp"].carried == 21_000  # less what the benchmark itself sends
    assert rows[turns.TORCH_POWER_SGD].agrees is None  # nobody counts


def test_the_parts_of_a_step_add_up(records):
    parts = network_report.split(records)
    assert parts["adacomp"] == pytest.approx(
        {"compute": 10, "encode": 2, "communicate": 7, "decode": 1}
    )
    assert parts[turns.NOTHING]["communicate"] == 0
    assert turns.TORCH_ALL_REDUCE not in parts


def test_speed_ups_are_at_the_speed_of_both_directions(measured):
    curve = network_report.speed_ups(measured, turns.MLP, 2)["adacomp"]
    assert curve == [(90, pytest.approx(40)), (10_000, pytest.approx(0.5))]


def test_predictions_that_are_close_are_counted(measured):
    groups = network_report.grouped(measured["records"], "link")
    # 19 ms for 20 on the slow link, 14 for 40 on the unshaped one
    assert network_report.accuracy(groups).startswith("Of 2 predictions 1 are within 20%")
    assert not network_report.accuracy({("10 Mbit/s",): [record(turns.ALL_REDUCE, [800])]})
