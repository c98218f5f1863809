"""Plans the settings of `LGreCo` for all replicas of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.base import GRADIENT_NORMS, GRADIENT_SUM
from tf_gradcomp.compressors.between_steps import Proposing
from tf_gradcomp.compressors.lgreco.plan import plan_layers
from tf_gradcomp.compressors.registry import text_of
from tf_gradcomp.policy import GradientSpec

if TYPE_CHECKING:
    from tf_gradcomp.compressors.lgreco.method import LGreCo

_STEADY = 0.5  # Accordion: the share by which a norm may differ from the norm of the period before
_LOG = tf.get_logger()
_WHO_PLANS = (
    "L-GreCo uses the settings of its method until a plan is made. Plan with "
    "gc.callbacks.LayerwisePlan, or call exchange.plan_settings() in your own training loop."
)
_KEPT = "L-GreCo keeps the settings of %s for all layers: %s."


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


@dataclasses.dataclass(frozen=True)
class LayerPlanner(Proposing):
    """Plans for the gradients of a job."""

    lgreco: LGreCo
    specs: Sequence[GradientSpec]
    replicas: int

    action: ClassVar[str] = "planning settings"
    caller_fact: ClassVar[str] = "plans of L-GreCo by"
    state_name: ClassVar[str] = GRADIENT_SUM

    @property
    def layers(self) -> list[int]:
        """Returns the places of the variables whose settings can be planned."""
        return [place for place, spec in enumerate(self.specs) if self.lgreco.choices(spec)]

    def settings_over_time(self, plans: Sequence[PlanInForce]) -> dict[str, list[int]]:
        """Returns by path each planned layer's own setting, and its setting in some plans."""
        over_time = [self.lgreco.settings(self.specs), *(plan.settings for plan in plans)]
        return {
            self.specs[place].path: [settings[place] for settings in over_time]
            for place in self.layers
        }

    def notices(self) -> list[str]:
        """Returns a notice on how to make plans."""
        return [_WHO_PLANS]

    def facts(self, job_state: Mapping[str, tf.Variable]) -> dict[str, Any]:
        settings = zip(self.specs, self.in_force(job_state).settings, strict=True)
        return {f"planned setting of {spec.path!r}": setting for spec, setting in settings}

    def no_change(self) -> np.ndarray:
        """Returns a proposal in which all layers keep their own settings."""
        parts = 2 if self.lgreco.keeps_norms else 1
        return np.zeros(3 + parts * len(self.specs))

    def propose(
        self, state: Sequence[np.ndarray], job_state: Mapping[str, tf.Variable]
    ) -> np.ndarray:
        """Makes a plan from the sum of each variable's gradients; logs the reason if there is none.

        Returns:
            float64 [3 + variables]: the plan's expected outcome, and the plan. With Accordion, the
            norms of the sums follow. Without any gradients, the proposal in force.
        """
        proposed, sums = self.no_change(), state
        # Excludes gradients that the method never exchanges, such as tables that are sent as
        # slices.
        places = [place for place, total in enumerate(sums) if total.any()]
        if not places:
            _LOG.warning("L-GreCo keeps its plan: no gradients were exchanged since the last plan.")
            return self._installed(job_state)
        specs = [self.specs[place] for place in places]
        choices = [self.lgreco.choices(spec) for spec in specs]
        of_places = [sums[place] for place in places]
        steady = None
        if self.lgreco.keeps_norms:
            norms = np.array([np.linalg.norm(total) for total in sums])
            before = job_state[GRADIENT_NORMS].numpy()
            steady = (np.abs(norms - before) < _STEADY * before)[places]
            proposed[3 + len(sums) :] = norms
        plan = plan_layers(
            self.lgreco.method,
            specs,
            of_places,
            choices,
            self.lgreco.budget,
            steady=steady,
            replicas=self.replicas,
        )
        if plan.reason:
            _LOG.warning(_KEPT, text_of(self.lgreco.method), plan.reason)
            return proposed
        proposed[:3] = plan.uniform_bytes / plan.bytes, plan.budget_used, plan.at_bound
        proposed[[3 + place for place in places]] = np.array(plan.settings) + 1
        return proposed

    def install(
        self,
        proposed: np.ndarray,
        job_state: Mapping[str, tf.Variable],
        state: Sequence[tf.Variable],
    ) -> None:
        """Gives one replica a plan, and sets its sums of gradients to zero."""
        outcome, plan, norms = np.split(proposed, [3, 3 + len(self.specs)])
        job_state[self.lgreco.plan_name].assign(plan.astype(np.int64))
        job_state[self.lgreco.outcome_name].assign(outcome.astype(np.float32))
        if self.lgreco.keeps_norms:
            job_state[GRADIENT_NORMS].assign(norms.astype(np.float32))
        for total in state:
            total.assign(tf.zeros_like(total))

    def _installed(self, job_state: Mapping[str, tf.Variable]) -> np.ndarray:
        """Returns the proposal that a replica has installed."""
        names = [self.lgreco.outcome_name, self.lgreco.plan_name]
        if self.lgreco.keeps_norms:
            names.append(GRADIENT_NORMS)
        return np.concatenate([job_state[name].numpy().astype(np.float64) for name in names])

    def in_force(self, job_state: Mapping[str, tf.Variable]) -> PlanInForce:
        plan = job_state[self.lgreco.plan_name].read_value()
        settings = self.lgreco.planned(self.specs, plan).numpy()
        ratio, used, at_bound = job_state[self.lgreco.outcome_name].numpy().tolist()
        refused = (plan > 0) & (settings + 1 != plan)  # by a job with other choices
        if not ratio or np.any(refused):
            return PlanInForce(settings.tolist(), 1.0, 1.0, 0)
        return PlanInForce(settings.tolist(), ratio, used, int(at_bound))
