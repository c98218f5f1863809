"""Counts of losses, the step-time model and the pages made of recorded results."""

import losses
import numpy as np
import publish
import pytest
import records
import time_to_accuracy_report as report
import turns
import worth_it
from setups import Cost, Setup, _not_negative, fit, ring_bytes, setups, trials
from worth_it import Forecast, Model, Steps

LATENCY, EACH = 0.002, 4e-9  # seconds, and seconds for each weight
SPEEDS = {"10 Mbit/s": 10.0, "100 Mbit/s": 100.0, "1 Gbit/s": 1000.0}
WEIGHTS = {turns.MLP: 2_000_000, turns.EXCHANGE: 20_000_000}


def record(setup, contender, seconds, sent=None):
    return {
        **setup,
        "contender": contender,
        "seconds": [0.9 * seconds, seconds, 1.2 * seconds],
        "counted_bytes": sent,
        "carried_bytes": sent,
        "predicted": None,
        "page_faults": [7, 9],
        "stages": None,
    }


def step(job, workers, speed, sent):
    """Seconds of a step of 10 ms of computing, in a world that obeys the model."""
    return 0.01 + LATENCY + EACH * WEIGHTS[job] * workers / 2 + 8e-6 * sent / speed


@pytest.fixture(scope="module")
def measured():
    found = []
    for job, weights in WEIGHTS.items():
        for workers in (2, 4):
            for link, speed in SPEEDS.items():
                place = {"job": job, "workers": workers, "link": link}
                dense = ring_bytes(workers, 4 * weights)
                sparse = (workers - 1) * 4 * weights // 40
                every = {"no_compression": dense, "cast": dense / 2, "adacomp": sparse}
                for name, sent in every.items():
                    found.append(record(place, name, step(job, workers, speed, sent), sent))
                found.append(record(place, turns.TORCH_ALL_REDUCE, 8.8e-6 * dense / speed, dense))
                found.append(record(place, turns.NOTHING, 0.01))
    raw = [
        {"workers": n, "link": link, "Mbit/s": 2 * speed, "Mbit/s both ways": speed, "ms": 0.1}
        for n in (2, 4)
        for link, speed in SPEEDS.items()
    ]
    return {"about": {"machine": "some"}, "raw": raw, "records": found}


def one_setup(**seconds):
    names = {"ddp": turns.TORCH_ALL_REDUCE, "nothing": turns.NOTHING}
    place = {"job": turns.MLP, "workers": 2, "link": "100 Mbit/s"}
    found = {names.get(name, name): record(place, name, one) for name, one in seconds.items()}
    found["no_compression"]["counted_bytes"] = 1_000_000  # 80 ms at full speed
    return Setup(**place, speed=100.0, records=found)


def test_losses_are_counted_against_the_best_of_each_baseline():
    first = one_setup(no_compression=0.4, ddp=0.2, cast=0.1, adacomp=0.05, top_k=0.15, nothing=0.01)
    other = one_setup(no_compression=0.1, cast=0.09, top_k=0.3, nothing=0.01)
    scores = losses.scores([first, other])
    assert scores["top_k"].dense == pytest.approx([0.2 / 0.15, 0.1 / 0.3])
    assert scores["top_k"].cast == pytest.approx([0.1 / 0.15, 0.09 / 0.3])
    assert scores["adacomp"].fully_used == pytest.approx([0.08 / 0.05])
    assert scores[losses.BEST_CAST].dense == pytest.approx([2, 0.1 / 0.09])
    text = "\n".join(losses.count([first, other]))
    total = losses.total([first, other])
    assert "slower than the best uncompressed step in 1 of 3 comparisons" in total
    assert "2 setups of 1 jobs and 1 links" in total
    assert "| top_k | 1 of 2 | 2 of 2 | 2 of 2 | 0.33 | 0.83 | 1.3 |" in text
    assert "| adacomp | 0 of 1 | 0 of 1 | 0 of 1 | 4.0 | 4.0 | 4.0 | yes |" in text


def test_the_model_finds_the_costs_of_a_world_that_obeys_it(measured):
    found = setups(measured)
    for trial in trials(found):
        assert len(trial.errors) == (18 if trial.tested == "4 workers" else 6)
        assert abs(trial.worst[1]) < 1e-6
    assert [trial.tested for trial in trials(found)] == [
        *(f"2 workers, {link}" for link in SPEEDS),
        "4 workers",
    ]
    cost = fit("adacomp", found)
    assert (cost.latency, cost.each) == (pytest.approx(LATENCY), pytest.approx(EACH))


def test_the_error_is_computed_on_held_out_setups(measured):
    changed = {**measured, "records": [dict(one) for one in measured["records"]]}
    for one in changed["records"]:
        if one["link"] == "1 Gbit/s" and one["contender"] == "cast" and one["workers"] == 2:
            one["seconds"] = [2 * seconds for seconds in one["seconds"]]
    trial = trials(setups(changed))[2]
    errors = {name: error for (name, where), error in trial.errors.items() if turns.MLP in where}
    assert errors["cast"] == pytest.approx(-0.5)
    assert abs(errors["no_compression"]) < 1e-6
    assert trial.worst[1] == pytest.approx(-0.5)


@pytest.mark.parametrize("sign", [1, -1])
def test_costs_are_not_negative(sign):
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    factors = _not_negative(columns, sign * np.array([3.0, 2.0, 1.0]))
    assert min(factors) == 0
    assert max(factors) == pytest.approx(2 if sign > 0 else 0)


def test_records_keep_the_quantiles_and_the_later_run(measured, tmp_path):
    later = {**measured, "records": [{**measured["records"][0], "seconds": [1, 2, 3, 4, 5.00004]}]}
    merged = records.merge_steps([measured, later])
    assert len(merged["records"]) == len(measured["records"])
    assert merged["records"][0]["seconds"] == [1, 2, 3, 4, 5]
    assert merged["records"][0]["page_faults"] == [8]
    times = {"task": "digits", "link": "1 Gbit/s", "rows": [{"seconds": 1.0}]}
    everything = {**merged, "setups": [times]}
    records.write_network(everything, tmp_path / "records" / "network.jsonl")
    assert records.read_network(tmp_path / "records" / "network.jsonl") == everything


@pytest.mark.parametrize(
    ("seconds", "dense", "cast"),
    [
        ((1.0, 0.5, 0.1), "AdaComp 10.0", "5.0"),
        ((1.0, 0.5, 0.49), "cast 2.0", "no gain"),  # that much is noise
        ((1.0, 0.97, 0.96), "no gain", "no gain"),
    ],
)
def test_a_cell_names_the_method_that_pays(seconds, dense, cast):
    steps = Steps(*seconds)
    assert (steps.over_dense(), steps.over_cast()) == (dense, cast)


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("compute", [0.0, 0.05])
def test_steps_are_equal_where_compression_breaks_even(workers, compute):
    forecast, model = Forecast(Cost(LATENCY, EACH)), Model("", 20e6, compute, 40)
    even = forecast.steps(model, workers, forecast.break_even(model, workers))
    assert even.sparse == pytest.approx(even.dense)
    even = forecast.steps(model, workers, forecast.break_even(model, workers, 0.5))
    assert even.sparse == pytest.approx(even.cast)
    assert forecast.break_even(model, 200) == 0  # its payloads are more than a dense gradient


def test_measured_cells_are_bold_and_others_predicted(measured):
    found = setups(measured)
    (mlp, _) = worth_it.measured_models(found)
    assert (mlp.weights, mlp.compute, mlp.fewer) == (2e6, 0.01, 40)
    two, eight = (
        worth_it.cells(mlp, found, Forecast.of(found), n, Steps.over_dense) for n in (2, 8)
    )
    assert two["1 Gbit/s"] == f"**AdaComp {0.0704 / step(turns.MLP, 2, 1000, 2e5):.1f}**"
    assert two["10 Gbit/s"] == "no gain"
    assert not any("*" in cell for cell in eight.values())


def trained(**sooner_than_dense):
    rows = [
        {
            "method": name,
            "times faster": one,
            "of a free network's": one and one / 10,
            "seconds of a step": 0.02,
        }
        for name, several in sooner_than_dense.items()
        for one in several
    ]
    return {"task": "digits", "workers": 2, "link": "1 Gbit/s", "delay": 0.0, "rows": rows}


def test_a_run_that_never_reaches_the_goal_loses():
    setup = trained(no_compression=[1, 1], cast=[2, 1.6], adacomp=[4, 8], qsgd=[9, None])
    (row,) = report.speed_ups([setup])[2:]
    assert row.startswith("| digits | 2 | 1 Gbit/s | 1.8 (1.6 to 2.0) | 6.0 (4.0 to 8.0) |")
    assert row.endswith("| 3.5 (2.0 to 5.0) |")
    assert report.step_times([setup])[2] == "| digits | 2 | 1 Gbit/s | 20.0 | 20.0 | 20.0 |  |"
    (delayed,) = report.step_times([{**setup, "delay": 20.0}])[2:]
    assert delayed.startswith("| digits | 2 | 1 Gbit/s, 20 ms each way |")
    text = report.count([setup, trained(cast=[0.5], adacomp=[0.4], qsgd=[0.6])])
    assert text[2:] == [
        "| cast | 1 of 2 |  |",
        "| adacomp | 1 of 2 | 1 of 2 |",
        "| qsgd | 2 of 2 | 1 of 2 |",
    ]


def test_parts_of_a_page_are_replaced():
    page = "a\n<!-- b -->\nold\n<!-- end of b -->\nc\n"
    changed = publish.filled(page, {"b": r"new \1"})
    assert changed == "a\n<!-- b -->\n\nnew \\1\n\n<!-- end of b -->\nc\n"
    with pytest.raises(ValueError, match="there 0 times"):
        publish.filled(page, {"d": ""})


def test_pages_are_what_the_records_say():
    for page, text in publish.pages().items():
        assert page.read_text() == text, f"{page}: run python benchmarks/publish.py"
