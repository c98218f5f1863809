"""L-GreCo: plans the setting of each variable between two steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors import registry
from tf_gradcomp.compressors.base import (
    GRADIENT_SUM,
    Compressor,
    Hook,
    JobStateSpec,
    Reduced,
    StateSpec,
    StepInputs,
    start,
)
from tf_gradcomp.compressors.plans import PlanInForce, Plannable, StoredPlan, plan_layers
from tf_gradcomp.compressors.registry import text_of
from tf_gradcomp.compressors.requests import Request
from tf_gradcomp.compressors.stages import has_stages
from tf_gradcomp.policy import LAYER_KINDS, GradientSpec

_LOG = tf.get_logger()
_WHO_PLANS = (
    "L-GreCo uses the settings of its method until a plan is made. Plan with "
    "gc.callbacks.LayerwisePlan, or call exchange.plan_settings() in your own training loop."
)
_KEPT = "L-GreCo keeps the settings of %s for all layers: %s."


@dataclasses.dataclass(frozen=True)
class LayerPlanner(Hook):
    """Plans for the gradients of a job."""

    lgreco: LGreCo
    specs: Sequence[GradientSpec]
    replicas: int

    action: ClassVar[str] = "planning settings"
    state_name: ClassVar[str] = GRADIENT_SUM

    @property
    def layers(self) -> list[int]:
        """Returns the indices of the variables whose settings can be planned."""
        return [index for index, spec in enumerate(self.specs) if self.lgreco.choices(spec)]

    def settings_over_time(self, plans: Sequence[PlanInForce]) -> dict[str, list[int]]:
        """Returns by path each planned layer's own setting, and its setting in some plans."""
        over_time = [self.lgreco.settings(self.specs), *(plan.settings for plan in plans)]
        return {
            self.specs[index].path: [settings[index] for settings in over_time]
            for index in self.layers
        }

    def notices(self) -> list[str]:
        """Returns a notice on how to make plans."""
        return [_WHO_PLANS]

    def facts(self, job_state: Mapping[str, tf.Variable]) -> dict[str, Any]:
        settings = zip(self.specs, self.in_force(job_state).settings, strict=True)
        return {f"planned setting of {spec.path!r}": setting for spec, setting in settings}

    def no_change(self) -> np.ndarray:
        """Returns a proposal in which all layers keep their own settings."""
        return np.zeros(3 + len(self.specs))

    def propose(
        self, state: Sequence[np.ndarray], job_state: Mapping[str, tf.Variable]
    ) -> np.ndarray:
        """Plans from each variable's gradient sum. Logs the reason if there is no plan.

        Returns:
            float64 [3 + variables]: the plan's expected outcome, and the plan. Without any
            gradients, the proposal in force.
        """
        proposed, sums = self.no_change(), state
        # Excludes gradients that the method never exchanges, such as tables that are sent as
        # slices.
        indices = [index for index, total in enumerate(sums) if total.any()]
        if not indices:
            _LOG.warning("L-GreCo keeps its plan: no gradients were exchanged since the last plan.")
            return self.lgreco.plan.read(job_state)
        specs = [self.specs[index] for index in indices]
        choices = [self.lgreco.choices(spec) for spec in specs]
        active_sums = [sums[index] for index in indices]
        plan = plan_layers(self.lgreco.method, specs, active_sums, choices, replicas=self.replicas)
        if plan.reason:
            _LOG.warning(_KEPT, text_of(self.lgreco.method), plan.reason)
            return proposed
        proposed[:3] = plan.uniform_bytes / plan.bytes, plan.budget_used, plan.at_bound
        proposed[[3 + index for index in indices]] = np.array(plan.settings) + 1
        return proposed

    def install(
        self,
        proposed: np.ndarray,
        job_state: Mapping[str, tf.Variable],
        state: Sequence[tf.Variable],
    ) -> None:
        """Installs a plan on one replica and clears its gradient sums."""
        self.lgreco.plan.write(proposed, job_state)
        for total in state:
            total.assign(tf.zeros_like(total))

    def in_force(self, job_state: Mapping[str, tf.Variable]) -> PlanInForce:
        return self.lgreco.plan.in_force(self.specs, job_state)


_PLANNABLE = GradientSpec("", (4096, 4096), "float32", "")


class LGreCo(Compressor):
    """Plans, during training, the settings of another method for each layer.

    The method's own settings are the reference. In each period of training, a plan chooses one of
    several settings around each layer's own. All layers then send the fewest bytes whose summed
    error is at most the reference's error. Layers whose gradients compress easily are compressed
    more, and other layers less. On digits and MNIST with 2 and 8 replicas, ScaleCom sent less than
    LGreCo with its default method, and was more accurate.

    Plan with `gc.callbacks.LayerwisePlan`, or call `exchange.plan_settings()` in your own training
    loop. Until the first plan, the method's own settings are used. A plan is made from the sum of
    the first replica's gradients since the last plan, in their compressed units but without the
    residual; skipped steps are excluded. The last steps of a period alone would give other plans
    (docs/research_methods.md).

    Use it if layers differ much in size and kind, and half the setting for all layers trains worse.
    L-GreCo keeps a sum of the gradients on each replica, as large as the model, and the first
    replica reads its gradients once more. Vectors, variables with fewer than 1024 entries and
    variables that the method sends whole keep the method's settings.

    Args:
        method: A compressor with a setting that differs by variable, its name or its config:
            `PowerSGD`, `QSGD`, `MaxNormQuantization`, `TopK`, `AdaComp`, `ScaleCom` or `ArcTopK`.
            The method itself must not have a warm-up.
        choices: The values of the method's main setting among which plans choose, equal for all
            layers and as its constructor takes them. By default, for each layer a range around its
            own: half of it to twice as many for ranks and bits, and a tenth to ten times for
            densities, bins and rates.
        **warmup: `warmup_steps` and `warmup`, as for every method: see `Compressor`. The sum
            excludes the steps of a warm-up.

    Raises:
        ValueError: If the method's settings cannot be planned or the method has its own warm-up, or
            a choice is out of range.

    Reference:
        Markov et al., "L-GreCo: Layerwise-Adaptive Gradient Compression for Efficient Data-parallel
        Deep Learning", MLSys 2024, https://arxiv.org/abs/2210.17357
    """

    name = "lgreco"

    def __init__(
        self,
        method: str | Mapping[str, Any] | Compressor = "power_sgd",
        choices: Sequence[Any] | None = None,
        **warmup: Any,
    ) -> None:
        super().__init__(**warmup)
        self.method = _checked(registry.get(method))
        self.values = None if choices is None else list(choices)
        if self.values == []:
            raise ValueError("LGreCo: choices has no values; give some, or None for a range.")
        for kind in LAYER_KINDS:  # reports invalid values now
            self.choices(dataclasses.replace(_PLANNABLE, kind=kind))
        self.plan = StoredPlan(self.method, self.values)
        self.residual_scale = self.method.residual_scale
        self.helped_by_precondition = self.method.helped_by_precondition
        self.has_gpu_kernels = self.method.has_gpu_kernels
        self.whole_setting = self.method.whole_setting

    def state(self, spec: GradientSpec) -> dict[str, StateSpec]:
        """Returns the method's state for any of the choices, and the sum of the gradients."""
        specs = self.method.state_for(spec, [*self.settings([spec]), *(self.choices(spec) or ())])
        return {**specs, GRADIENT_SUM: StateSpec(spec.shape, shared=True)}

    def job_state(self, specs: Sequence[GradientSpec]) -> dict[str, JobStateSpec]:
        """Returns the plan and its expected outcome."""
        return {**self.method.job_state(specs), **self.plan.specs(len(specs))}

    def hook(self, specs: Sequence[GradientSpec], replicas: int) -> LayerPlanner:
        """Returns the hook that makes plans."""
        return LayerPlanner(self, specs, replicas)

    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        """Returns the reference: the method's own settings."""
        return self.method.settings(specs)

    def payload_bytes(self, specs: Sequence[GradientSpec]) -> int | None:
        """Returns the bytes of the method, without a plan."""
        return self.method.payload_bytes(specs)

    def choices(self, spec: GradientSpec) -> list[int] | None:
        """Returns the settings that a plan may give a variable; see `Plannable.choices`."""
        return self.method.choices(spec, self.values)

    def settings_in_force(self, inputs: StepInputs) -> tf.Tensor:
        """Returns the settings of the plan, unless the step brings others."""
        if inputs.settings is not None:
            return self.method.settings_in_force(inputs)
        plan = inputs.job_state[self.plan.name].read_value()
        if inputs.indices is not None:
            plan = tf.gather(plan, list(inputs.indices))
        return self.plan.settings(inputs.specs, plan)

    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Runs the method with the settings of the plan (paper, Algorithm 1)."""
        in_force = dataclasses.replace(inputs, settings=self.settings_in_force(inputs))
        reduced = yield from start(self.method, in_force)

        def add() -> None:
            for total, gradient in zip(inputs.state[GRADIENT_SUM], inputs.gradients, strict=True):
                # Gradients are divided by the number of replicas, which a resume may change.
                value = tf.cast(gradient, tf.float32) * inputs.size
                tf.raw_ops.AssignAddVariableOp(resource=total, value=value)

        is_first = tf.equal(inputs.rank, 0)
        tf.cond(tf.logical_and(reduced.finite, is_first), add, lambda: None)
        return reduced

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "choices": self.values}


def _checked(method: Any) -> Plannable:
    """Returns the method; raises ValueError unless its settings can be planned."""
    if not isinstance(method, Plannable):
        raise ValueError(
            f"LGreCo: {method!r} has no setting that can be planned for each layer; use "
            "'power_sgd', 'qsgd', 'max_norm', 'top_k', 'adacomp', 'scalecom' or 'arc_top_k'."
        )
    if has_stages(method):
        raise ValueError(f"LGreCo: {method!r} has a warm-up; give it to LGreCo itself.")
    return method
