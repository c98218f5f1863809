"""Plans the settings of `LGreCo` for all replicas of a job, and tells which are in force."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.base import GRADIENT_NORMS, Compressor, stages
from tf_gradcomp.compressors.lgreco.method import ACCORDION, LGreCo
from tf_gradcomp.compressors.lgreco.plan import plan_layers
from tf_gradcomp.compressors.registry import text_of
from tf_gradcomp.policy import GradientSpec

_STEADY = 0.5  # Accordion: by which part a norm may differ from that of the period before
_LOG = tf.get_logger()
_KEPT = "L-GreCo keeps the settings of %s for all layers: %s."


class PlanInForce(NamedTuple):
    """The settings in use, and what the plan that chose them is expected to do.

    Attributes:
        settings: One for each variable, as `HasSettings.settings` has them.
        ratio: The bytes of the method's own settings over those of the plan; 1 without a plan.
        budget_used: Which part of the error that was allowed the plan has; 1 without a plan.
        at_bound: How many layers have the setting with the fewest bytes among their choices.
    """

    settings: list[int]
    ratio: float
    budget_used: float
    at_bound: int


@dataclasses.dataclass(frozen=True)
class LayerPlanner:
    """Plans for the gradients of a job.

    Attributes:
        lgreco: The method that is planned for.
        specs: What is known of all gradients of the job.
        replicas: How many there are.
    """

    lgreco: LGreCo
    specs: Sequence[GradientSpec]
    replicas: int

    @classmethod
    def of(
        cls, compressor: Compressor, specs: Sequence[GradientSpec], replicas: int
    ) -> LayerPlanner | None:
        """The planner for a method, its warm-up or phases; None if nothing in it is planned.

        Raises:
            ValueError: If several would share the sum of the gradients.
        """
        planned = [stage for stage in stages(compressor) if isinstance(stage, LGreCo)]
        if len(planned) > 1:
            raise ValueError(
                f"{compressor!r}: only one of its stages can be planned; use LGreCo in one of them."
            )
        return cls(planned[0], specs, replicas) if planned else None

    @property
    def layers(self) -> list[int]:
        """The places of the variables that plans may give other settings than their own."""
        return [place for place, spec in enumerate(self.specs) if self.lgreco.choices(spec)]

    def no_plan(self) -> np.ndarray:
        """What `propose` returns if there is none: all keep their own settings."""
        parts = 2 if self.lgreco.reference == ACCORDION else 1
        return np.zeros(3 + parts * len(self.specs))

    def propose(
        self, sums: Sequence[np.ndarray], job_state: Mapping[str, tf.Variable]
    ) -> np.ndarray:
        """Makes a plan; the chief says why, if there is none.

        Args:
            sums: The sum of each variable's gradients.
            job_state: What a replica keeps for the job.

        Returns:
            float64 [3 + variables], for `install`: what the plan is expected to do, and the plan.
            With Accordion, the norms of the sums follow. Without any gradients, what is in force.
        """
        proposed = self.no_plan()
        # Not those that are exchanged in no step, such as tables that are sent as slices.
        places = [place for place, total in enumerate(sums) if total.any()]
        if not places:
            _LOG.warning("L-GreCo keeps its plan: no gradients were exchanged since the last one.")
            return self._installed(job_state)
        specs = [self.specs[place] for place in places]
        choices = [self.lgreco.choices(spec) for spec in specs]
        of_places = [sums[place] for place in places]
        steady = None
        if self.lgreco.reference == ACCORDION:
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
        sums: Sequence[tf.Variable],
    ) -> None:
        """Gives one replica a plan, and sets its sums of gradients to zero."""
        outcome, plan, norms = np.split(proposed, [3, 3 + len(self.specs)])
        job_state[self.lgreco.plan_name].assign(plan.astype(np.int64))
        job_state[self.lgreco.outcome_name].assign(outcome.astype(np.float32))
        if self.lgreco.reference == ACCORDION:
            job_state[GRADIENT_NORMS].assign(norms.astype(np.float32))
        for total in sums:
            total.assign(tf.zeros_like(total))

    def _installed(self, job_state: Mapping[str, tf.Variable]) -> np.ndarray:
        """What `install` has given a replica."""
        names = [self.lgreco.outcome_name, self.lgreco.plan_name]
        if self.lgreco.reference == ACCORDION:
            names.append(GRADIENT_NORMS)
        return np.concatenate([job_state[name].numpy().astype(np.float64) for name in names])

    def in_force(self, job_state: Mapping[str, tf.Variable]) -> PlanInForce:
        """The settings of the next step, by what a replica keeps for the job."""
        plan = job_state[self.lgreco.plan_name].read_value()
        settings = self.lgreco.planned(self.specs, plan).numpy()
        ratio, used, at_bound = job_state[self.lgreco.outcome_name].numpy().tolist()
        refused = (plan > 0) & (settings + 1 != plan)  # by a job with other choices
        if not ratio or np.any(refused):
            return PlanInForce(settings.tolist(), 1.0, 1.0, 0)
        return PlanInForce(settings.tolist(), ratio, used, int(at_bound))
