"""Tests the choice of a method by predicted times."""

import types

import pytest

from tf_gradcomp import compressors
from tf_gradcomp.advice import choice
from tf_gradcomp.advice.cost_model import Prediction
from tf_gradcomp.advice.probe import Probed
from tf_gradcomp.exchange.setup import Candidate

GROUP = types.SimpleNamespace(size=2, kind="replica")


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"no_compression": 1.0, "adacomp": 0.9, "cast": 0.8}, "cast"),
        ({"adacomp": 0.96, "no_compression": 1.0}, "no_compression"),  # no more than its noise
        ({"adacomp": 0.94, "no_compression": 1.0}, "adacomp"),
        ({"adacomp": 0.99, "cast": 1.0}, "adacomp"),
    ],
)
def test_another_method_is_chosen_only_where_it_is_really_shorter(monkeypatch, seconds, chosen):
    def probe(group, specs, candidates, effort):
        times = (seconds[candidate.compressor.name] for candidate in candidates)
        return Probed([Prediction("", 0, 0, 0, time, 0, 0, 0) for time in times], {})

    monkeypatch.setattr(choice, "probe", probe)
    candidates = [Candidate(compressors.get(name)) for name in seconds]
    assert choice.choose(GROUP, candidates, []).compressor.name == chosen
