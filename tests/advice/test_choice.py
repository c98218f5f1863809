"""Tests the choice of a method by predicted times."""

import types

import pytest

from tf_gradcomp import compressors
from tf_gradcomp.advice import probe as probing
from tf_gradcomp.advice.cost_model import Prediction, ProbeResult
from tf_gradcomp.exchange.setup import Candidate

GROUP = types.SimpleNamespace(size=2, processes=types.SimpleNamespace(size=2))


@pytest.mark.parametrize(
    ("seconds", "noise", "chosen"),
    [
        ({"no_compression": 1.0, "adacomp": 0.9, "cast": 0.8}, 0, "cast"),
        ({"adacomp": 0.96, "no_compression": 1.0}, 0, "no_compression"),  # not worthwhile
        ({"adacomp": 0.94, "no_compression": 1.0}, 0, "adacomp"),
        ({"adacomp": 0.99, "cast": 1.0}, 0, "adacomp"),
        ({"no_compression": 0.0459, "cast": 0.0422}, 0.002, "no_compression"),
        ({"no_compression": 0.0459, "cast": 0.0422}, 0.001, "cast"),
        ({"no_compression": 1.0, "cast": 0.5, "adacomp": 0.45}, 0.03, "cast"),
        ({"no_compression": 1.0, "cast": 0.5, "adacomp": 0.45}, 0.02, "adacomp"),
        ({"no_compression": 1.0, "cast": 0.99, "adacomp": 0.9}, 0.049, "adacomp"),
    ],
)
def test_another_method_is_chosen_only_where_it_is_really_shorter(
    monkeypatch, seconds, noise, chosen
):
    def probe(group, specs, candidates, effort):
        times = (seconds[candidate.compressor.name] for candidate in candidates)
        found = [Prediction("", 0, 0, 0, time, 0, 0, 0, noise=noise) for time in times]
        return ProbeResult(found)

    monkeypatch.setattr(probing, "probe", probe)
    candidates = [Candidate(compressors.get(name)) for name in seconds]
    assert probing.choose(GROUP, candidates, []).compressor.name == chosen
