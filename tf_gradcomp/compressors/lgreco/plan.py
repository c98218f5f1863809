"""The plan: the settings with which layers send the fewest bytes within the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tf_gradcomp import ops
from tf_gradcomp.compressors.plannable import Plannable, distinct
from tf_gradcomp.policy import GradientSpec


class Table(NamedTuple):
    """The choices for a layer."""

    settings: list[int]  # as `HasSettings.settings` has them
    bytes: np.ndarray  # float64 [settings], of the payload
    errors: np.ndarray  # float64 [settings]; NaN if the gradient is not finite
    default: int  # the place of the uniform setting among them


def table(
    compressor: Plannable,
    spec: GradientSpec,
    gradient: np.ndarray,
    choices: Sequence[int],
    default: int,
    replicas: int = 1,
) -> Table:
    """Computes the bytes and the error of one layer at each of some settings.

    The uniform setting `default` follows the choices if it is not among them. If one replica leads,
    bytes are the mean over all replicas.
    """
    settings = distinct([*choices, default])
    values = np.asarray(gradient, np.float32)
    finite = bool(np.isfinite(values).all())
    values = values if finite else np.zeros_like(values)
    values, exponent = _scaled(values)
    costs = compressor.costs(spec, values, settings, replicas)
    sizes, errors = (np.array(column, np.float64) for column in zip(*costs, strict=True))
    errors = np.ldexp(errors, exponent) if finite else np.full_like(errors, np.nan)
    return Table(settings, sizes, errors, settings.index(default))


def _scaled(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Divides by a power of two so that the largest magnitude is from 0.5 to 1; also its exponent.

    Squares of small values would be zero in float32, and sums of large ones infinite.
    """
    exponent = int(np.frexp(np.abs(values).max(initial=0))[1])
    return np.ldexp(values, -exponent), exponent


class Plan(NamedTuple):
    """Settings of all variables, with their expected bytes and errors."""

    # A setting for each variable, as in `HasSettings.settings`; the uniform setting for a variable
    # outside the plan.
    settings: list[int]
    # The summed error of the planned layers over the budget; NaN without a budget.
    budget_used: float
    bytes: float  # size of a replica's payload of all variables, without its header
    uniform_bytes: float  # the same size with the uniform settings
    at_bound: int  # the number of planned layers with the smallest of their choices
    planned: int  # the number of layers with choices
    reason: str = ""  # why all variables keep the uniform setting; empty with a plan


def plan_layers(
    compressor: Plannable,
    specs: Sequence[GradientSpec],
    gradients: Sequence[np.ndarray],
    choices: Sequence[Sequence[int] | None] | None = None,
    budget: float = 1.0,
    defaults: Sequence[int] | None = None,
    steady: Sequence[bool] | None = None,
    replicas: int = 1,
) -> Plan:
    """Minimizes the bytes while the summed error stays within the reference's error.

    The reference is the uniform setting, or the choice with the fewest bytes for layers that are
    `steady`. If there is no plan, the result has the uniform settings and the reason.
    """
    if defaults is None:
        defaults = compressor.settings(specs)
    if choices is None:
        choices = [compressor.choices(spec) for spec in specs]
    tables = [
        table(compressor, spec, gradient, own or (), default, replicas)
        for spec, gradient, own, default in zip(specs, gradients, choices, defaults, strict=True)
    ]
    places = [of_one.default for of_one in tables]
    planned = [i for i, own in enumerate(choices) if own]
    layers = [tables[i] for i in planned]
    uniform = [layer.default for layer in layers]
    allowed = _error(layers, uniform)
    if steady is not None and allowed > 0:
        reference = [
            int(layer.bytes.argmin()) if steady[i] else layer.default
            for i, layer in zip(planned, layers, strict=True)
        ]
        budget *= _error(layers, reference) / allowed
    allowed *= budget
    best = ops.knapsack(
        [layer.bytes for layer in layers],
        [layer.errors for layer in layers],
        uniform,
        budget=budget,
    )
    for i, place in zip(planned, best, strict=True):
        places[i] = place

    def bytes_at(places: Sequence[int]) -> float:
        return float(sum(t.bytes[place] for t, place in zip(tables, places, strict=True)))

    return Plan(
        settings=[of_one.settings[place] for of_one, place in zip(tables, places, strict=True)],
        budget_used=_error(layers, best) / allowed if allowed else math.nan,
        bytes=bytes_at(places),
        uniform_bytes=bytes_at([of_one.default for of_one in tables]),
        at_bound=sum(
            int(layer.bytes[place] == layer.bytes.min())
            for layer, place in zip(layers, best, strict=True)
        ),
        planned=len(planned),
        reason=_reason(layers, best, allowed),
    )


def _reason(layers: Sequence[Table], best: Sequence[int], allowed: float) -> str:
    """Why all layers keep the uniform setting."""
    if any(place != layer.default for layer, place in zip(layers, best, strict=True)):
        return ""
    if not layers:
        return "no variable has a choice"
    if not math.isfinite(allowed):
        return "the budget of errors is not finite"
    if allowed <= 0:
        return "the budget of errors is 0"
    if _error(layers, best) > allowed:
        return "no plan is within the budget"
    return "no plan within the budget sends less"


def _error(layers: Sequence[Table], places: Sequence[int]) -> float:
    return float(sum(layer.errors[place] for layer, place in zip(layers, places, strict=True)))
