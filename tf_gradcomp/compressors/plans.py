"""Methods whose settings can be planned, and their plans: made, kept in variables, and read."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.base import Compressor, JobStateSpec, StateSpec
from tf_gradcomp.policy import VECTOR, GradientSpec

LEAST_ELEMENTS = 1024  # in a planned variable, as in CGX
_RANGE, _STEPS = 10, 5  # geometric, from a tenth to ten times: 5 steps down and 5 up

Cost: TypeAlias = tuple[float, float]  # bytes and error


class Plannable(Compressor):
    """A method that can predict the bytes and the error of each setting of a variable."""

    @abc.abstractmethod
    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        """Returns the main setting of each variable; see `Compressor.settings`."""

    @abc.abstractmethod
    def choices(self, spec: GradientSpec, values: Sequence[Any] | None = None) -> list[int] | None:
        """Returns the settings that a plan may give a variable.

        Args:
            spec: What is known of the variable's gradient.
            values: Values of the main setting, as the constructor takes them. By default, a range
                around the method's own value.

        Returns:
            Numbers as `settings` has them, without duplicates. None if the variable keeps its own
            setting because it is small, a vector or sent whole.

        Raises:
            ValueError: If one of the values is not valid.
        """

    @abc.abstractmethod
    def costs(
        self, spec: GradientSpec, values: np.ndarray, settings: Sequence[int], replicas: int
    ) -> list[Cost]:
        """Returns the cost of each setting, after one pass over the values if possible.

        Args:
            spec: What is known of the variable's gradient.
            values: The gradient: float32, finite, of magnitudes up to 1.
            settings: Numbers as `settings` has them.
            replicas: The number of replicas. If a replica leads, bytes are the mean over all
                replicas.

        Returns:
            For each setting the bytes of the payload, as `Reduced.tensor_bytes` counts them, and
            the L2 norm of the values minus their sent part, starting from a residual of zeros.
        """

    def state_for(self, spec: GradientSpec, settings: Sequence[int]) -> dict[str, StateSpec]:
        """Returns the variables that steps with any of these settings need.

        Args:
            spec: The spec of the gradient.
            settings: Numbers as `settings` has them.
        """
        return self.state(spec)


def is_planned(spec: GradientSpec) -> bool:
    """Whether the variable is large enough for its own plan, and not a vector."""
    return spec.kind != VECTOR and spec.elements >= LEAST_ELEMENTS


def geometric(setting: int, most: int) -> list[int]:
    """Returns whole numbers from a tenth of a setting to ten times it, from 1 to `most`."""
    scales = [_RANGE ** (step / _STEPS) for step in range(-_STEPS, _STEPS + 1)]
    return distinct(min(max(1, round(setting * scale)), most) for scale in scales)


def distinct(settings: Iterable[int]) -> list[int]:
    """Returns the settings without duplicates, in the order of their first occurrences."""
    return list(dict.fromkeys(settings))


def whole(spec: GradientSpec) -> Cost:
    """Returns the cost of a variable that is sent uncompressed."""
    return 4.0 * spec.elements, 0.0


def sum_of_squares(values: np.ndarray) -> float:
    """Returns the sum of squares in float64."""
    return float(np.sum(np.square(values, dtype=np.float64)))


# The share of a step by which an error may exceed a whole number of steps without rounding up.
_ROUNDING = 1e-9


class Table(NamedTuple):
    """The choices for a layer."""

    settings: list[int]  # as `Compressor.settings` has them
    bytes: np.ndarray  # float64 [settings], of the payload
    errors: np.ndarray  # float64 [settings]; NaN if the gradient is not finite
    default: int  # the index of the uniform setting among them


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


def knapsack(
    sizes: Sequence[np.ndarray],
    errors: Sequence[np.ndarray],
    default: Sequence[int],
    steps: int = 10_000,
) -> list[int]:
    """Chooses one setting per layer: least total size within an error budget.

    Dynamic programming (paper, Algorithm 1). Each error is rounded up to a whole number of steps,
    so the budget is never exceeded. Of equally good choices of a layer, the first is made.

    Args:
        sizes: The size of each choice; float64 [choices] for each layer.
        errors: The error of each choice, 0 or more, in the same shapes. A choice whose error is not
            finite is never made.
        default: The index of each layer's uniform choice. The budget is the sum of the errors of
            these choices.
        steps: The number of steps that the budget is divided into.

    Returns:
        The index of each layer's choice. Returns `default` if the budget is zero or not finite, or
        if no smaller choices are within it.
    """
    allowed = sum(error[index] for error, index in zip(errors, default, strict=True))
    if not 0 < allowed < math.inf:
        return list(default)
    with np.errstate(invalid="ignore", over="ignore"):
        needed = [np.ceil(error / (allowed / steps) - _ROUNDING) for error in errors]
    # The smallest size of the layers so far, by the steps of the budget that they use.
    smallest = np.full(steps + 1, np.inf)
    smallest[0] = 0
    chosen = np.zeros((len(sizes), steps + 1), np.int32)
    for layer, (layer_sizes, layer_needed) in enumerate(zip(sizes, needed, strict=True)):
        before, smallest = smallest, np.full(steps + 1, np.inf)
        for choice, (size, used) in enumerate(zip(layer_sizes, layer_needed, strict=True)):
            if not 0 <= used <= steps:  # more than the budget, or NaN
                continue
            first = int(used)
            total = before[: steps + 1 - first] + size
            is_smaller = total < smallest[first:]
            smallest[first:][is_smaller] = total[is_smaller]
            chosen[layer, first:][is_smaller] = choice
    used = int(np.argmin(smallest))
    uniform = sum(size[index] for size, index in zip(sizes, default, strict=True))
    if not smallest[used] < uniform:
        return list(default)
    choices = list(default)
    for layer in reversed(range(len(sizes))):
        choices[layer] = int(chosen[layer, used])
        used -= int(needed[layer][choices[layer]])
    return choices


class Plan(NamedTuple):
    """Settings of all variables, with their expected bytes and errors."""

    # A setting for each variable, as in `Compressor.settings`; the uniform setting for a variable
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
    defaults: Sequence[int] | None = None,
    replicas: int = 1,
) -> Plan:
    """Minimizes the bytes while the summed error stays within that of the uniform settings.

    If there is no plan, the result has the uniform settings and the reason.
    """
    if defaults is None:
        defaults = compressor.settings(specs)
    if choices is None:
        choices = [compressor.choices(spec) for spec in specs]
    tables = [
        table(compressor, spec, gradient, layer_choices or (), default, replicas)
        for spec, gradient, layer_choices, default in zip(
            specs, gradients, choices, defaults, strict=True
        )
    ]
    indices = [table.default for table in tables]
    planned = [i for i, layer_choices in enumerate(choices) if layer_choices]
    layers = [tables[i] for i in planned]
    uniform = [layer.default for layer in layers]
    allowed = _error(layers, uniform)
    best = knapsack([layer.bytes for layer in layers], [layer.errors for layer in layers], uniform)
    for i, index in zip(planned, best, strict=True):
        indices[i] = index

    def bytes_at(indices: Sequence[int]) -> float:
        return float(sum(t.bytes[index] for t, index in zip(tables, indices, strict=True)))

    return Plan(
        settings=[table.settings[index] for table, index in zip(tables, indices, strict=True)],
        budget_used=_error(layers, best) / allowed if allowed else math.nan,
        bytes=bytes_at(indices),
        uniform_bytes=bytes_at([table.default for table in tables]),
        at_bound=sum(
            int(layer.bytes[index] == layer.bytes.min())
            for layer, index in zip(layers, best, strict=True)
        ),
        planned=len(planned),
        reason=_reason(layers, best, allowed),
    )


def _reason(layers: Sequence[Table], best: Sequence[int], allowed: float) -> str:
    """Why all layers keep the uniform setting."""
    if any(index != layer.default for layer, index in zip(layers, best, strict=True)):
        return ""
    if not layers:
        return "no variable has a choice"
    if not math.isfinite(allowed):
        return "the budget of errors is not finite"
    if allowed <= 0:
        return "the budget of errors is 0"
    return "no plan within the budget sends less"


def _error(layers: Sequence[Table], indices: Sequence[int]) -> float:
    return float(sum(layer.errors[index] for layer, index in zip(layers, indices, strict=True)))


_NO_SETTING = -1  # a plan has settings plus one, and 0 if there is none yet


class PlanInForce(NamedTuple):
    """The settings in use, and the expected outcome of their plan."""

    settings: list[int]  # one for each variable, as `Compressor.settings` has them
    ratio: float  # the bytes of the method's own settings over the plan's bytes; 1 without a plan
    budget_used: float  # the plan's share of the allowed error; 1 without a plan
    at_bound: int  # the number of layers with the smallest of their choices

    def measures(self) -> dict[str, float]:
        """Returns the logged values of the plan."""
        return {
            "plan_ratio": self.ratio,
            "plan_budget_used": self.budget_used,
            "plan_at_bound": self.at_bound,
        }


class StoredPlan:
    """Knows how the state of a job holds a plan and its expected outcome.

    Outside that state, a plan is a vector of float64: the outcome, then a number for each variable.

    Args:
        method: The method whose settings are planned.
        values: The values of the method's main setting among which plans choose, if given.
    """

    def __init__(self, method: Plannable, values: Sequence[Any] | None) -> None:
        self._method, self._values = method, values
        # Methods have different plans.
        self.name, self._outcome = f"{method.name}_plan", f"{method.name}_plan_outcome"
        self._ranges: dict[tuple[GradientSpec, ...], tuple[np.ndarray, list[int]]] = {}

    def specs(self, variables: int) -> dict[str, JobStateSpec]:
        """Returns the state of a job with this number of variables."""
        return {
            self._outcome: JobStateSpec((3,)),
            self.name: JobStateSpec((variables,), "int64"),
        }

    def settings(self, specs: Sequence[GradientSpec], plan: tf.Tensor) -> tf.Tensor:
        """Returns the settings of a plan, or the own setting if a plan has none of the choices.

        Args:
            specs: The specs of some gradients.
            plan: int64, one for each of them, as the job's state has it. It may be of an earlier
                job, with other choices.

        Returns:
            int64 [tensors].
        """
        settings = plan + _NO_SETTING
        allowed, defaults = self._range(tuple(specs))
        is_choice = tf.reduce_any(tf.equal(settings[:, tf.newaxis], allowed), 1)
        return tf.where(
            is_choice & (settings > _NO_SETTING), settings, tf.constant(defaults, tf.int64)
        )

    def _range(self, specs: tuple[GradientSpec, ...]) -> tuple[np.ndarray, list[int]]:
        """Returns the choices of each variable, int64 [tensors, most choices], and its own setting.

        They are cached, because a simulation needs them in each step of each learner.
        """
        if specs not in self._ranges:
            choices = [self._method.choices(spec, self._values) or [] for spec in specs]
            allowed = np.full((len(specs), max(map(len, choices), default=0)), _NO_SETTING)
            for row, tensor_choices in zip(allowed, choices, strict=True):
                row[: len(tensor_choices)] = tensor_choices
            self._ranges[specs] = allowed, self._method.settings(specs)
        return self._ranges[specs]

    def read(self, job_state: Mapping[str, tf.Variable]) -> np.ndarray:
        """Returns the plan that a replica has installed."""
        parts = (job_state[name].numpy() for name in (self._outcome, self.name))
        return np.concatenate([part.astype(np.float64) for part in parts])

    def write(self, plan: np.ndarray, job_state: Mapping[str, tf.Variable]) -> None:
        """Installs a plan on one replica."""
        job_state[self._outcome].assign(plan[:3].astype(np.float32))
        job_state[self.name].assign(plan[3:].astype(np.int64))

    def in_force(
        self, specs: Sequence[GradientSpec], job_state: Mapping[str, tf.Variable]
    ) -> PlanInForce:
        """Returns the plan that the next step will use."""
        plan = job_state[self.name].read_value()
        settings = self.settings(specs, plan).numpy()
        ratio, used, at_bound = job_state[self._outcome].numpy().tolist()
        refused = (plan > 0) & (settings + 1 != plan)  # by a job with other choices
        if not ratio or np.any(refused):
            return PlanInForce(settings.tolist(), 1.0, 1.0, 0)
        return PlanInForce(settings.tolist(), ratio, used, int(at_bound))
