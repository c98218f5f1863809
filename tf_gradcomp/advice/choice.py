"""The choice of `Auto`: the candidate whose exchange takes the shortest time in this job."""

from __future__ import annotations

from collections.abc import Sequence

from tf_gradcomp.advice import report
from tf_gradcomp.advice.probe import QUICK, probe
from tf_gradcomp.distribute.group import Group
from tf_gradcomp.distribute.method import Candidate
from tf_gradcomp.distribute.notices import tell_user
from tf_gradcomp.policy import GradientSpec


def choose(
    group: Group, candidates: Sequence[Candidate], specs: Sequence[GradientSpec]
) -> Candidate:
    """Chooses the fastest candidate by a probe, alike on all replicas; the log says which."""
    if len(candidates) == 1:
        chosen = candidates[0]
        how = repr(chosen.compressor)
    else:
        predictions = probe(group, specs, candidates, QUICK).predictions
        exchanges = [prediction.exchange for prediction in predictions]
        chosen = candidates[exchanges.index(min(exchanges))]
        how = f"{chosen.compressor!r}, of which the probe predicted: {report.line(predictions)}"
    tell_user(f"{group.size} replicas exchange gradients by {how}.")
    return chosen
