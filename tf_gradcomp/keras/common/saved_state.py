"""State that `CompressedOptimizer` writes to Keras' files and restores from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.adam.preconditioner import SECOND_MOMENT
from tf_gradcomp.chief import is_chief
from tf_gradcomp.compressors.base import GRADIENT_UNITS, RESIDUAL
from tf_gradcomp.compressors.power_sgd import FACTORS
from tf_gradcomp.exchange.exchange import GradientExchange

IN_WEIGHT_UNITS = "residual_in_weight_units"  # true if the residual comes from local steps
STEPS = "steps_of_training"  # of a job with local steps
OUTER_CLASS = "outer_optimizer_class"

_LOG = tf.get_logger()
_NOT_KEPT = (
    "The checkpoint holds state that this optimizer cannot use: %s. It is not loaded. If it is a "
    "residual, gradients that were not sent yet are lost. To send them, continue with the "
    "compressor and the inner optimizer that wrote the checkpoint, or with "
    "gc.compressors.Auto([both])."
)
_NOT_BUILT = (
    "The residuals and other state of CompressedOptimizer were not loaded, because the optimizer "
    "is not built yet. Call optimizer.build(model.trainable_variables) before you load the "
    "weights."
)
_NOTHING = (
    "The file holds no state of the optimizer: no number of updates, no momentum and no residuals. "
    "Training starts from the weights alone. If the file was saved with a compiled model, it is "
    "broken; load another file."
)
_OTHER_VARIABLES = (
    "The residuals and other state of CompressedOptimizer were not loaded: they were saved for %d "
    "variables, and this optimizer trains %d. Gradients that were not sent yet are lost."
)
_DIVIDED = (
    "The file was written by a job whose gradients were divided by Adam's second moments. It is "
    "not known how %s, a subclass of Adam, uses second moments, and the momentums in the file "
    "would not fit. Continue with the optimizer that wrote the file, or load only the weights of "
    "the model."
)


def _warn(message: str, *values: object) -> None:
    """Warns on the chief alone, because all workers load the same file."""
    if is_chief():
        _LOG.warning(message, *values)


def check_not_divided(store: Any, optimizer: Any) -> None:
    """Refuses a file with momentums of divided gradients, which do not fit the optimizer."""
    if "moments_taken" in store and np.any(store["moments_taken"]):
        raise ValueError(_DIVIDED % type(optimizer).__name__)


def warn_if_empty(store: Any) -> None:
    """Warns of a file that has only the weights of a model."""
    if not store.keys():
        _warn(_NOTHING)


def exchange_state(exchange: GradientExchange) -> dict[str, Any]:
    """Returns by name the exchange's variables, which are saved with the inner optimizer's."""
    if not exchange.built:
        return {}
    facts = exchange.facts
    return {
        "step": exchange.step,
        "skipped_steps": exchange.skipped_steps,
        "has_residual": facts.has_residual,
        "residual_scale": facts.residual_scale,
        "moments_taken": facts.moments_taken,
        "moments_since": facts.moments_since,
        **{
            f"{name}_{i}": variable
            for name, variables in exchange.state.items()
            for i, variable in enumerate(variables)
        },
        **{f"job_{name}": variable for name, variable in exchange.job_state.items()},
    }


def save(exchange: GradientExchange, state: dict[str, Any], store: Any) -> None:
    """Saves the variables of `exchange_state` by name."""
    for name, variable in state.items():
        store[name] = exchange.saving.read(variable)


def load(exchange: GradientExchange, state: dict[str, Any], store: Any) -> None:
    """Loads the state in a file; state that the file lacks, such as residuals, starts at zero.

    State that this optimizer does not keep is not loaded, and the log says so.
    """
    if not state:
        if store.keys():
            _warn(_NOT_BUILT)
        return
    delayed_key = "has_residual"
    if delayed_key in store and len(store[delayed_key]) != len(exchange.specs):
        _warn(_OTHER_VARIABLES, len(store[delayed_key]), len(exchange.specs))
        return
    taken = set(store.keys()) & set(state)
    divided = "moments_taken" in store and np.any(store["moments_taken"])
    unknown_divisor = divided and f"{SECOND_MOMENT}_0" not in state
    if unknown_divisor:
        taken -= {"moments_taken", "moments_since"}
    in_weight_units = IN_WEIGHT_UNITS in store and np.any(store[IN_WEIGHT_UNITS])
    if unknown_divisor or (in_weight_units and IN_WEIGHT_UNITS not in state):
        taken = {name for name in taken if _kind(name) not in GRADIENT_UNITS} - {"has_residual"}
        taken -= {f"job_{name}" for name in exchange.setup.job_state_in_gradient_units}
    # No message is needed for these.
    facts = {IN_WEIGHT_UNITS, STEPS, OUTER_CLASS}
    facts |= {"has_residual", "moments_since", "accumulators_held"}
    unused_kinds = {_kind(name) for name in set(store.keys()) - taken - facts}
    exchange.warned_of_lost_residuals = RESIDUAL in unused_kinds
    if unused_kinds:
        _warn(_NOT_KEPT, ", ".join(sorted(unused_kinds)))
    for name, variable in state.items():
        fresh = np.ones if name == "residual_scale" else np.zeros
        value = np.asarray(store[name] if name in taken else fresh(variable.shape))
        if _kind(name) in FACTORS:
            value = _fitted(value, variable.shape)
        exchange.saving.assign(variable, value)


def _fitted(factor: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the columns of PowerSGD's factor that fit the new rank; zero columns restart."""
    fitted = np.zeros(shape, np.float32)
    if np.ndim(factor) == fitted.ndim == 2:
        columns = min(np.shape(factor)[1], fitted.shape[1])
        fitted[:, :columns] = factor[:, :columns]
    return fitted


def _kind(name: str) -> str:
    """The kind of a saved variable: its name without the number."""
    kind, _, suffix = name.rpartition("_")
    return kind if suffix.isdigit() else name


def check_built(optimizer: Any) -> None:
    """Raises if the optimizer is not built."""
    if not optimizer.built:
        raise ValueError(
            "CompressedOptimizer: call build(model.trainable_variables) before set_weights."
        )


def check_shapes(variables: Sequence[Any], weights: Sequence[Any]) -> None:
    """Refuses weights whose shapes differ from their variables'."""
    for variable, value in zip(variables, weights, strict=True):
        if tuple(variable.shape) != np.shape(value):
            raise ValueError(
                f"CompressedOptimizer: {variable.name} has shape {tuple(variable.shape)}; "
                f"received {np.shape(value)}."
            )
