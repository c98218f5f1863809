"""Plans the settings of `LGreCo` for all replicas of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.base import GRADIENT_NORMS, GRADIENT_SUM
from tf_gradcomp.compressors.between_steps import Proposing
from tf_gradcomp.compressors.lgreco.plan import plan_layers
from tf_gradcomp.compressors.lgreco.stored_plan import PlanInForce
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
        parts = 2 if self.lgreco.plan.keeps_norms else 1
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
            return self.lgreco.plan.read(job_state)
        specs = [self.specs[place] for place in places]
        choices = [self.lgreco.choices(spec) for spec in specs]
        of_places = [sums[place] for place in places]
        steady = None
        if self.lgreco.plan.keeps_norms:
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
        self.lgreco.plan.write(proposed, job_state)
        for total in state:
            total.assign(tf.zeros_like(total))

    def in_force(self, job_state: Mapping[str, tf.Variable]) -> PlanInForce:
        return self.lgreco.plan.in_force(self.specs, job_state)
