"""Gradients, dense or as slices, and the variables that they belong to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_gradcomp.policy import GradientSpec, LayerPolicy

Gradients: TypeAlias = Sequence[tf.Tensor | tf.IndexedSlices]
_DTYPES = ("float32", "float16", "bfloat16")


def gradient_specs(variables: Sequence[Any], policy: LayerPolicy) -> list[GradientSpec]:
    """Returns the specs that describe the gradients of `variables` to compressors."""
    specs = []
    paths = _unique_paths(variables)
    policy = policy.for_paths(paths)
    for path, variable in zip(paths, variables, strict=True):
        dtype = tf.as_dtype(variable.dtype).name
        shape = tuple(int(size) for size in variable.shape)
        specs.append(policy.spec(path, shape, dtype))
    return specs


def with_gradients_to_exchange(specs: Sequence[GradientSpec]) -> list[GradientSpec]:
    """Returns the specs with compressed dtypes; other variables must not have gradients."""
    return [spec for spec in specs if spec.dtype in _DTYPES]


def values_or_fill(
    finite: tf.Tensor, gradients: Gradients, value: float
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Returns gradients or, if not `finite`, `value` everywhere in the forms of the gradients."""
    if not gradients:
        return []
    all_values = [_values(gradient) for gradient in gradients]

    def fill() -> list[tf.Tensor]:
        return [
            tf.fill(tf.shape(values), tf.constant(value, values.dtype)) for values in all_values
        ]

    # One branch for all gradients: a branch takes long to trace.
    values = tf.cond(finite, lambda: all_values, fill)
    return list(map(_with_values, gradients, values))


def check_dtypes(specs: Sequence[GradientSpec]) -> None:
    """Raises for gradient dtypes that cannot be compressed."""
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise ValueError(
                f"Variable {spec.path!r} is {spec.dtype} and has a gradient, which is not "
                f"compressed; expected one of {', '.join(_DTYPES)}. Change its dtype, or train "
                "without compression."
            )


def check_shapes(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices], specs: Sequence[GradientSpec]
) -> None:
    """Checks that gradients have the shapes of their variables, as far as shapes are known."""
    for gradient, spec in zip(gradients, specs, strict=True):
        for shape in _known_shapes(gradient):
            if not shape.is_compatible_with(spec.shape):
                raise ValueError(
                    f"The gradient of variable {spec.path!r} has shape {shape}; expected "
                    f"{spec.shape}, the shape of the variable. Pass the gradients in the order of "
                    "their variables, as tape.gradient returns them."
                )


def _known_shapes(gradient: tf.Tensor | tf.IndexedSlices) -> list[tf.TensorShape]:
    if not isinstance(gradient, tf.IndexedSlices):
        return [tf.TensorShape(gradient.shape)]
    by_values = tf.TensorShape([None]).concatenate(gradient.values.shape[1:])
    return [tf.TensorShape(tf.get_static_value(gradient.dense_shape)), by_values]


def divided(gradient: tf.Tensor | tf.IndexedSlices, scale: Any) -> tf.Tensor | tf.IndexedSlices:
    """A gradient divided by a number, in its own dtype."""
    values = _values(gradient)
    # In float16 a scale of 65536 would be infinite.
    unscaled = tf.cast(values, tf.float32) / tf.cast(scale, tf.float32)
    return _with_values(gradient, tf.cast(unscaled, values.dtype))


def times(gradient: tf.Tensor | tf.IndexedSlices, factor: int) -> tf.Tensor | tf.IndexedSlices:
    """A gradient multiplied by a whole number."""
    values = _values(gradient)
    # Grappler may move the factor to an earlier product. A constant that a merge call creates waits
    # for the gradients, so the graph would then have a cycle.
    with tf.control_dependencies(None):
        number = tf.constant(factor, values.dtype)
    return _with_values(gradient, values * number)


def all_finite(gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
    """Whether all gradients of this replica are finite, as a bool scalar."""
    finite = [tf.math.is_finite(_values(gradient)) for gradient in gradients]
    return tf.reduce_all(to_scalars(tf.reduce_all, finite))


def to_scalars(reduce: Callable[..., tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Reduces each tensor to a scalar. Tensors of one rank share a constant, for a small graph."""
    axes: dict[int | None, tf.Tensor | None] = {None: None}
    for rank in {tensor.shape.rank for tensor in tensors} - {None}:
        axes[rank] = tf.range(rank)
    return [reduce(tensor, axes[tensor.shape.rank]) for tensor in tensors]


def _values(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _with_values(
    gradient: tf.Tensor | tf.IndexedSlices, values: tf.Tensor
) -> tf.Tensor | tf.IndexedSlices:
    """Returns other values in the form of a gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def norm(residuals: Sequence[tf.Tensor | tf.Variable]) -> float:
    """The Euclidean norm of all residuals of a replica; 0 without any."""
    return float(tf.linalg.global_norm(residuals)) if residuals else 0.0


def as_tensors(
    gradient: tf.Tensor | tf.IndexedSlices, variable: Any
) -> tf.Tensor | tf.IndexedSlices:
    """The gradient of a variable; slices made by a program may have a tuple as shape, or none."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = variable.shape if gradient.dense_shape is None else gradient.dense_shape
    return tf.IndexedSlices(
        tf.convert_to_tensor(gradient.values),
        tf.convert_to_tensor(gradient.indices),
        tf.convert_to_tensor(shape),
    )


def plus_residual(
    gradient: tf.Tensor | tf.IndexedSlices, residual: tf.Tensor, replicas: int
) -> tuple[tf.Tensor | tf.IndexedSlices, tf.Tensor]:
    """Adds as much of the residual to a gradient as the gradient's dtype can hold.

    `replicas` add their residuals to this gradient. Returns the sum in the form of the gradient,
    and the rest of the residual: zeros, unless the gradient is float16.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        if gradient.dtype != tf.float16:
            return gradient + tf.cast(residual, gradient.dtype), tf.zeros_like(residual)
        gradient32 = tf.cast(gradient, tf.float32)
        fitting = tf.clip_by_value(
            residual, tf.float16.min - gradient32, tf.float16.max - gradient32
        )
        return tf.cast(gradient32 + fitting, tf.float16), residual - fitting
    fitting, dtype = residual, gradient.values.dtype
    if dtype == tf.float16:  # the optimizer adds up the rows of all replicas
        most = float(tf.float16.max) / (2 * replicas)
        fitting = tf.clip_by_value(residual, -most, most)
    rows = tf.range(tf.shape(residual)[0])
    sum_of_rows = tf.IndexedSlices(
        tf.concat([gradient.values, tf.cast(fitting, dtype)], 0),
        tf.concat([gradient.indices, tf.cast(rows, gradient.indices.dtype)], 0),
        gradient.dense_shape,
    )
    return sum_of_rows, residual - fitting


def native(variable: Any) -> tf.Variable:
    """TensorFlow's variable, which is the value of a Keras 3 variable."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def path_of(variable: Any) -> str:
    """The path of a variable, such as `"sequential/conv2d/kernel"`."""
    return getattr(variable, "path", None) or variable.name.split(":")[0]


def check_variables_in_scope(strategy: tf.distribute.Strategy, variables: Sequence[Any]) -> None:
    """Raises for variables created outside the strategy, which each worker holds separately."""
    for variable in variables:
        if not strategy.extended.variable_created_in_scope(native(variable)):
            raise ValueError(
                f"Variable {path_of(variable)!r} was created outside the scope of "
                f"{type(strategy).__name__}, so each replica would train its own copy. Create a "
                "model inside `with strategy.scope():`, and change the model there, too: "
                "`with strategy.scope(): layer.enable_lora(4)`."
            )


def _unique_paths(variables: Sequence[Any]) -> list[str]:
    paths: list[str] = []
    for variable in variables:
        path, suffix = path_of(variable), 1
        while path in paths:
            path, suffix = f"{path_of(variable)}_{suffix}", suffix + 1
        paths.append(path)
    return paths


def check_no_overwriting(variables: Sequence[Any], replicas: int) -> None:
    """Raises for variables that are overwritten by their gradients, with several replicas."""
    overwritten = [v.path for v in variables if getattr(v, "overwrite_with_gradient", False)]
    if overwritten and replicas > 1:
        raise ValueError(
            f"The gradients of {', '.join(overwritten)} are new values for these variables (as in "
            "float8 layers), which replicas cannot sum; train on one replica, or with another "
            "dtype policy than float8."
        )


def check_created_in_scope(step_counter: Any, role: str = "inner") -> None:
    """Raises unless the optimizer was created under the strategy in scope."""
    extended = tf.distribute.get_strategy().extended
    if not extended.variable_created_in_scope(native(step_counter)):
        raise ValueError(
            f"CompressedOptimizer: the {role} optimizer was created outside the strategy's scope, "
            "so replicas would share its state; create it inside `with strategy.scope():`."
        )


def check_variables_passed(variables: Sequence[Any] | None) -> Sequence[Any]:
    """Returns the variables; the caller must pass them if the optimizer is not built."""
    if variables is None:
        raise ValueError(
            "CompressedOptimizer: gradients were given without variables before the optimizer was "
            "built; call optimizer.build(variables) first."
        )
    return variables


def check_same_length(grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raises unless there is one gradient per variable."""
    if len(grads) != len(variables):
        raise ValueError(
            f"CompressedOptimizer: received {len(grads)} gradients for {len(variables)} variables; "
            "expected one gradient, or None, for each variable."
        )


def add_residuals(
    gradients: Gradients,
    residuals: Sequence[tf.Tensor],
    wanted: tf.Tensor,
    scale: tf.Tensor | float,
    replicas: int,
) -> tuple[list[tf.Tensor | tf.IndexedSlices], list[tf.Tensor]]:
    """Adds to gradients as much of their residuals as the gradients' dtypes can hold.

    The residuals divided by `scale` are in units of the gradients. Returns the sums and the
    remaining residuals; adds nothing unless `wanted`.
    """

    def added() -> tuple[list[tf.Tensor | tf.IndexedSlices], list[tf.Tensor]]:
        pairs = [
            plus_residual(gradient, residual / scale, replicas)
            for gradient, residual in zip(gradients, residuals, strict=True)
        ]
        return [total for total, _ in pairs], [remaining * scale for _, remaining in pairs]

    return tf.cond(wanted, added, lambda: (list(gradients), list(residuals)))


class VariableIndices:
    """Maps the variables of an exchange to their indices.

    Variables are identified by object, and not kept alive: a strategy's exchange ends with its
    variables. `tf.Module` does not track plain objects such as this one, so no checkpoint has them
    twice.

    Args:
        variables: All variables of the exchange.
        specs: The specs of their gradients.
        exchanged: Whether there are several replicas, which exchange gradients of few dtypes.
    """

    def __init__(
        self, variables: Sequence[Any], specs: Sequence[GradientSpec], *, exchanged: bool
    ) -> None:
        self._variables = [weakref.ref(native(variable)) for variable in variables]
        self._indices = {id(native(variable)): i for i, variable in enumerate(variables)}
        self._specs = specs
        self._exchanged = exchanged

    def get(self, variable: Any) -> int | None:
        """Returns the index of a TensorFlow or Keras variable; None if the exchange lacks it."""
        index = self._indices.get(id(native(variable)))
        # A new variable may have the id of a deleted one.
        if index is None or self._variables[index]() is not native(variable):
            return None
        return index

    def include(self, variables: Sequence[Any]) -> bool:
        """Whether the exchange was built for all of `variables`."""
        return all(self.get(variable) is not None for variable in variables)

    def of(self, variables: Sequence[Any]) -> list[int]:
        """Returns the indices of variables; raises ValueError for one that the exchange lacks."""
        return [self._index(variable) for variable in variables]

    def check(self, variables: Sequence[Any]) -> list[int]:
        """Returns the indices of variables that have gradients.

        Raises:
            ValueError: If the exchange lacks a variable, or does not exchange gradients of its
                dtype.
        """
        indices = self.of(variables)
        if self._exchanged:
            check_dtypes([self._specs[index] for index in indices])
        return indices

    def _index(self, variable: Any) -> int:
        index = self.get(variable)
        if index is None:
            known = ", ".join(spec.path for spec in self._specs) or "none"
            raise ValueError(
                f"Variable {path_of(variable)!r} is not among the variables whose gradients are "
                f"exchanged: {known}. If layers were unfrozen since, or for another model, compile "
                "with a new CompressedOptimizer; otherwise build the optimizer with all variables "
                "that it will receive."
            )
        return index
