"""The advice for a job: which method to use, and what it saves."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_gradcomp.advice import report
from tf_gradcomp.advice.cost_model import Prediction, best_of, enough_local_steps
from tf_gradcomp.advice.probe import Probed


@dataclasses.dataclass(frozen=True)
class Advice:
    """The advice for a job; as text a table and a sentence.

    Attributes:
        predictions: For each method; the dense baseline first. Empty with one replica.
        best: The recommended `compressor=`: the method with the shortest step, apart from noise.
            This is the baseline unless some method shortens a step by a twentieth, and by more than
            noise.
        table: The predictions, and the measured collectives.
        verdict: A recommendation, or the statement that compression will not pay.
    """

    predictions: tuple[Prediction, ...]
    best: str
    table: str
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """Returns the findings, JSON-serializable; times are in seconds."""
        predictions = [
            {
                **dataclasses.asdict(one),
                "exchange": one.exchange,
                "step": one.step,
                "local_steps": enough_local_steps(one),
            }
            for one in self.predictions
        ]
        return {"best": self.best, "verdict": self.verdict, "predictions": predictions}

    def __str__(self) -> str:
        return f"{self.table}{self.verdict}"


def alone(baseline: str) -> Advice:
    """The advice for a job of one replica."""
    return Advice((), baseline, "", "Compression will not pay: one replica exchanges nothing.")


def advice_on(probed: Probed, compute: float) -> Advice:
    """Returns the advice for a job of several replicas; `compute` is 0 if it is not known."""
    predictions = tuple(
        dataclasses.replace(prediction, compute=compute) for prediction in probed.predictions
    )
    return Advice(
        predictions,
        best_of(predictions, predictions[0]).method,
        report.table(predictions, probed.curves),
        report.verdict(predictions) + report.of_tables(probed.tables),
    )
