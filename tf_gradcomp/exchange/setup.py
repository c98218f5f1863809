"""The parts of an exchange: its candidates, and the state of the chosen candidate."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_gradcomp.adam.preconditioner import LARGEST, SECOND_MOMENT, Preconditioner
from tf_gradcomp.compressors import registry
from tf_gradcomp.compressors.base import Compressor
from tf_gradcomp.compressors.stages import leaf_stages
from tf_gradcomp.environment import COMPRESSOR
from tf_gradcomp.exchange import sparse
from tf_gradcomp.exchange.state import Variables, job_state_specs, residual_scale, state_specs
from tf_gradcomp.groups import agreement
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.lockstep import LockstepGroup
from tf_gradcomp.groups.messages import log_debug, log_info
from tf_gradcomp.ops import library
from tf_gradcomp.policy import GradientSpec, LayerPolicy

_used: set[str] = set()  # texts of the variable that have replaced a method


def replacement_of(original: Any) -> Any:
    """Returns the method that the variable names; without the variable, `original`."""
    text = os.environ.get(COMPRESSOR)
    if not text:
        return original
    try:
        method = registry.get(text)
    except ValueError as error:
        raise ValueError(f"{COMPRESSOR}={text!r}: {error}") from error
    _used.add(text)
    log_info(
        f"{COMPRESSOR}: gradients are exchanged by {registry.text_of(method)!r}, in place of the "
        f"program's own {registry.text_of(original)!r}."
    )
    return method


def fact() -> Mapping[str, str | None]:
    """Returns the facts that must be equal on all workers."""
    return {COMPRESSOR: os.environ.get(COMPRESSOR)}


def report_no_effect() -> None:
    """Warns if the variable is set but the program has no method to replace."""
    text = os.environ.get(COMPRESSOR)
    if text:
        log_info(
            f"{COMPRESSOR}={text} has no effect: it replaces the compressor of a "
            "gc.CompressedOptimizer or of gc.MultiWorkerMirroredStrategy(compressor=...), and "
            "this program has neither."
        )


@atexit.register
def _report_at_exit() -> None:
    if os.environ.get(COMPRESSOR) not in _used:
        with contextlib.suppress(ValueError):  # Horovod may be shut down
            report_no_effect()


_WHY_LOCAL = (
    "gradients are divided by its root before compression (precondition=None leaves the division "
    "to Adam)"
)
_COPIED = "Gradients are copied from the GPU to the host for compression"


class Candidate(NamedTuple):
    """A compressor that may be chosen, with its preconditioner."""

    compressor: Compressor
    preconditioner: Preconditioner | None = None


class Method(NamedTuple):
    """The method of an exchange: one compressor, or several to choose from."""

    text: str  # the compressor that the user gave, as text; equal on all workers
    # One or several candidates. `choose` takes one when the exchange is built.
    candidates: Sequence[Candidate]
    # Takes the group of replicas, the candidates and the specs of the gradients, and returns a
    # candidate, the same on all workers. None: the first candidate.
    choose: Callable[[Group, Sequence[Candidate], Sequence[GradientSpec]], Candidate] | None = None
    # The preconditioner that the inner optimizer allows, if any. The exchange keeps its state even
    # if no candidate uses it, because a checkpoint may be preconditioned.
    moments: Preconditioner | None = None


@dataclasses.dataclass(frozen=True)
class Setup:
    """The parts of a built exchange."""

    group: Group  # the replicas
    method: Method  # the candidates
    chosen: Candidate  # the candidate in use
    specs: Sequence[GradientSpec]  # the specs of all gradients
    policy: LayerPolicy  # which variables get which settings
    variables: Variables  # the variables that the exchange keeps from step to step
    label: str  # distinguishes this exchange's collectives from others, if collectives have names

    @classmethod
    def new(
        cls,
        group: Group,
        method: Method,
        chosen: Candidate,
        specs: Sequence[GradientSpec],
        policy: LayerPolicy,
    ) -> Setup:
        """Creates the variables of an exchange."""
        sparse.check_rows(specs)
        compressors = _compressors(method)
        for_state = state_specs(compressors, specs, method.moments)
        for_job = job_state_specs(compressors, specs)
        for compressor in compressors:
            residual_scale(compressor, specs)  # refuses stages with residuals of other scales
        # Replicas of a process would wait for each other in a branch, except in lockstep.
        is_simulated = isinstance(group, LockstepGroup)
        ahead = group.is_collective and (group.local_size == 1 or is_simulated)
        variables = group.create(lambda: Variables.of(for_state, for_job, specs, ahead=ahead))
        label = group.label([spec.path for spec in specs])
        return cls(group, method, chosen, specs, policy, variables, label)

    @property
    def compressor(self) -> Compressor:
        """The compressor in use."""
        return self.chosen.compressor

    @property
    def preconditioner(self) -> Preconditioner | None:
        """The preconditioner that runs before the compressor, if any."""
        return self.chosen.preconditioner if self.group.size > 1 else None

    @functools.cached_property
    def residual_scale(self) -> float | None:
        """The scale of the compressor's residual; None if it keeps none."""
        return residual_scale(self.compressor, self.specs) if self.group.size > 1 else None

    @functools.cached_property
    def job_state_in_gradient_units(self) -> list[str]:
        """The names of the job's state that is in units of gradients."""
        specs = job_state_specs(_compressors(self.method), self.specs)
        return [name for name, spec in specs.items() if spec.in_gradient_units]

    @functools.cached_property
    def on_gpu(self) -> frozenset[str]:
        """The state that stays on a GPU in a step, because GPU kernels do all the work."""
        methods, state = list(leaf_stages(self.compressor)), self.variables.state
        if all(method.has_gpu_kernels for method in methods):
            return frozenset(state)
        if any(method.fuses_precondition for method in methods):
            return frozenset()  # one op has second moments and residuals
        return frozenset({SECOND_MOMENT, LARGEST} & state.keys())

    def is_large(self, index: int) -> bool:
        """Whether a table is too large to be made dense."""
        return sparse.is_large(self.specs[index], self.policy.max_dense_elements)

    def stays_sparse(self, index: int, gradient: tf.Tensor | tf.IndexedSlices) -> bool:
        """Whether a gradient is summed as slices, and not by the compressor."""
        spec, most = self.specs[index], self.policy.max_dense_elements
        return sparse.stays_sparse(gradient, spec, self.compressor, most)


def facts_to_agree(
    group: Group, method: Method, specs: Sequence[GradientSpec], policy: LayerPolicy
) -> dict[str, Any]:
    """Returns the facts that must be equal on all workers when they build an exchange."""
    return {
        **agreement.package_versions(),
        **fact(),
        "replicas": f"{group.size}, a {group.kind} each",
        "compressor": method.text,
        "max_dense_elements": policy.max_dense_elements,
        "number of variables": len(specs),
        **{f"variable {i}": str(spec) for i, spec in enumerate(specs)},
    }


def _compressors(method: Method) -> list[Compressor]:
    return [candidate.compressor for candidate in method.candidates]


def log_notices(parts: Setup, notices: Iterable[str]) -> None:
    """Logs where the job differs from what the program's code suggests.

    The user of a simulation has no such job.
    """
    if parts.group.size == 1 or isinstance(parts.group, LockstepGroup):
        return
    kind = parts.group.kind
    if parts.group.all_replicas is not parts.group:
        log_debug(f"The replicas of each {kind} sum their gradients before the exchange.")
    if parts.preconditioner:
        log_debug(f"Each {kind} keeps Adam's second moment of its own gradients: {_WHY_LOCAL}.")
    gpus = [device for device in parts.group.devices if "GPU" in device]
    if gpus and parts.on_gpu != parts.variables.state.keys():
        log_info(f"{_COPIED}.")
    elif problem := next(filter(None, map(library.problem, gpus)), None):
        log_info(f"{_COPIED}: {problem}.")
    for notice in notices:
        log_info(notice)
