"""`CompressedOptimizer`: exchanges gradients compressed, then lets a Keras optimizer apply them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.exchange.gradients import (
    all_finite,
    as_tensors,
    values_or_fill,
)
from tf_gradcomp.exchange.step import count_skip
from tf_gradcomp.groups.current import check_not_single_by_mistake, checked_replica_context
from tf_gradcomp.keras.common import saved_state
from tf_gradcomp.keras.common.compressed import Compressed, Gradient
from tf_gradcomp.keras.common.saved_state import check_built, check_shapes
from tf_gradcomp.keras_version import keras
from tf_gradcomp.private import keras2 as keras_private

Pairs = Iterable[tuple[Gradient | None, tf.Variable]]


@keras.utils.register_keras_serializable(package="tf_gradcomp")
class CompressedOptimizer(Compressed, keras.optimizers.Optimizer):
    """Wraps an optimizer of Keras 2; the replicas of a job exchange its gradients compressed.

    The optimizer may be a new-style one (`tf.keras.optimizers.Adam`), a legacy one
    (`tf.keras.optimizers.legacy.Adam`), or an optimizer of tensorflow-addons with its inner
    optimizers, as in `CompressedOptimizer(MovingAverage(LAMB()))`. Works under
    `gc.MultiWorkerMirroredStrategy`, TensorFlow's own `MultiWorkerMirroredStrategy` and
    `MirroredStrategy`, and Horovod, in `fit` and in training loops. With one replica, it equals the
    inner optimizer, bit for bit.

    Arguments, errors and behaviour are as in the wrapper for Keras 3, with two exceptions:

    - `precondition` is for Adam, AdamW and Nadam, new-style and legacy, and for `AdamW` and `LAMB`
      of tensorflow-addons.
    - Reading the residuals is a collective: all workers must save, as Keras' own callbacks do under
      a strategy.

    Example:
        ```python
        with gc.MultiWorkerMirroredStrategy().scope():
            model = build_model()
            model.compile(gc.CompressedOptimizer(tf.keras.optimizers.Adam()), loss="mse")
        ```
    """

    _within = staticmethod(keras_private.within)

    _accepted = (keras_private.NewStyle, keras_private.Legacy)

    def _set_up_keras(self) -> None:
        _check_no_custom_aggregator(self.inner_optimizer)
        self._model_variables: Sequence[tf.Variable] = ()
        # A SavedModel is loaded with an optimizer that has it.
        self._iterations = self.inner_optimizer.iterations

    def _create_iteration_variable(self) -> None:
        """Creates none: the inner optimizer counts."""

    @property
    def built(self) -> bool:  # type: ignore[override]
        """Whether the optimizer's variables exist."""
        return bool(self._model_variables)

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates the inner optimizer's state and, for several replicas, the exchange's state.

        Raises:
            ValueError: If a variable cannot be compressed.
            WorkersDisagreeError: If the workers have different variables or settings.
        """
        if self.built:
            return
        variables = list(var_list)
        new_style = isinstance(self._core, keras_private.NewStyle)
        self._check_scope(variables, self._core.iterations if new_style else None)
        self._build_exchange(variables)
        keras_private.build(self.inner_optimizer, variables)
        self._model_variables = variables
        self._take_moments()

    @tf.autograph.experimental.do_not_convert
    def compute_gradients(
        self, loss: Any, var_list: Any, tape: tf.GradientTape | None = None
    ) -> list[tuple[Gradient | None, tf.Variable]]:
        """Computes gradients like Keras; scales the loss if a loss scaler is inside."""
        if self._core is not self.inner_optimizer and not keras_private.looks_for_nans(self):
            return keras_private.compute_gradients(self.inner_optimizer, loss, var_list, tape)
        return super().compute_gradients(loss, var_list, tape)

    @tf.autograph.experimental.do_not_convert
    def aggregate_gradients(
        self, grads_and_vars: Pairs
    ) -> list[tuple[Gradient | None, tf.Variable]]:
        """Exchanges the gradients of this replica; returns their sum over the replicas.

        On a step that must be skipped because a replica's gradient was not finite, all sums are
        NaN, so that a loss scaler around this optimizer sees them; `apply_gradients` skips such a
        step.
        """
        pairs = list(grads_and_vars)
        if not pairs:
            return pairs
        self._prepare(pairs)
        present = _with_gradients(pairs)
        if self.passes_through():
            if keras_private.looks_for_nans(self):
                count_skip(
                    self.exchange.skipped_steps, all_finite([gradient for gradient, _ in present])
                )
            return pairs
        variables = [variable for _, variable in present]

        def across(_: tf.distribute.Strategy, grads: list[Any]) -> list[Any]:
            return self.group.each_replica(reduce, args=(grads,))

        def reduce(grads: list[Gradient]) -> list[Gradient]:
            reduced, finite, *_ = exchange(grads)
            return values_or_fill(finite, reduced, math.nan)

        context = checked_replica_context()
        exchange = self._reduction_of(variables)
        shares = self._shares([gradient for gradient, _ in present])
        reduced = iter(context.merge_call(across, args=(shares,)))
        return [(None if g is None else next(reduced), variable) for g, variable in pairs]

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Pairs,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Exchanges the gradients of this replica and applies their sum over the replicas.

        Args:
            grads_and_vars: Gradients and variables; None for no gradient, equally on all replicas.
            name: Not used.
            skip_gradients_aggregation: Whether the gradients are already sums over the replicas.
            **kwargs: `experimental_aggregate_gradients`, the opposite, as in Keras.

        Returns:
            `iterations`.

        Raises:
            ValueError: If it is not called in a replica context, XLA is to compile it, or there is
                no strategy although the process is one of several.
        """
        aggregate = kwargs.pop("experimental_aggregate_gradients", not skip_gradients_aggregation)
        if kwargs:
            raise TypeError(f"apply_gradients: unknown arguments {', '.join(kwargs)}.")
        pairs = list(grads_and_vars)
        if not pairs:
            return self.iterations
        self._prepare(pairs)
        context = checked_replica_context()
        present = _with_gradients(pairs)
        variables = [variable for _, variable in present]
        if self.passes_through():
            inner, grads = self.inner_state(variables), [gradient for gradient, _ in present]
            if self._scaler_decides:
                count_skip(self.exchange.skipped_steps, all_finite(grads))
            grads = self.exchange.flush(grads, variables, inner=inner)
            flushed = list(zip(grads, variables, strict=True))
            keras_private.apply(self._applying_optimizer, flushed, aggregate=aggregate)
            return self.iterations

        # The variables are in a closure, because strategies would give each replica its part of an
        # argument, but optimizers need the whole variables.
        def across(strategy: tf.distribute.Strategy, grads: list[Any]) -> None:
            self._apply_across_replicas(strategy, grads, variables, aggregate)

        grads = [gradient for gradient, _ in present]
        shares = self._shares(grads) if aggregate else grads
        context.merge_call(across, args=(shares,))
        return self.iterations

    def _prepare(self, pairs: Sequence[tuple[Any, tf.Variable]]) -> None:
        check_not_single_by_mistake(self.group)
        with tf.init_scope():
            self.build([variable for _, variable in pairs])
        self.exchange.indices.check([variable for _, variable in pairs])
        if not self.passes_through():
            self.exchange.group.check_current()

    def _apply_across_replicas(
        self,
        strategy: tf.distribute.Strategy,
        grads: list[Any],
        variables: Sequence[tf.Variable],
        aggregate: bool,
    ) -> None:
        """Runs across replicas, because only there may branches update variables."""
        each_replica = strategy.extended.call_for_each_replica
        exchange = self._reduction_of(variables) if aggregate else _as_sums

        def reduce(grads: list[Gradient]) -> tuple[list[Gradient], tf.Tensor]:
            reduced, finite, *_ = exchange(grads)
            if self._scaler_decides:
                reduced = values_or_fill(finite, reduced, math.nan)
            return reduced, finite

        def apply(grads: list[Gradient]) -> None:
            pairs = list(zip(grads, variables, strict=True))
            keras_private.apply(self._applying_optimizer, pairs, aggregate=False)

        def update() -> None:
            with self._applying(variables):
                each_replica(apply, args=(reduced,))

        group = self.group if aggregate else self.group.all_replicas
        reduced, finite = group.each_replica(reduce, args=(grads,))
        if self._scaler_decides:
            update()
        else:
            finite = strategy.experimental_local_results(finite)[0]
            tf.cond(finite, update, lambda: None)

    @property
    def _inside_loss_scaler(self) -> bool:  # type: ignore[override]
        return keras_private.looks_for_nans(self)

    @property
    def _scaler_decides(self) -> bool:
        """Whether an inner loss scaler skips steps; a fixed scale skips none."""
        return self._applying_optimizer is not self._core and self.inner_optimizer.dynamic

    @property
    def trained_variables(self) -> Sequence[tf.Variable]:
        return self._model_variables

    @property
    def _inner_variables(self) -> Sequence[tf.Variable]:
        return keras_private.variables_of(self.inner_optimizer, self._model_variables)

    def assign_average_vars(self, var_list: Sequence[tf.Variable]) -> Any:
        """Assigns averages to variables, if `MovingAverage` or `SWA` is inside."""
        return self._core.assign_average_vars(var_list)

    @property
    def variables(self) -> Any:
        """The inner optimizer's variables, and the saved variables of the exchange."""
        return _Callable([*self._inner_variables, *self._saved()])

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the values of `variables`; or only the inner optimizer's, and resets the rest.

        Raises:
            ValueError: If the number or the shapes of the weights differ.
        """
        check_built(self)
        inner, saved_variables = self._inner_variables, self._saved()
        if len(weights) not in (len(inner), len(inner) + len(saved_variables)):
            raise ValueError(
                f"CompressedOptimizer has {len(inner)} weights of its inner optimizer and "
                f"{len(saved_variables)} of its exchange; received {len(weights)}. These weights "
                "belong to another optimizer or compressor; tf.train.Checkpoint and the .keras "
                "format store weights by name, and load the weights that fit."
            )
        check_shapes([*inner, *saved_variables][: len(weights)], weights)
        for variable, value in zip(inner, weights, strict=False):
            variable.assign(value[()])
        names = [saved.key for saved in saved_variables]
        store = dict(zip(names, (value[()] for value in weights[len(inner) :]), strict=False))
        saved_state.load(self.exchange, saved_state.exchange_state(self.exchange), store)

    def _saved(self) -> list[_Saved]:
        state = saved_state.exchange_state(self.exchange)
        read = self.exchange.saving.read if state else None
        return [_Saved(key, variable, read) for key, variable in state.items()]

    def save_own_variables(self, store: Any) -> None:
        """Saves like the base class, and a legacy inner optimizer, which Keras does not save."""
        super().save_own_variables(store)
        for key, variable in self._legacy_state().items():
            store[key] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads like the base class, and a legacy inner optimizer."""
        legacy = self._legacy_state()
        for key in set(legacy) & set(store.keys()):
            legacy[key].assign(store[key])
        super().load_own_variables({k: store[k] for k in store.keys() if k not in legacy})  # noqa: SIM118

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> CompressedOptimizer:
        """The optimizer that `get_config` described, for the replicas in scope or of Horovod.

        In h5 files, optimizers of tensorflow-addons have names that Keras alone does not find.

        Raises:
            ValueError: If `hvd.DistributedOptimizer` is around it.
        """
        with keras.utils.custom_object_scope(keras_private.optimizers_of_addons()):
            return super().from_config(config, custom_objects)

    def _legacy_state(self) -> dict[str, tf.Variable]:
        if not self.built or isinstance(self.inner_optimizer, keras_private.NewStyle):
            return {}
        return {f"inner_{i}": variable for i, variable in enumerate(self._inner_variables)}


class _Callable(list):
    """A list that may be called: Keras 2 has `optimizer.variables` and `optimizer.variables()`."""

    def __call__(self) -> list[Any]:
        return self


class _Saved:
    """Readable stand-in for a variable of the exchange, which Keras writes to h5 files."""

    def __init__(self, key: str, variable: Any, read: Callable[[Any], np.ndarray] | None) -> None:
        self.key = key
        self.name = f"gradcomp/{key}"
        self.shape = variable.shape
        self.dtype = variable.dtype
        self._variable = variable
        self._read = read

    def numpy(self) -> np.ndarray:
        """Returns the value over all replicas."""
        assert self._read is not None
        return self._read(self._variable)

    def assign(self, _: Any) -> None:
        """Refuses a broadcast of all variables of an optimizer, as in Horovod's own callback."""
        raise ValueError(
            f"{self.name} is each worker's own state. Give all ranks the model of rank 0 with "
            "gc.callbacks.BroadcastInitialState(), or in a loop with "
            "gc.broadcast_initial_state(model)."
        )


def _with_gradients(pairs: Pairs) -> list[tuple[Gradient, tf.Variable]]:
    present = keras_private.with_gradients(list(pairs))
    return [(as_tensors(gradient, variable), variable) for gradient, variable in present]


def _as_sums(grads: list[Gradient]) -> tuple[list[Gradient], tf.Tensor]:
    """Returns gradients that are already sums over the replicas, and whether all are finite."""
    return grads, all_finite(grads)


def _check_no_custom_aggregator(inner: Any) -> None:
    for inside in keras_private.within(inner):
        if keras_private.reduces_by_itself(inside):
            raise ValueError(
                f"CompressedOptimizer: {type(inside).__name__} has its own gradient_aggregator, so "
                "gradients would be summed twice, or the aggregator would be ignored; remove it. "
                "CompressedOptimizer itself goes around all other wrappers: "
                "CompressedOptimizer(MovingAverage(optimizer))."
            )
