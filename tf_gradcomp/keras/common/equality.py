"""Compares between workers the variables and settings that must be equal on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.exchange.gradients import native, path_of
from tf_gradcomp.groups.agreement import WorkersDisagreeError, describe, digest
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.means import sums_over_workers
from tf_gradcomp.groups.messages import log_info
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras.common.inner import facts_of
from tf_gradcomp.keras.common.wrappers import compressed_in, optimizers_of, wrappers_of
from tf_gradcomp.keras_version import keras, keras_private
from tf_gradcomp.strategy.strategy import MultiWorkerMirroredStrategy

EPOCH_END = "at the end of an epoch"

_MOST_NAMED = 5
# The largest difference that counts as rounding, in units of the last place of the largest entry.
# Processors of different kinds, and sums of slices on GPUs, do not round alike.
_ROUNDING = 2**10
_LAST_PLACE = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_CAUSES = (
    "Usual causes: a callback or a branch that only some workers run, such as `if gc.is_chief()`; "
    "a layer that sets weights from its first batch or in the forward pass. Give all workers the "
    "same callbacks, and set weights from what is equal on all workers. To train without this "
    "check, create gc.MultiWorkerMirroredStrategy(compare_variables=False)."
)
_LEFT = (
    "%s: the values differ between workers, and no optimizer trains them. Each worker keeps its "
    "values, and files have the chief's."
)


def compare_model(model: keras.Model, event: str) -> None:
    """Compares a model's variables and optimizers, which synchronous steps keep equal.

    Statistics of `BatchNormalization` are each worker's and are not compared. Rounds of local steps
    compare by themselves. All workers must call this between the same two steps.

    Raises:
        WorkersDisagreeError: If trained variables, or variables or settings of optimizers differ.
    """
    group = _group_of(model)
    if group is None or any(wrapper.local_steps for wrapper in wrappers_of(model)):
        return
    equal = list(model.trainable_variables)
    for optimizer in optimizers_of(model):
        equal += keras_private.state_variables(optimizer)
    skipped = {id(variable) for variable in [*equal, *_batch_statistics(model)]}
    other_variables = [variable for variable in model.variables if id(variable) not in skipped]
    other_variables = [variable for variable in other_variables if not _is_separate(variable)]
    equal = [variable for variable in equal if not _is_separate(variable)]
    settings = _settings_of(optimizers_of(model))
    differing = compare(group, equal, other_variables, settings, event)
    if differing:
        names = [repr(path_of(other_variables[i])) for i in differing]
        log_info(_LEFT % _listed(names))


def compare_first_step(model: keras.Model) -> None:
    """Compares a model after its first step; see `compare_model`."""
    compare_model(model, "after the first step")


def compare_optimizer(optimizer: Any) -> None:
    """Compares what a wrapper trains, in a training loop of the program's own.

    Raises:
        WorkersDisagreeError: If variables or settings differ.
    """
    group = optimizer.exchange.group.all_replicas
    if optimizer.local_steps or not getattr(group.strategy, "compare_variables", False):
        return
    inner_variables = keras_private.state_variables(optimizer)
    equal = [v for v in (*optimizer.trained_variables, *inner_variables) if not _is_separate(v)]
    compare(group, equal, [], _settings_of([optimizer]), "before state is collected")


def compare_settings(model: keras.Model) -> None:
    """Compares settings of a model's optimizers, such as learning rates, which callbacks may set.

    Raises:
        WorkersDisagreeError: If they differ.
    """
    group = _group_of(model)
    if group is not None:
        compare(group, [], [], _settings_of(optimizers_of(model)), "at the beginning of an epoch")


def reconcile(
    group: StrategyGroup, equal: Sequence[Any], optimizers: Sequence[Any], model: keras.Model
) -> None:
    """Gives a model equal variables on all workers after rounds of local steps have ended.

    Variables that no optimizer trains, and that differ, become their mean over the replicas on
    which they are finite; whole numbers become the chief's.

    Args:
        group: All replicas.
        equal: The variables that the ended rounds have made equal.
        optimizers: The optimizers whose settings are compared.
        model: The model.

    Raises:
        WorkersDisagreeError: If variables of `equal`, or settings, differ.
    """
    trained = {id(v) for wrapper in wrappers_of(model) for v in wrapper.trained_variables}
    trained |= {id(variable) for variable in equal}
    other_variables = [variable for variable in model.variables if id(variable) not in trained]
    if not getattr(group.strategy, "compare_variables", True):
        equal, optimizers = [], []
    differing = compare(
        group, equal, other_variables, _settings_of(optimizers), "at the end of a round"
    )
    different = [other_variables[i] for i in differing]
    average(group, [variable for variable in different if _is_float(variable)])
    _take_from_chief(group, [variable for variable in different if not _is_float(variable)])


def build_optimizer(group: Group, optimizer: Any, variables: Sequence[Any]) -> None:
    """Creates the variables of an optimizer, which workers compare all at once.

    Two collectives for each variable would take seconds in a large model, and more on a link with a
    long delay. Initial values that differ become the chief's. In a function that is being traced,
    the values are not known yet, so each variable is compared by itself.

    Raises:
        WorkersDisagreeError: If the workers create different variables.
    """
    replicas = group.all_replicas
    if (
        not isinstance(replicas, StrategyGroup)
        or replicas.processes.size == 1
        or not tf.executing_eagerly()
    ):
        keras_private.build(optimizer, variables)
        return
    replicas.create(lambda: keras_private.build(optimizer, variables))
    created = keras_private.state_variables(optimizer)
    facts = {f"variable {path_of(v)}": f"{v.shape} {tf.as_dtype(v.dtype).name}" for v in created}
    differing = compare(replicas, [], created, facts, "at the creation of an optimizer's variables")
    _take_from_chief(replicas, [created[i] for i in differing])


def compare(
    group: StrategyGroup,
    equal: Sequence[Any],
    other_variables: Sequence[Any],
    settings: Mapping[str, str],
    event: str,
) -> list[int]:
    """Compares variables and settings between all workers, by 8 bytes from each if all are equal.

    Variables of `equal` that differ by rounding become their mean.

    Args:
        group: All replicas.
        equal: Variables that must be equal.
        other_variables: Other variables.
        settings: Facts that must be equal, by name.
        event: When the workers compare, for messages.

    Returns:
        The indices of the `other_variables` that differ.

    Raises:
        WorkersDisagreeError: If variables of `equal`, or settings, differ.
    """
    facts = {
        "next action": f"comparing variables {event}",
        "variables": len(equal),
        "other variables": len(other_variables),
        **settings,
    }
    digests = [_digests(group, variable) for variable in (*equal, *other_variables)]
    workers = group.processes.facts_if_different({"facts": facts, "digests": digests})
    if workers is None:
        workers = [{"facts": facts, "digests": digests}]
    all_facts = [worker.get("facts", worker) for worker in workers]  # others may compare otherwise
    if any(worker.get("next action") != facts["next action"] for worker in all_facts):
        raise WorkersDisagreeError(describe(all_facts))
    if any(worker != facts for worker in all_facts):
        raise _error(event, [describe(all_facts, only_differences=True)])
    columns = list(zip(*(worker["digests"] for worker in workers), strict=True))
    differing = [i for i, column in enumerate(columns) if len(set().union(*column)) > 1]
    _even_out(group, [(equal[i], columns[i]) for i in differing if i < len(equal)], event)
    return [i - len(equal) for i in differing if i >= len(equal)]


def _group_of(model: keras.Model) -> StrategyGroup | None:
    strategy = model.distribute_strategy
    if not isinstance(strategy, MultiWorkerMirroredStrategy) or not strategy.compare_variables:
        return None
    return strategy.group if strategy.group.processes.size > 1 else None


def _settings_of(optimizers: Iterable[Any]) -> dict[str, str]:
    """Returns the settings of optimizers, and of those that they wrap, by name."""
    settings: dict[str, str] = {}
    for index, optimizer in enumerate(optimizers, 1):
        inner = [wrapper.inner_optimizer for wrapper in compressed_in(optimizer)]
        for inner_optimizer in inner or [optimizer]:
            settings |= facts_of(
                "optimizer" if index == 1 else f"optimizer {index}", inner_optimizer
            )
    return settings


def _batch_statistics(model: keras.Model) -> list[Any]:
    layers = keras_private.layers_of(model)
    norms = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
    return [variable for layer in norms for variable in layer.non_trainable_variables]


def _is_separate(variable: Any) -> bool:
    """True if each replica has its own value by design, as of residuals."""
    variable = native(variable)
    synchronization = getattr(variable, "synchronization", None)  # state of a wrapper has none
    return synchronization in (None, tf.VariableSynchronization.ON_READ)


def _is_float(variable: Any) -> bool:
    return bool(tf.as_dtype(variable.dtype).is_floating)


def _copies(group: StrategyGroup, variable: Any) -> list[np.ndarray]:
    """Returns the values of a variable on the replicas of this process."""
    parts = group.strategy.experimental_local_results(native(variable))
    return [np.asarray(part.read_value()) for part in parts]


def _digests(group: StrategyGroup, variable: Any) -> list[str]:
    """Returns the different digests of the replicas of this process: usually one."""
    return sorted({digest(copy) for copy in _copies(group, variable)})


def _even_out(
    group: StrategyGroup, differing: Sequence[tuple[Any, Sequence[Sequence[str]]]], event: str
) -> None:
    """Replaces variables that differ by rounding by their mean; raises for others."""
    variables = [variable for variable, _ in differing]
    means = _means(group, variables)
    apart = [float(_is_apart(group, v, mean)) for v, mean in zip(variables, means, strict=True)]
    apart = group.processes.largest(apart) if apart else []
    names = [
        f"{path_of(variable)!r} of {_where(column)}"
        for (variable, column), far in zip(differing, apart, strict=True)
        if far
    ]
    if names:
        raise _error(event, names)
    _assign(group, variables, means)


def _where(column: Sequence[Sequence[str]]) -> str:
    different_workers = [
        str(worker) for worker, digests in enumerate(column) if digests != column[0]
    ]
    if not different_workers:
        return "the replicas of a worker"
    return f"worker {' and '.join(different_workers)}, compared with worker 0"


def _is_apart(group: StrategyGroup, variable: Any, mean: np.ndarray) -> bool:
    """Whether a variable differs from the workers' mean by more than rounding."""
    unit = _LAST_PLACE.get(tf.as_dtype(variable.dtype).name)
    if unit is None or not np.all(np.isfinite(mean)):
        return True
    wide = mean.astype(np.float64)
    most = _ROUNDING * unit * np.abs(wide).max(initial=0.0)
    copies = (copy.astype(np.float64) for copy in _copies(group, variable))
    return any(np.abs(copy - wide).max(initial=0.0) > most for copy in copies)


def _error(event: str, differences: Sequence[str]) -> WorkersDisagreeError:
    return WorkersDisagreeError(
        f"The workers differ {event} in what must be equal on all of them: "
        f"{_listed(differences)}. {_CAUSES}"
    )


def _listed(names: Sequence[str]) -> str:
    unlisted = len(names) - _MOST_NAMED
    return "; ".join(names[:_MOST_NAMED]) + (f"; and {unlisted} more" if unlisted > 0 else "")


def average(group: StrategyGroup, variables: Sequence[Any]) -> None:
    """Gives variables their means over the replicas on which they are finite, entry by entry."""
    _assign(group, variables, _means(group, variables))


def _means(group: StrategyGroup, variables: Sequence[Any]) -> list[np.ndarray]:
    """Returns means over all replicas; of entries that are finite nowhere, a replica's own."""
    if not variables:
        return []
    copies = [np.stack(_copies(group, variable)) for variable in variables]
    dtypes = [np.result_type(tf.as_dtype(v.dtype).as_numpy_dtype, np.float32) for v in variables]
    copies = [array.astype(dtype) for array, dtype in zip(copies, dtypes, strict=True)]
    finite = [np.isfinite(array) for array in copies]
    # Counts are sent only where a replica is not finite.
    counted = group.processes.largest([float(not np.all(array)) for array in finite])
    vectors = [np.where(ok, array, 0).sum(0) for array, ok in zip(copies, finite, strict=True)]
    sizes = [
        array.sum(0).astype(np.float32)
        for array, count in zip(finite, counted, strict=True)
        if count
    ]
    sums = sums_over_workers(group.strategy, [*vectors, *sizes])
    counts = iter(sums[len(vectors) :])
    means = []
    for array, total, count in zip(copies, sums, counted, strict=False):
        replicas = next(counts) if count else np.full(total.shape, group.size, total.dtype)
        mean = np.array(array[0])
        np.divide(total, replicas, out=mean, where=replicas > 0)
        means.append(mean)
    return means


def _take_from_chief(group: StrategyGroup, variables: Sequence[Any]) -> None:
    """Broadcasts the first replica's values to the variables."""
    if not variables:
        return
    local_values = [_copies(group, variable)[0] for variable in variables]
    data = group.processes.broadcast_bytes(b"".join(value.tobytes() for value in local_values))
    start, values = 0, []
    for value in local_values:
        values.append(np.frombuffer(data, value.dtype, value.size, start).reshape(value.shape))
        start += value.nbytes
    _assign(group, variables, values)


def _assign(group: StrategyGroup, variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        for copy in group.strategy.experimental_local_results(native(variable)):
            copy.assign(value.astype(copy.dtype.as_numpy_dtype))
