"""The choice of `Auto`: the candidate whose exchange takes the shortest time in this job."""

from __future__ import annotations

from collections.abc import Sequence

from tf_gradcomp.advice import report
from tf_gradcomp.advice.cost_model import best_of
from tf_gradcomp.advice.probe import QUICK, probe
from tf_gradcomp.compressors.auto import BASELINE
from tf_gradcomp.exchange.setup import Candidate
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.notices import tell_user
from tf_gradcomp.policy import GradientSpec


def choose(
    group: Group, candidates: Sequence[Candidate], specs: Sequence[GradientSpec]
) -> Candidate:
    """Chooses the fastest candidate by a probe, the same on all replicas; logs the choice.

    If no compression is a candidate, another candidate must be faster by `WORTHWHILE`. If
    candidates differ only by noise, the first is chosen.
    """
    if len(candidates) == 1:
        chosen, tables = candidates[0], ""
        how = repr(chosen.compressor)
    else:
        probed = probe(group, specs, candidates, QUICK)
        predictions = probed.predictions
        dense = (
            prediction
            for prediction, candidate in zip(predictions, candidates, strict=True)
            if candidate.compressor.name == BASELINE
        )
        chosen = candidates[predictions.index(best_of(predictions, next(dense, None)))]
        how = f"{chosen.compressor!r}; the probe predicted: {report.line(predictions)}"
        tables = report.of_tables(probed.tables)
    tell_user(f"{group.size} {group.kind}s exchange gradients by {how}.{tables}")
    return chosen
