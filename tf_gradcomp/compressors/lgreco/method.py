"""L-GreCo: another method, whose setting for each layer is planned during training."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.compressors import registry
from tf_gradcomp.compressors.base import (
    GRADIENT_SUM,
    Compressor,
    Exchanged,
    ExchangeInputs,
    JobStateSpec,
    StateSpec,
)
from tf_gradcomp.compressors.lgreco.planner import LayerPlanner
from tf_gradcomp.compressors.lgreco.stored_plan import StoredPlan
from tf_gradcomp.compressors.per_variable import HasSettings, Valid, is_number, one_of
from tf_gradcomp.compressors.phased import takes_turns
from tf_gradcomp.compressors.plannable import Plannable
from tf_gradcomp.compressors.protocols import (
    conversation,
    job_state,
    payload_bytes,
    residual_scale,
)
from tf_gradcomp.compressors.requests import Request
from tf_gradcomp.policy import LAYER_KINDS, GradientSpec

UNIFORM, ACCORDION = "uniform", "accordion"
_BUDGET = Valid("a number of at least 0", lambda budget: is_number(budget) and budget >= 0)
_PLANNABLE = GradientSpec("", (4096, 4096), "float32", "")


class LGreCo(HasSettings):
    """Another method, with a setting for each layer that is planned during training.

    The method's own settings are the reference. In each period of training, a plan chooses one of
    several settings around each layer's own. All layers then send the fewest bytes whose summed
    error is at most the reference's error. Layers whose gradients compress easily are compressed
    more, and other layers less. On digits and MNIST with 2 and 8 replicas, ScaleCom sent less than
    LGreCo with its default method, and was more accurate.

    Plan with `gc.callbacks.LayerwisePlan`, or call `exchange.plan_settings()` in your own training
    loop. Until the first plan, the method's own settings are used. A plan is made from the sum of
    the first replica's gradients since the last plan, in their compressed units but without the
    residual; skipped steps are excluded. The last steps of a period alone would give other plans
    (docs/lgreco_measured.md).

    Use it if layers differ much in size and kind. L-GreCo keeps a sum of the gradients on each
    replica, as large as the model, and the first replica reads its gradients once more. Vectors,
    variables with fewer than 1024 entries and variables that the method sends whole keep the
    method's settings.

    Args:
        method: A compressor with a setting that differs by variable, its name or its config:
            `PowerSGD`, `QSGD`, `MaxNormQuantization`, `TopK`, `AdaComp`, `ScaleCom` or `ArcTopK`.
            The method itself must not have a warm-up.
        choices: The values of the method's main setting among which plans choose, equal for all
            layers and as its constructor takes them. By default, for each layer a range around its
            own: half of it to twice as many for ranks and bits, and a tenth to ten times for
            densities, bins and rates.
        budget: The allowed error of plans, as a multiple of the reference's error. With 0, or a
            number that is not finite, there is no plan.
        reference: `"uniform"`, the method's own settings; or `"accordion"`: where the norm of a
            layer's gradients is steady, less than half larger or smaller than in the period before,
            the reference is the choice with the fewest bytes instead. Plans may therefore miss
            more, and send less, once training has calmed down. (Accordion:
            https://arxiv.org/abs/2010.16248.)
        **warmup: `warmup_steps` and `warmup`, as for every method: see `Compressor`. The sum
            excludes the steps of a warm-up.

    Raises:
        ValueError: If the method's settings cannot be planned or the method has its own warm-up, a
            choice is out of range, the budget is negative, or the reference is unknown.

    Reference:
        Markov et al., "L-GreCo: Layerwise-Adaptive Gradient Compression for Efficient Data-parallel
        Deep Learning", MLSys 2024, https://arxiv.org/abs/2210.17357
    """

    name = "lgreco"

    def __init__(
        self,
        method: str | Mapping[str, Any] | Compressor = "power_sgd",
        choices: Sequence[Any] | None = None,
        budget: float = 1.0,
        reference: str = UNIFORM,
        **warmup: Any,
    ) -> None:
        super().__init__(**warmup)
        self.method = _checked(registry.get(method))
        self.values = None if choices is None else list(choices)
        if self.values == []:
            raise ValueError("LGreCo: choices has no values; give some, or None for a range.")
        for kind in LAYER_KINDS:  # reports invalid values now
            self.choices(dataclasses.replace(_PLANNABLE, kind=kind))
        self.budget = float(_BUDGET.checked("LGreCo: budget", budget))
        self.reference = one_of(UNIFORM, ACCORDION).checked("LGreCo: reference", reference)
        self.plan = StoredPlan(self.method, self.values, keeps_norms=reference == ACCORDION)
        self.residual_scale = residual_scale(self.method)
        self.helped_by_precondition = self.method.helped_by_precondition
        self.has_gpu_kernels = self.method.has_gpu_kernels
        self.delays_unless = self.method.delays_unless

    def state(self, spec: GradientSpec) -> dict[str, StateSpec]:
        """Returns the method's state for any of the choices, and the sum of the gradients."""
        kept = self.method.state_for(spec, [*self.settings([spec]), *(self.choices(spec) or ())])
        return {**kept, GRADIENT_SUM: StateSpec(spec.shape, shared=True)}

    def job_state(self, specs: Sequence[GradientSpec]) -> dict[str, JobStateSpec]:
        """Returns the plan and its expected outcome; with Accordion also the norms of gradients."""
        return {**job_state(self.method, specs), **self.plan.specs(len(specs))}

    def between_steps(self, specs: Sequence[GradientSpec], replicas: int) -> LayerPlanner:
        """Returns the hook that makes plans."""
        return LayerPlanner(self, specs, replicas)

    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        """Returns the reference: the method's own settings."""
        return self.method.settings(specs)

    def payload_bytes(self, specs: Sequence[GradientSpec]) -> int | None:
        """Returns the bytes of the method, without a plan."""
        return payload_bytes(self.method, specs)

    def choices(self, spec: GradientSpec) -> list[int] | None:
        """Returns the settings that a plan may give a variable; see `Plannable.choices`."""
        return self.method.choices(spec, self.values)

    def settings_in_force(self, inputs: ExchangeInputs) -> tf.Tensor:
        """Returns the settings of the plan, unless the step brings others."""
        if inputs.settings is not None:
            return self.method.settings_in_force(inputs)
        plan = inputs.job_state[self.plan.name].read_value()
        if inputs.numbers is not None:
            plan = tf.gather(plan, list(inputs.numbers))
        return self.plan.settings(inputs.specs, plan)

    def exchange(self, inputs: ExchangeInputs) -> Generator[Request, tf.Tensor, Exchanged]:
        """Runs the method's exchange with the settings of the plan (paper, Algorithm 1)."""
        in_force = dataclasses.replace(inputs, settings=self.settings_in_force(inputs))
        exchanged = yield from conversation(self.method, in_force)

        def add() -> None:
            for total, gradient in zip(inputs.state[GRADIENT_SUM], inputs.gradients, strict=True):
                # Gradients are divided by the number of replicas, which a resume may change.
                value = tf.cast(gradient, tf.float32) * inputs.size
                tf.raw_ops.AssignAddVariableOp(resource=total, value=value)

        is_first = tf.equal(inputs.rank, 0)
        tf.cond(tf.logical_and(exchanged.finite, is_first), add, lambda: None)
        return exchanged

    def get_config(self) -> dict[str, Any]:
        return {
            "method": registry.text_of(self.method),
            "choices": self.values,
            "budget": self.budget,
            "reference": self.reference,
            **super().get_config(),
        }


def _checked(method: Any) -> Plannable:
    """Returns the method; raises ValueError unless its settings can be planned."""
    if not isinstance(method, Plannable):
        raise ValueError(
            f"LGreCo: {method!r} has no setting that can be planned for each layer; use "
            "'power_sgd', 'qsgd', 'max_norm', 'top_k', 'adacomp', 'scalecom' or 'arc_top_k'."
        )
    if takes_turns(method):
        raise ValueError(
            f"LGreCo: {method!r} takes turns with another method; give the warm-up to LGreCo "
            "itself."
        )
    return method
