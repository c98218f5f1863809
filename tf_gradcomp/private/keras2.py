"""Private API of Keras 2 and tensorflow-addons.

`tests/keras2/test_optimizer.py` has the tests of these names.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.private.patching import with_methods

keras: Any = tf.keras
Pairs = Sequence[tuple[Any, Any]]  # of gradients and variables

NewStyle = keras.optimizers.Optimizer
Legacy = keras.optimizers.legacy.Optimizer
PACKAGE = NewStyle.__module__.partition(".")[0]  # keras, or tf_keras
_SOURCE = f"{PACKAGE}.src"
# Functions that `patch` replaces. No public function is called in all cases, or knows as much.
REDUCE_GRADIENTS = (
    "tensorflow.keras.optimizers.Optimizer.aggregate_gradients",
    "tensorflow.keras.optimizers.legacy.Optimizer._aggregate_gradients",
)
REDUCE_OUTPUTS = f"{_SOURCE}.engine.training.reduce_per_replica"
RESULT_OF_METRIC = f"{_SOURCE}.utils.metrics_utils.result_wrapper"
HANDLE_DATA = f"{_SOURCE}.engine.data_adapter.DataHandler.__init__"
SAVE_MODEL = (
    f"{_SOURCE}.saving.saving_lib.save_model",
    f"{_SOURCE}.saving.saving_lib.save_weights_only",
    f"{_SOURCE}.saving.legacy.hdf5_format.save_model_to_hdf5",
    f"{_SOURCE}.saving.legacy.saved_model.save.save",
)
SAVE_WEIGHTS = f"{_SOURCE}.saving.legacy.save.save_weights"
_utils = importlib.import_module(f"{PACKAGE}.src.optimizers.utils")
_all_reduce_sum_gradients = _utils.all_reduce_sum_gradients


def is_loss_scaler(optimizer: Any) -> bool:
    """Whether it is a `LossScaleOptimizer`, whose new-style class has no public name."""
    return isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer)


def within(optimizer: Any) -> Iterator[Any]:
    """An optimizer and all optimizers that it wraps, from the outside to the inside.

    The wrappers of tensorflow-addons have no public name for the wrapped optimizer.
    """
    inside: Any = optimizer
    while isinstance(inside, (NewStyle, Legacy)):
        yield inside
        inside = getattr(inside, "inner_optimizer", None) or getattr(inside, "_optimizer", None)


def reduces_by_itself(optimizer: Any) -> bool:
    """Whether a legacy optimizer has a `gradient_aggregator` other than Keras' own."""
    aggregator = getattr(optimizer, "gradient_aggregator", _all_reduce_sum_gradients)
    return aggregator is not _all_reduce_sum_gradients


def with_gradients(pairs: Pairs) -> list[tuple[Any, Any]]:
    """The pairs with a gradient; warns of other pairs like Keras, and fails if there is none."""
    return list(_utils.filter_empty_gradients(pairs))


def build(optimizer: Any, variables: Sequence[tf.Variable]) -> None:
    """Creates an optimizer's variables, which legacy optimizers publicly create only in a step."""
    if isinstance(optimizer, Legacy):
        optimizer._create_all_weights(variables)
        for inside in list(within(optimizer))[2:]:  # whose counters would be created in a step
            _ = inside.iterations
    else:
        optimizer.build(variables)


def variables_of(optimizer: Any, model_variables: Sequence[Any] = ()) -> list[tf.Variable]:
    """Returns all variables of an optimizer, which legacy ones call their weights.

    Legacy ones have them in the order of their creation, which differs after a checkpoint was
    restored. The order of `model_variables`, the variables that it trains, decides here.
    """
    if not isinstance(optimizer, Legacy):
        return list(optimizer.variables)
    order: dict[int, tuple[int, int, int]] = {}
    for level, inside in enumerate(within(optimizer)):
        for kind, name in enumerate(inside.get_slot_names()):
            kind_slots = [
                inside._slots.get(_key(variable), {}).get(name) for variable in model_variables
            ]
            order |= {id(slot): (level, kind, i) for i, slot in enumerate(kind_slots)}
    return sorted(optimizer.weights, key=lambda weight: order.get(id(weight), (-1, 0, 0)))


def state_variables(optimizer: Any) -> list[tf.Variable]:
    """Returns an optimizer's own variables, without the optimizer in a loss scaler.

    A loss scaler's own have no public name.
    """
    if not is_loss_scaler(optimizer):
        return variables_of(optimizer)
    return [
        optimizer.dynamic_counter,
        optimizer._loss_scale._current_loss_scale,
    ] * optimizer.dynamic


def apply(optimizer: Any, pairs: Pairs, *, aggregate: bool) -> None:
    """Lets an optimizer apply gradients, and first sum them over the replicas if requested."""
    if isinstance(optimizer, Legacy):
        optimizer.apply_gradients(pairs, experimental_aggregate_gradients=aggregate)
    else:
        optimizer.apply_gradients(pairs, skip_gradients_aggregation=not aggregate)


def compute_gradients(
    scaler: Any, loss: Any, variables: Any, tape: tf.GradientTape | None
) -> list[tuple[Any, Any]]:
    """The unscaled gradients of a loss, which a loss scaler scales; legacy: not public."""
    if isinstance(scaler, Legacy):
        return list(scaler._compute_gradients(loss, variables, tape=tape))
    return list(scaler.compute_gradients(loss, variables, tape=tape))


def clip(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Clips as the optimizer would when it applies; the public API clips only there."""
    if isinstance(optimizer, Legacy):
        pairs = optimizer._transform_gradients(list(zip(gradients, variables, strict=True)))
        return [gradient for gradient, _ in pairs]
    return list(optimizer._clip_gradients(list(gradients)))


def slots(optimizer: Any, kind: str, variables: Sequence[Any]) -> list[tf.Variable]:
    """The `"momentums"`, `"velocities"` or `"velocity_hats"` of variables.

    New-style optimizers keep them privately, and legacy ones by other names.
    """
    if isinstance(optimizer, Legacy):
        name = {"momentums": "m", "velocities": "v", "velocity_hats": "vhat"}[kind]
        return [optimizer.get_slot(variable, name) for variable in variables]
    slots = getattr(optimizer, f"_{kind}")
    return [slots[optimizer._index_dict[optimizer._var_key(variable)]] for variable in variables]


Step = Callable[[Any, Any, Any, Any], None]  # (optimizer, gradient, variable, learning rate)
_COMPUTED = "_u_product_counter"  # how often a new-style Nadam has computed its product


@contextlib.contextmanager
def stepping(optimizer: Any, core: Any, steps: Iterable[tuple[Any, Step]]) -> Iterator[None]:
    """Within this context, `core` updates variables by other steps, and nothing is clipped.

    Public methods tell an optimizer what to do with gradients before it applies them, and not how
    to apply them.

    Args:
        optimizer: The optimizer that is called; it clips.
        core: It, or the optimizer in it that updates.
        steps: Variables, and what updates them, weight decay of new-style optimizers excluded; with
            other variables, `core` runs unchanged.
    """
    step_by_key = {_key(variable): step for variable, step in steps}

    def step_of(variable: Any) -> Step | None:
        return step_by_key.get(_key(variable))

    if isinstance(core, Legacy):
        with (
            with_methods(core, **_legacy_overrides(core, step_of)),
            with_methods(optimizer, _transform_gradients=lambda pairs: pairs),
        ):
            yield
        return
    full_update = core.update_step
    computed = getattr(core, _COMPUTED, None)

    def update_step(gradient: Any, variable: Any) -> None:
        """Replaces Keras' method: variables with a step of their own take it."""
        step = step_of(variable)
        if step:
            step(core, gradient, variable, core.learning_rate)
            return
        if computed is not None:  # then Nadam uses its stored product as it is
            vars(core)[_COMPUTED] = core.iterations + 2
        full_update(gradient, variable)

    compiles, core.jit_compile = core.jit_compile, False  # Keras keeps compiled functions
    try:
        clipped = {"_clip_gradients": lambda gradients: gradients}
        with with_methods(core, update_step=update_step, **clipped):
            yield
    finally:
        core.jit_compile = compiles
        if computed is not None:
            vars(core)[_COMPUTED] = computed


def _key(variable: Any) -> Any:
    """The same for a variable, a replica's part of it, and what casts it for mixed precision."""
    if not isinstance(variable, tf.distribute.DistributedValues):
        for part in (variable, variable.handle):  # TensorFlow has it on one of them
            if hasattr(part, "_distributed_container"):
                variable = part._distributed_container()
    return variable._unique_id


def _legacy_overrides(
    optimizer: Any, step_of: Callable[[Any], Step | None]
) -> dict[str, Callable[..., Any]]:
    whole_dense, whole_sparse = optimizer._resource_apply_dense, optimizer._resource_apply_sparse

    def dense(grad: Any, var: Any, apply_state: Any = None) -> Any:
        step = step_of(var)
        if not step:
            return whole_dense(grad, var, apply_state=apply_state)
        if hasattr(optimizer, "_decay_weights_op"):  # of tensorflow-addons
            optimizer._decay_weights_op(var, apply_state=apply_state)
        step(optimizer, grad, var, _rate(optimizer, var, apply_state))
        return tf.no_op()

    def sparse(grad: Any, var: Any, indices: Any, apply_state: Any = None) -> Any:
        step = step_of(var)
        if not step:
            return whole_sparse(grad, var, indices, apply_state=apply_state)
        if hasattr(optimizer, "_decay_weights_sparse_op"):
            optimizer._decay_weights_sparse_op(var, indices, apply_state=apply_state)
        slices = tf.IndexedSlices(grad, indices, tf.shape(var))
        step(optimizer, slices, var, _rate(optimizer, var, apply_state))
        return tf.no_op()

    return {"_resource_apply_dense": dense, "_resource_apply_sparse": sparse}


def _rate(optimizer: Any, variable: Any, apply_state: Any) -> Any:
    key = (variable.device, variable.dtype.base_dtype)
    state = (apply_state or {}).get(key) or optimizer._fallback_apply_state(*key)
    return state["lr_t"]


def set_nadam_product(nadam: Any, product: tf.Tensor) -> None:
    """Sets a new-style Nadam's product of its momentum coefficients; called across replicas.

    In a graph, Keras multiplies it once for each variable, and in `stepping` not at all.
    """
    nadam._u_product.assign(tf.cast(product, nadam._u_product.dtype))


def nadam_schedule(nadam: Any, dtype: tf.DType) -> tuple[tf.Tensor, float]:
    """Within a step of Nadam: its product of momentum coefficients, and how fast these grow.

    No public name exists for either.
    """
    if isinstance(nadam, Legacy):
        return tf.cast(nadam._m_cache, dtype), nadam._initial_decay
    return tf.cast(nadam._u_product, dtype), 1.0


def decays_in_step(lamb: Any, variable: Any) -> bool:
    """Whether tensorflow-addons' LAMB applies weight decay in the update of a variable."""
    return lamb._do_use_weight_decay(variable)


def adapts_layer(lamb: Any, variable: Any) -> bool:
    """Whether tensorflow-addons' LAMB scales a variable's update by the variable's norm."""
    return lamb._do_layer_adaptation(variable)


def looks_for_nans(optimizer: Any) -> bool:
    """Whether a loss scaler wraps it and inspects the sums; a private attribute."""
    return getattr(optimizer, "_is_wrapped_by_loss_scale_optimizer", False)


def lending_generator() -> contextlib.AbstractContextManager[None]:
    """Does nothing: Keras 2 draws without a seed by `tf.random`."""
    return contextlib.nullcontext()


def initial_position(model: keras.Model, steps: int | None) -> tuple[int, int]:
    """Returns the epoch and step at which `BackupAndRestore` continues `fit`; no public name."""
    epoch, step = model._maybe_load_initial_counters_from_ckpt(steps or 0, 0)
    return int(epoch), int(step)


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """The model and all layers in it, at any depth, each before those within it.

    The public `model.layers` has the first level only.
    """
    return list(model._flatten_layers())


def optimizers_of_addons() -> dict[str, type]:
    """Returns the optimizers of tensorflow-addons by name, if the program has imported it."""
    addons = sys.modules.get("tensorflow_addons.optimizers")
    return {
        name: value
        for name, value in (vars(addons) if addons else {}).items()
        if isinstance(value, type) and issubclass(value, Legacy) and value is not Legacy
    }
