"""Counts of losses, the step-time model and the pages made of recorded results."""

import checklist
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
    scores = checklist.scores([first, other])
    assert scores["top_k"].dense == pytest.approx([0.2 / 0.15, 0.1 / 0.3])
    assert scores["top_k"].cast == pytest.approx([0.1 / 0.15, 0.09 / 0.3])
    assert scores["adacomp"].fully_used == pytest.approx([0.08 / 0.05])
    assert scores[checklist.BEST_CAST].dense == pytest.approx([2, 0.1 / 0.09])
    text = "\n".join(checklist.count([first, other]))
    total = checklist.total([first, other])
    assert total.startswith("In 2 setups of a job, workers and a link, 1 of 3 steps with a method")
    assert "2 of 3 are slower than the best step with 16 bits, and 2 of 3 than a dense" in total
    assert "**2 setups were measured**: 1 jobs, 1 numbers of workers, 1 links." in text
    assert "| top_k | 1 of 2 | 2 of 2 | 2 of 2 | 0.33 to 1.3, median 0.83 |" in text
    ratios = "4.0 to 4.0, median 4.0 | 2.0 to 2.0, median 2.0"
    assert f"| adacomp | 0 of 1 | 0 of 1 | 0 of 1 | {ratios} | yes |" in text


def test_a_step_is_compared_with_a_fully_used_link_and_a_free_network():
    setup = one_setup(no_compression=0.4, ddp=0.2, cast=0.1, adacomp=0.05, nothing=0.04)
    setup.records["adacomp"]["stages"] = {"encode": 0.003, "decode": 0.002}
    lines, ddp = list(checklist.steps([setup])), turns.TORCH_ALL_REDUCE
    assert lines[-5:] == [
        "| free network | 40.0 |  |  |  | 5.0 | 2.5 | 2.0 | 100% |",
        "| adacomp | 50.0 | 45.0 to 60.0 | 3.0 | 2.0 | 4.0 | 2.0 | 1.6 | 80% |",
        "| dense on a fully used link | 80.0 |  |  |  | 2.5 | 1.2 | 1.0 | 50% |",
        "| best 16 bits: cast | 100.0 | 90.0 to 120.0 |  |  | 2.0 | 1.0 | 0.80 | 40% |",
        f"| best dense: {ddp} | 200.0 | 180.0 to 240.0 |  |  | 1.0 | 0.50 | 0.40 | 20% |",
    ]


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
    ("seconds", "words"),
    [
        ((1.0, 0.5, 0.1), "AdaComp 10.0 (5.0)"),
        ((1.0, 0.5, 0.49), "16 bits 2.0"),  # that much is noise
        ((1.0, 0.97, 0.96), "no"),
    ],
)
def test_the_verdict_names_the_method_that_pays(seconds, words):
    assert Steps(*seconds).verdict() == words


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
        list(worth_it.cells(mlp, found, Forecast.of(found), n, ["1 Gbit/s", "10 Gbit/s"]))
        for n in (2, 8)
    )
    dense, cast, sparse = 0.0704, step(turns.MLP, 2, 1000, 4e6), step(turns.MLP, 2, 1000, 2e5)
    assert two[0] == f"**AdaComp {dense / sparse:.1f} ({cast / sparse:.1f})**"
    assert two[1] == "no"
    assert not any("*" in cell for cell in eight)


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
    return {"task": "digits", "workers": 2, "link": "1 Gbit/s", "rows": rows}


def test_a_run_that_never_reaches_the_goal_loses():
    setup = trained(no_compression=[1, 1], cast=[2, 1.6], adacomp=[4, 8], qsgd=[9, None])
    text = "\n".join(report.details([{**setup, "about": {"machine": "some"}}]))
    assert "| adacomp | 6.0 (4.0 to 8.0) | 3.5 (2.0 to 5.0) | 60% | 20.0 |" in text
    assert "| qsgd | never in 1 of 2 | never in 1 of 2 |  | 20.0 |" in text
    text = "\n".join(report.count([setup, trained(cast=[0.5], adacomp=[0.4], qsgd=[0.6])]))
    assert text.splitlines()[-3:] == [
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
    for page, texts in publish.blocks().items():
        before = page.read_text()
        assert publish.filled(before, texts) == before, "run python benchmarks/publish.py"
