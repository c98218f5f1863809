"""The plan of `LGreCo` in the state of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.base import GRADIENT_NORMS, JobStateSpec
from tf_gradcomp.compressors.plannable import Plannable
from tf_gradcomp.policy import GradientSpec

_NO_SETTING = -1  # a plan has settings plus one, and 0 if there is none yet


class PlanInForce(NamedTuple):
    """The settings in use, and the expected outcome of their plan."""

    settings: list[int]  # one for each variable, as `HasSettings.settings` has them
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
    """Knows how the state of a job holds a plan, its expected outcome, and norms of gradients.

    Outside that state, a plan is a vector of float64: the outcome, one number for each variable,
    and the norms if they are kept.

    Args:
        method: The method whose settings are planned.
        values: The values of the method's main setting among which plans choose, if given.
        keeps_norms: Whether plans compare the norms of gradients with the norms before.
    """

    def __init__(
        self, method: Plannable, values: Sequence[Any] | None, *, keeps_norms: bool
    ) -> None:
        self.keeps_norms = keeps_norms
        self._method, self._values = method, values
        # Methods have different plans.
        self.name, self._outcome = f"{method.name}_plan", f"{method.name}_plan_outcome"
        self._names = [self._outcome, self.name, *([GRADIENT_NORMS] if keeps_norms else [])]
        self._ranges: dict[tuple[GradientSpec, ...], tuple[np.ndarray, list[int]]] = {}

    def specs(self, variables: int) -> dict[str, JobStateSpec]:
        """Returns the state of a job with this number of variables."""
        specs = {
            self.name: JobStateSpec((variables,), "int64"),
            self._outcome: JobStateSpec((3,)),
            GRADIENT_NORMS: JobStateSpec((variables,), of_gradients=True),
        }
        return {name: spec for name, spec in specs.items() if name in self._names}

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
        allowed, own = self._range(tuple(specs))
        is_choice = tf.reduce_any(tf.equal(settings[:, tf.newaxis], allowed), 1)
        return tf.where(is_choice & (settings > _NO_SETTING), settings, tf.constant(own, tf.int64))

    def _range(self, specs: tuple[GradientSpec, ...]) -> tuple[np.ndarray, list[int]]:
        """Returns the choices of each variable, int64 [tensors, most choices], and its own setting.

        They are cached, because a simulation needs them in each step of each replica.
        """
        if specs not in self._ranges:
            choices = [self._method.choices(spec, self._values) or [] for spec in specs]
            allowed = np.full((len(specs), max(map(len, choices), default=0)), _NO_SETTING)
            for row, of_one in zip(allowed, choices, strict=True):
                row[: len(of_one)] = of_one
            self._ranges[specs] = allowed, self._method.settings(specs)
        return self._ranges[specs]

    def read(self, job_state: Mapping[str, tf.Variable]) -> np.ndarray:
        """Returns the plan that a replica has installed."""
        return np.concatenate([job_state[name].numpy().astype(np.float64) for name in self._names])

    def write(self, plan: np.ndarray, job_state: Mapping[str, tf.Variable]) -> None:
        """Installs a plan on one replica."""
        variables = [job_state[name] for name in self._names]
        ends = np.cumsum([variable.shape[0] for variable in variables])
        for variable, values in zip(variables, np.split(plan, ends[:-1]), strict=True):
            variable.assign(values.astype(variable.dtype.as_numpy_dtype))

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
