"""Claims of papers: which runs they have, how their records are judged, and what is written."""

import dataclasses
import types

import evidence
import evidence_page
import methods_table
import pool
import pytest
import records
import simulated
from claims import CLAIMS
from claims.claim import CANNOT_RUN, NOT_REPRODUCED, NOT_RUN, REPRODUCED, UNDECIDED
from click.testing import CliRunner
from simulated import Encoding, Training

from tf_gradcomp import compressors

TRAFFIC = {
    "exchanges": 10,
    "tensor_bytes": {"a": 10 * 104, "b": 10 * 204, "c": 10 * 204},
    "variables": {
        "a": {"kind": "convolution", "elements": 1000},
        "b": {"kind": "dense", "elements": 10_000},
        "c": {"kind": "recurrent", "elements": 10_000},
    },
}


def traffic(share):
    """Returns the traffic of SIDCo that sends this share of the wanted number of entries."""
    sizes = {"a": 100, "b": 10_000}  # the first is too small for an estimate
    counts = {"a": 1, "b": share * 0.001 * sizes["b"]}
    return {
        "exchanges": 10,
        "tensor_bytes": {name: 10 * (4 + 8 * count) for name, count in counts.items()},
        "variables": {name: {"kind": "dense", "elements": size} for name, size in sizes.items()},
    }


def record(run, quality=98.0, **more):
    """Returns a record as a run leaves it."""
    measured = {"quality": quality, "curve": [0.9, 0.98], "seconds": 1.0, "processor": "a CPU"}
    measured |= {"dense_bytes": 4000, "payload_bytes": 40.0, "sent_bytes": 80.0}
    measured |= {"period_payload_bytes": [80.0, 40.0], "traffic": TRAFFIC}
    measured |= {"cosine_distance": [0.5, 0.5], "hamming_distance": [0.7, 0.7]}
    measured |= {"encode_ms": 2.0, "decode_ms": 1.0}
    versions = {"tensorflow": "2.21.0", "keras": "3.15.1"}
    return {**dataclasses.asdict(run), **measured, "versions": versions, **more}


def verdict(name, **changed):
    """Returns the verdict on a claim, whose runs have equal records but for some labels."""
    claim = CLAIMS[name]
    named = {label.replace("_", " "): values for label, values in changed.items()}
    results = {
        label: [record(run, **{"quality": 98.0, **named.get(label, {})})]
        for label, run in claim.runs.items()
    }
    return claim.verdict(results)[0]


def test_all_claims_can_be_judged_or_say_why_not():
    for name, claim in CLAIMS.items():
        assert bool(claim.check) == bool(claim.runs) == bool(claim.ran) != bool(claim.cannot), name
        assert claim.verdict({})[0] == (NOT_RUN if claim.runs else CANNOT_RUN)


def test_all_runs_are_of_methods_that_there_are():
    runs = evidence.chosen(())
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        compressors.get(run.compressor)
        assert run.seed == 0
        if isinstance(run, Training):
            assert run.rows % run.learners == 0, run.name
            assert 3 < simulated.expected_seconds(run) < 900, run.name
            points = -(-run.steps // simulated.steps_between_evaluations(run))
            assert points <= 30, "a record would be large"


def test_patterns_choose_runs_and_the_longest_come_first():
    single = evidence.chosen(["adacomp/mnist_cnn*"])
    assert [run.learners for run in single] == [8, 1]
    some = evidence.chosen(["methods/digits_8", "adacomp/mnist_cnn", "adacomp/ratios"])
    assert {*single} < {*some[:3]}  # claims
    assert {*some[3:]} == {*methods_table.GROUPS["methods/digits_8"]}
    for part in (some[:3], some[3:]):
        seconds = [*map(simulated.expected_seconds, part)]
        assert seconds == sorted(seconds, reverse=True)
    assert all(isinstance(run, Encoding) for run in evidence.chosen(["methods/encoding*"]))
    assert evidence.chosen(["adacomp/imagenet"]) == []
    all_runs = evidence.chosen(())
    assert {*all_runs} == {run for runs in evidence.OF_CLAIMS.values() for run in runs} | {
        run for runs in methods_table.GROUPS.values() for run in runs
    }


@pytest.mark.parametrize(
    ("name", "changed", "expected"),
    [
        ("adacomp/mnist_cnn", {"AdaComp": {"quality": 97.73}}, REPRODUCED),
        ("adacomp/mnist_cnn", {"AdaComp": {"quality": 97.71}}, NOT_REPRODUCED),
        ("adacomp/mnist_cnn", {"dense": {"quality": 94.9}}, UNDECIDED),  # it has not trained
        (
            "adacomp/char_lstm",
            {"dense": {"quality": 2.5}, "AdaComp": {"quality": 2.54}},
            REPRODUCED,
        ),
        (
            "adacomp/char_lstm",  # bits: less is better
            {"dense": {"quality": 2.5}, "AdaComp": {"quality": 2.55}},
            NOT_REPRODUCED,
        ),
        ("adacomp/char_lstm", {"dense": {"quality": 2.8}, "AdaComp": {"quality": 2.5}}, UNDECIDED),
        ("adacomp/bins", {"bins_of_5000": {"quality": 97.3}}, REPRODUCED),
        ("adacomp/bins", {"bins_of_5000": {"quality": 96.9}}, UNDECIDED),  # less than an image
        ("adacomp/bins", {"bins_of_5000": {"quality": 96.7}}, NOT_REPRODUCED),
        ("adacomp/learners", {}, REPRODUCED),
        ("adacomp/learners", {"32_workers": {"payload_bytes": 39.5}}, REPRODUCED),
        ("adacomp/learners", {"128_workers": {"payload_bytes": 41.0}}, NOT_REPRODUCED),
        ("adacomp/selection", {}, NOT_REPRODUCED),
        (
            "adacomp/selection",
            {"top-k": {"quality": 96.0}, "local_selection": {"quality": 96.0}},
            REPRODUCED,
        ),
        (
            "adacomp/selection",
            {"top-k": {"quality": 97.5}, "local_selection": {"quality": 96.0}},
            NOT_REPRODUCED,
        ),
        (
            "adacomp/selection",  # it sends half the bytes
            {
                "top-k": {"quality": 96.0, "payload_bytes": 20.0},
                "local_selection": {"quality": 96.0},
            },
            UNDECIDED,
        ),
        ("scalecom/learners", {}, REPRODUCED),
        ("scalecom/learners", {"64_workers": {"period_payload_bytes": [0, 45]}}, NOT_REPRODUCED),
        ("scalecom/learners", {"8_workers": {"period_payload_bytes": [0, 65]}}, NOT_REPRODUCED),
        ("scalecom/similarity", {"beta_=_1": {"cosine_distance": [0.1, 0.8]}}, REPRODUCED),
        ("scalecom/similarity", {}, UNDECIDED),
        ("scalecom/similarity", {"beta_=_1": {"cosine_distance": [0.9, 0.2]}}, NOT_REPRODUCED),
        (
            "scalecom/similarity",  # it has diverged
            {"beta_=_1": {"cosine_distance": [0.1, 0.8], "quality": 10.0}},
            UNDECIDED,
        ),
        ("scalecom/overlap", {}, REPRODUCED),
        ("scalecom/large_batch", {"beta_=_1": {"quality": 97.0}}, REPRODUCED),
        ("scalecom/large_batch", {}, NOT_REPRODUCED),  # nothing is lost with beta = 1
        (
            "sidco/threshold",
            {"SIDCo": {"traffic": traffic(1)}, "SIDCo,_LSTM": {"traffic": traffic(0.8)}},
            REPRODUCED,
        ),
        (
            "sidco/threshold",
            {"SIDCo": {"traffic": traffic(1)}, "SIDCo,_LSTM": {"traffic": traffic(0.6)}},
            NOT_REPRODUCED,
        ),
        ("lgc/few_bits", {"LGC": {"period_payload_bytes": [80.0, 39.0]}}, REPRODUCED),
        ("lgc/few_bits", {}, NOT_REPRODUCED),
        ("lgreco/top_k", {"planned": {"period_payload_bytes": [40.0, 16.0]}}, REPRODUCED),
        ("lgreco/top_k", {"planned": {"period_payload_bytes": [40.0, 30.0]}}, NOT_REPRODUCED),
        ("lgreco/qsgd", {}, NOT_REPRODUCED),  # plans that save nothing
        ("power_sgd/accuracy", {"uniform": {"quality": 97.4}}, REPRODUCED),
        ("power_sgd/accuracy", {"uniform": {"quality": 97.01}}, UNDECIDED),
        ("power_sgd/accuracy", {"uniform": {"quality": 96.7}}, NOT_REPRODUCED),
        ("sketches/accuracy", {"sketch": {"quality": 90.0}}, UNDECIDED),  # at 100 times
        ("sketches/accuracy", {"sketch": {"quality": 90.0, "payload_bytes": 90}}, NOT_REPRODUCED),
    ],
)
def test_verdicts_follow_from_the_records(name, changed, expected):
    assert verdict(name, **changed) == expected


def test_ratios_are_computed_for_each_kind_of_layer():
    claim = CLAIMS["adacomp/ratios"]
    results = {label: [record(run)] for label, run in claim.runs.items()}
    outcome = claim.check(results)
    assert outcome.holds
    assert outcome.found == {
        "convolutions": "40 times",
        "fully-connected": "200 times",
        "recurrent": "200 times",
    }


def test_a_claim_is_judged_by_the_seeds_that_all_its_runs_have():
    claim = CLAIMS["adacomp/mnist_cnn"]
    dense, other = (claim.runs[label].name for label in ("dense", "AdaComp"))
    of_runs = {
        dense: [record(claim.runs["dense"], 98.0, seed=seed) for seed in (0, 1)],
        other: [record(claim.runs["AdaComp"], 98.0 - seed, seed=seed) for seed in (1, 2)],
    }
    results = evidence_page.results_of(claim, of_runs)
    assert [len(result) for result in results.values()] == [1, 1]
    assert claim.verdict(results)[0] == NOT_REPRODUCED
    page = evidence_page.page(of_runs, evidence.command)
    assert "| [adacomp/mnist_cnn](#adacompmnist_cnn) | 1 | **not reproduced** |" in page
    assert "**Measured:** error uncompressed: 2.00 %; with AdaComp: 3.00 %." in page
    assert "**Not checked against the paper:** A CNN on MNIST" in page
    assert "--only adacomp/char_lstm --resume" in page
    assert "Measured with TensorFlow 2.21.0 and Keras 3.15.1 on a CPU." in page


def test_a_learner_is_timed():
    measured = Encoding("top_k", 2, 0).measure()
    assert {"encode_ms", "decode_ms"} <= measured.keys()


def test_a_method_is_bold_if_no_equally_accurate_method_sends_less():
    def of(method, quality, sent):
        run = methods_table.run_of("digits", 2, method)
        return {run.name: [record(run, quality, sent_bytes=sent)]}

    some = of("no_compression", 98.0, 0.0) | of("adacomp", 97.5, 20.0) | of("qsgd", 97.5, 500.0)
    some |= of("random_k", 90.0, 1.0)
    assert methods_table.unbeaten(methods_table.cells(some, "digits", 2)) == []
    for method in methods_table.METHODS:
        run = methods_table.run_of("digits", 2, method)
        some.setdefault(run.name, [record(run, 90.0)])
    found = methods_table.cells(some, "digits", 2)
    assert found["no_compression"].sent == 440 * 4000  # 2 (n - 1) / n, of two workers
    assert found["adacomp"].sent == 440 * 20
    assert found["random_k"].behind == 8
    assert methods_table.unbeaten(found) == ["adacomp"]
    text = "\n".join(methods_table.markdown(some, 2))
    assert "| `adacomp` | +0.50 | **200** | not run yet |" in text
    assert methods_table.wins(some)[1] == 1


def invoked(folder, *args):
    return CliRunner().invoke(evidence.main, [*args, "--results", str(folder / "records")])


def test_runs_leave_records_that_are_resumed(tmp_path, monkeypatch):
    done = []

    class Pool:
        def __init__(self, *_):
            pass

        def run_all(self, runs):
            for run in runs:
                done.append(run)
                yield run, record(run) if run.learners == 1 else None

    monkeypatch.setattr(pool, "Pool", Pool)
    some = ["--only", "adacomp/bins", "--seeds", "2"]
    first = invoked(tmp_path, *some)
    assert first.exit_code == 1
    assert "6 runs failed" in first.output
    assert [run.seed for run in done] == [0] * 4 + [1] * 4
    done.clear()
    refused = invoked(tmp_path, *some).output
    assert "holds the results of an earlier run" in " ".join(refused.split())
    invoked(tmp_path, *some, "--resume")
    assert [run.learners for run in done] == [8] * 6
    file = tmp_path / "records" / records.EVIDENCE.name
    found = records.by_name(file)
    name = CLAIMS["adacomp/bins"].runs["dense"].name
    records.write_by_name(file, {**found, name: {**found[name], "steps": 5}})
    refused = invoked(tmp_path, *some, "--resume").output
    assert "is of another run" in " ".join(refused.split())


def test_a_run_in_a_separate_process_sends_its_record(tmp_path):
    good = Training("digits", 2, 0, 4, "adacomp")
    bad = Training("digits", 3, 0, 4)  # they cannot share a batch of 64
    progress = []
    two = pool.Pool(tmp_path, simulated.WORK, pool.Limits(2, 1), progress.append)
    ended = dict(two.run_all([good, bad]))
    assert ended[bad] is None
    settings = ("task", "learners", "steps")
    assert [ended[good][key] for key in settings] == ["digits", 2, 4]
    assert len(ended[good]["curve"]) == 1
    assert ended[good]["sent_bytes"] > 0
    assert "cannot be divided equally" in (tmp_path / f"{bad.name}.log").read_text()
    assert sorted(progress) == progress
    assert [file.name for file in tmp_path.glob("*")] == [f"{bad.name}.log"]


def test_runs_that_can_end_in_time_come_first(tmp_path, monkeypatch):
    started = []

    class Process:
        exitcode = 0

        def __init__(self, target, args, name):
            self.run = args[0]

        def start(self):
            started.append(self.run)

        def join(self):
            pass

    clock = iter(range(0, 10_000, 10))  # 10 seconds for all that is looked at

    class End:
        def recv(self):
            return {}

        def close(self):
            pass

    context = types.SimpleNamespace(Process=Process, Pipe=lambda duplex: (End(), End()))
    monkeypatch.setattr(pool, "_preloaded", lambda module, threads: context)
    monkeypatch.setattr(pool.connection, "wait", lambda running, timeout: running)
    monkeypatch.setattr(pool, "time", types.SimpleNamespace(monotonic=clock.__next__))
    long, short = (Training("digits", 8, 0, steps) for steps in (20_000, 22))
    limits = pool.Limits(1, 1, minutes=1)
    one = pool.Pool(tmp_path, simulated.WORK, limits, lambda done: None)
    ended = [run for run, _ in one.run_all([long, short])]
    assert ended == started == [short, long]


def test_all_records_are_of_runs_that_there_are():
    found = evidence.recorded(records.EVIDENCE)
    used = {
        dataclasses.replace(run, seed=one["seed"]).name
        for run in evidence.chosen(())
        for one in found[run.name]
    }
    assert records.by_name(records.EVIDENCE).keys() == used, (
        "these records are of runs that there are no more"
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--only", "dgc/*"], "No claim matches dgc/*; one is adacomp/mnist_cnn"),
        (["--only", "adacomp/char_lstm"], "Set GRADCOMP_DATA, or choose other tasks by --only"),
        (["--seeds", "11"], "11 is not in the range"),
    ],
)
def test_impossible_runs_are_refused(args, words, tmp_path, monkeypatch):
    monkeypatch.delenv("GRADCOMP_DATA", raising=False)
    refused = invoked(tmp_path, *args)
    assert refused.exit_code == 2, refused.output
    assert words in " ".join(refused.output.split())
