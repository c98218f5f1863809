"""`gc.advise`: predicts whether compression pays in a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tf_gradcomp import compressors
from tf_gradcomp.adam.preconditioner import Preconditioner
from tf_gradcomp.advice.cost_model import Advice, advice_for_one_replica, advice_on
from tf_gradcomp.advice.probe import THOROUGH, probe
from tf_gradcomp.compressors.auto import BASELINE, CANDIDATES
from tf_gradcomp.exchange.gradients import gradient_specs, with_gradients_to_exchange
from tf_gradcomp.exchange.setup import Candidate
from tf_gradcomp.groups.current import current_group
from tf_gradcomp.groups.group import Group
from tf_gradcomp.keras.common.inner import in_loss_scaler
from tf_gradcomp.keras.common.second_moments import AUTO, preconditioner_for
from tf_gradcomp.keras.common.wrappers import compressed_in
from tf_gradcomp.keras_version import keras
from tf_gradcomp.policy import LayerPolicy, checked_policy


def advise(
    model: keras.Model,
    candidates: Sequence[str | Mapping[str, Any] | compressors.Compressor] = CANDIDATES,
    *,
    compute_seconds: float = 0.0,
    policy: LayerPolicy | None = None,
) -> Advice:
    """Predicts how long a step will take with several methods, in this job and on its network.

    The function measures the job's own collectives, and the methods' speed on random gradients in
    the shapes of the model. This takes seconds. All workers must call it, within the strategy's
    scope; under Horovod, with a model that is compiled with `gc.CompressedOptimizer(...,
    group="horovod")`.

    Args:
        model: A built model. If it is compiled, the prediction includes its optimizer's part of a
            method's work.
        candidates: Compressors, their names or their configs. The dense baseline is added before
            them.
        compute_seconds: The seconds of a step without its exchange: the time of one worker alone
            for its share of the batch. If it is 0, exchanges are compared instead of whole steps;
            `gradcomp advise` measures it.
        policy: As for `gc.CompressedOptimizer`.

    Raises:
        TypeError: If `policy` is not a `gc.Policy`.
        ValueError: If the model is not built, a candidate is unknown, `compute_seconds` is
            negative, or there is no network between the replicas.
        WorkersDisagreeError: If workers have other candidates or variables.

    Example:
        ```python
        with strategy.scope():
            model = build_model()
            print(gc.advise(model, compute_seconds=0.02))
        ```
    """
    if not model.trainable_variables:
        raise ValueError(
            f"advise: {model.name!r} has no trainable variables; build the model first, with an "
            "Input layer, model.build(input_shape), or a call on a batch."
        )
    if compute_seconds < 0:
        raise ValueError(f"advise: compute_seconds must be 0 or more; received {compute_seconds}.")
    wanted = compressors.Auto(candidates).from_baseline()
    group = _group_of(model)
    if group.size == 1:
        return advice_for_one_replica(BASELINE)
    specs = gradient_specs(model.trainable_variables, checked_policy(policy))
    specs = with_gradients_to_exchange(specs)
    facts = {
        "candidates": list(map(compressors.text_of, wanted)),
        "gradients": list(map(str, specs)),
    }
    group.processes.agree({"next action": "gc.advise", **facts})
    pairs = [Candidate(method, _preconditioner(model.optimizer, method)) for method in wanted]
    return advice_on(probe(group, specs, pairs, THOROUGH), compute_seconds)


def _group_of(model: keras.Model) -> Group:
    optimizer = next(compressed_in(model.optimizer), None)
    return optimizer.group if optimizer else current_group()


def _preconditioner(optimizer: Any, compressor: compressors.Compressor) -> Preconditioner | None:
    compressed = next(compressed_in(optimizer), None)
    if compressed is not None:
        return compressed.preconditioner_of(compressor)
    return preconditioner_for(in_loss_scaler(optimizer)[-1], compressor, AUTO)
