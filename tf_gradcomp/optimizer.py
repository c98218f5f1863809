"""`CompressedOptimizer`: exchanges gradients compressed, then lets a Keras optimizer apply them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tf_gradcomp import _private, compressors
from tf_gradcomp.advice import measuring
from tf_gradcomp.compressors.auto import BASELINE
from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.distribute.alone import check_not_alone_by_mistake
from tf_gradcomp.distribute.communicator import replica_communicator
from tf_gradcomp.distribute.exchange import GradientExchange
from tf_gradcomp.distribute.gradients import all_finite
from tf_gradcomp.distribute.supported import check_strategy
from tf_gradcomp.momentum_steps import momentum_only
from tf_gradcomp.policy import Policy
from tf_gradcomp.preconditioner import (
    AUTO,
    SECOND_MOMENT,
    SLOTS,
    AdamState,
    Preconditioner,
    preconditioner_for,
)

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices

_LOG = tf.get_logger()
_NOT_KEPT = (
    "The checkpoint holds what %r cannot go on with: %s. It is not loaded; where that is "
    "a residual, gradients that were not sent yet are lost. To send them, go on with the "
    "compressor and the precondition that wrote them, or with gc.compressors.Auto([both])."
)


@keras.saving.register_keras_serializable(package="tf_gradcomp")
class CompressedOptimizer(keras.optimizers.Optimizer):
    """Wraps a Keras optimizer; the replicas of a job exchange its gradients compressed.

    Works under `gc.MultiWorkerMirroredStrategy` in `fit` and in training loops, and under
    TensorFlow's own `MultiWorkerMirroredStrategy` and `MirroredStrategy` in training loops. With
    one replica it is the inner optimizer, bit for bit. (Where Keras' own does not run, as one that
    accumulates under a strategy, it takes finite steps as without the strategy, and skips others.)

    - Everything is set on the inner optimizer: learning rate and schedule, weight decay, EMA, and
      clipping. That acts on the reduced gradient, as it would on one worker; with `precondition` on
      each replica's own before it is divided, as in Keras without this wrapper.
    - With the inner optimizer's `gradient_accumulation_steps`, each replica accumulates on its own;
      they exchange on the steps that update.
    - A step on which any replica's gradient is not finite is skipped by all: the optimizer is not
      called, the bad gradient is discarded, and the finite ones are kept for the next step.
    - `LossScaleOptimizer` may be around it (Keras puts it there under `mixed_float16`) or inside;
      the loss scale follows what all replicas saw, and residuals are in unscaled units.
    - Its residuals are saved with the model, as their sum over the replicas. Reading them is a
      collective: all workers must save (see `gc.worker_path`).

    Args:
        inner_optimizer: A Keras 3 optimizer, its config (`keras.optimizers.serialize`) or its name.
        compressor: A compressor, its name or its config: see `gc.compressors.get`.
        policy: Which layer kind each variable has; by default `gc.Policy()`, its documented rules.
        precondition: `"local"`: each replica keeps Adam's second moment of its own gradients, and
            compresses them divided by its root; their sum goes through the inner optimizer's
            momentum and learning rate only. For Adam, AdamW, Nadam and Lamb.
            None: the inner optimizer gets the sum, and sparse methods make Adam's steps short.
            `"auto"`: local where the inner optimizer allows it and the method is helped by it.
        name: The optimizer's name.

    Raises:
        TypeError: If `inner_optimizer` is no Keras optimizer, or `policy` no `gc.Policy`.
        ValueError: If it is wrapped twice, an argument is unknown, the inner optimizer cannot be
            preconditioned as asked, or the current strategy has a compressor of its own or is one
            that exchanges no gradients.

    Example:
        ```python
        with gc.MultiWorkerMirroredStrategy().scope():
            model = build_model()
            model.compile(optimizer=gc.CompressedOptimizer(keras.optimizers.Adam()), loss="mse")
        ```
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer | Mapping[str, Any] | str,
        compressor: compressors.Compressor | Mapping[str, Any] | str = "adacomp",
        policy: Policy | None = None,
        precondition: str | None = AUTO,
        name: str = "compressed_optimizer",
    ) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = _checked_inner(inner_optimizer)
        self.precondition = precondition
        self._given = compressors.get(compressor)
        used = compressors.get(BASELINE) if measuring.is_on() else self._given
        self.exchange = GradientExchange(used, policy)
        self._measuring: measuring.Measuring | None = None
        for method in self._given.candidates or (self._given,):
            self.preconditioner_of(method)  # what is wrong with the setting shows now
        self._accumulators: list[keras.Variable] = []
        _check_current_strategy()

    @property
    def compressor(self) -> compressors.Compressor:
        """The compression method."""
        return self._given

    def preconditioner_of(self, compressor: compressors.Compressor) -> Preconditioner | None:
        """What would be in front of a compressor, if it were this optimizer's."""
        return preconditioner_for(self._core, compressor, self.precondition)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the inner optimizer's state and, for several replicas, what the exchange needs.

        Raises:
            ValueError: If a variable cannot be compressed.
            WorkersDisagreeError: If the workers have other variables or settings.
        """
        if self.built:
            return
        _check_current_strategy()
        if not self.passes_through():
            _check_created_in_scope(_private.step_counter(self._core))
        variables = list(variables)
        super().build(variables)
        with tf.init_scope():  # a config reads variables
            facts = {
                **_facts("inner optimizer", self.inner_optimizer),
                "precondition": self.precondition,
            }
        self.exchange.build(variables, facts, self.preconditioner_of)
        if measuring.is_on():
            methods = [*compressors.Auto().candidates, *(self._given.candidates or [self._given])]
            self._measuring = measuring.Measuring(self.exchange, methods, self.preconditioner_of)
        # With the accumulators that only one replica uses, so that checkpoints fit any number.
        self.inner_optimizer.build(variables)
        if self.passes_through():
            return
        _private.disable_reduction(self._core)
        if self._core.gradient_accumulation_steps:
            self._accumulators = [_accumulator(variable) for variable in variables]

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Exchanges the gradients of this replica and applies their sum over the replicas.

        Args:
            grads: One for each variable; None where there is none, on all replicas alike.
            trainable_variables: By default, those it was built with.

        Raises:
            ValueError: If it is not called in a replica context, XLA is to compile it, or there is
                no strategy in what is one of several processes.
        """
        scaler = self.inner_optimizer if self._core is not self.inner_optimizer else None
        self._apply(scaler, grads, trainable_variables)

    @tf.autograph.experimental.do_not_convert
    def apply_scaled(
        self,
        scaler: keras.optimizers.LossScaleOptimizer,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """As `apply`, for the loss scaler around this optimizer, which it updates as well."""
        if not scaler.built:
            scaler.build(list(_given(trainable_variables)))
        self._apply(scaler, grads, trainable_variables)

    def _apply(
        self,
        scaler: keras.optimizers.LossScaleOptimizer | None,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[keras.Variable] | None,
    ) -> None:
        context = _checked_replica_context()
        check_not_alone_by_mistake()
        if not self.built:
            self.build(_given(trainable_variables))
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        _check_one_for_each(grads, trainable_variables)
        if not grads:
            return
        grads, variables = self._filter_empty_gradients(list(grads), list(trainable_variables))
        if self.passes_through():
            adam = self._adam_state(variables)
            grads = self.exchange.flush(grads, variables, self._divisor(scaler), adam)
            self.inner_optimizer.apply(grads, variables)
            return
        self.exchange.check_scope()
        if scaler is not None:
            grads = [_divided(gradient, scaler.dynamic_scale) for gradient in grads]
        context.merge_call(self._apply_across_replicas, args=(scaler, list(grads), list(variables)))

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient | None, keras.Variable]]
    ) -> keras.Variable:
        """As `apply`, with pairs of gradients and variables; returns the inner `iterations`."""
        super().apply_gradients(grads_and_vars)
        return self.iterations

    def passes_through(self) -> bool:
        """Whether the inner optimizer runs as it is: with one replica, if its strategy allows it.

        No strategy allows Keras' own branches for accumulation and averaging, whatever its size.
        """
        branches = self._core.gradient_accumulation_steps or self._core.ema_overwrite_frequency
        alone = tf.distribute.get_strategy().num_replicas_in_sync == 1
        return alone and not (branches and tf.distribute.has_strategy())

    def _divisor(self, scaler: keras.optimizers.LossScaleOptimizer | None) -> Any:
        """By what the inner optimizer divides a gradient before it uses it."""
        steps = self._core.gradient_accumulation_steps or 1
        return steps if scaler is None else steps * scaler.dynamic_scale.value

    # What follows up to `_exchange` runs across replicas: only there may a branch contain updates.

    def _apply_across_replicas(
        self,
        strategy: tf.distribute.Strategy,
        scaler: keras.optimizers.LossScaleOptimizer | None,
        grads: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> None:
        steps = self._core.gradient_accumulation_steps
        if not steps:
            self._exchange_and_apply(strategy, scaler, grads, variables)
            return
        each_replica = strategy.extended.call_for_each_replica
        counter = _private.step_counter(self._core)

        def update() -> None:
            totals = each_replica(self._take_accumulated, args=(grads, variables))
            self._exchange_and_apply(strategy, scaler, totals, variables)

        def accumulate() -> None:
            each_replica(self._accumulate, args=(grads, variables))
            counter.assign_add(1)

        tf.cond(tf.equal((counter.value + 1) % steps, 0), update, accumulate)

    def _exchange_and_apply(
        self,
        strategy: tf.distribute.Strategy,
        scaler: keras.optimizers.LossScaleOptimizer | None,
        grads: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> None:
        each_replica = strategy.extended.call_for_each_replica
        reduced, finite = each_replica(self._exchange, args=(grads, variables))
        finite = strategy.experimental_local_results(finite)[0]

        def update() -> None:
            with _private.applying_at_once(self._core), self._stepping():
                each_replica(self._core.apply, args=(reduced, variables))
            self._overwrite_by_averages(strategy)

        def skip() -> None:
            if self._core.gradient_accumulation_steps:
                _private.step_counter(self._core).assign_add(1)

        tf.cond(finite, update, skip)
        if scaler is not None:
            _update_loss_scale(scaler, finite)

    def _exchange(
        self, grads: Sequence[Gradient], variables: Sequence[keras.Variable]
    ) -> tuple[list[Gradient], tf.Tensor]:
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync == 1:
            finite = all_finite(grads)
            self.exchange.count_skip(finite)
            adam = self._adam_state(variables)
            return self.exchange.flush(grads, variables, adam=adam), finite

        def all_reduce_slices(slices: tf.IndexedSlices) -> tf.IndexedSlices:
            return context.all_reduce(tf.distribute.ReduceOp.SUM, slices)

        if self.exchange.preconditioner:
            grads = _private.clip(self._core, grads)
        if self._measuring:
            grads, seconds = self._measuring.before(grads)
        reduced, finite = self.exchange.reduce(
            grads,
            variables,
            replica_communicator(),
            _private.local_replica_id(context),
            all_reduce_slices,
            self._adam_state(variables),
        )
        if self._measuring:
            reduced = self._measuring.after(reduced, seconds)
        return reduced, finite

    def _adam_state(self, variables: Sequence[keras.Variable]) -> AdamState | None:
        kept = [name for name in SLOTS if name in self.exchange.state]
        if not kept:
            return None
        moments = {name: _private.slots(self._core, SLOTS[name], variables) for name in kept}
        return AdamState(tf.cast(self._core.iterations, tf.int64), moments)

    def _stepping(self) -> contextlib.AbstractContextManager[None]:
        alone = tf.distribute.get_strategy().num_replicas_in_sync == 1
        if alone or not self.exchange.preconditioner:
            return contextlib.nullcontext()
        return momentum_only(self._core)

    def _overwrite_by_averages(self, strategy: tf.distribute.Strategy) -> None:
        core = self._core
        if not (core.use_ema and core.ema_overwrite_frequency):
            return
        variables = self._trainable_variables

        def overwrite() -> None:
            _private.overwrite_by_averages(core)
            strategy.extended.call_for_each_replica(_constrain, args=(variables,))

        due = tf.equal(tf.cast(core.iterations, tf.int64) % core.ema_overwrite_frequency, 0)
        tf.cond(due, overwrite, lambda: None)

    def _accumulate(self, grads: Sequence[Gradient], variables: Sequence[keras.Variable]) -> None:
        for gradient, variable in zip(grads, variables, strict=True):
            self._accumulator_of(variable).assign_add(tf.convert_to_tensor(gradient))

    def _take_accumulated(
        self, grads: Sequence[Gradient], variables: Sequence[keras.Variable]
    ) -> list[tf.Tensor]:
        self._accumulate(grads, variables)
        steps = self._core.gradient_accumulation_steps
        accumulators = [self._accumulator_of(variable) for variable in variables]
        means = [accumulator.value / steps for accumulator in accumulators]
        with tf.control_dependencies(means):
            for accumulator in accumulators:
                accumulator.assign(tf.zeros_like(accumulator.value))
        return means

    def _accumulator_of(self, variable: keras.Variable) -> keras.Variable:
        return self._accumulators[self._get_variable_index(variable)]

    @property
    def _core(self) -> keras.optimizers.Optimizer:
        """The optimizer that updates: the inner one, or that inside the inner loss scaler."""
        if isinstance(self.inner_optimizer, keras.optimizers.LossScaleOptimizer):
            return self.inner_optimizer.inner_optimizer
        return self.inner_optimizer

    @property
    def variables(self) -> list[keras.Variable]:
        """The inner optimizer's variables, then those of the exchange."""
        return [*self.inner_optimizer.variables, *self._own_variables()]

    def _own_variables(self) -> list[keras.Variable]:
        return [*self.exchange.variables, *self._accumulators]

    def _own_state(self) -> dict[str, keras.Variable]:
        exchange = self.exchange
        if not exchange.built:
            return {}
        return {
            "step": exchange.step,
            "skipped_steps": exchange.skipped_steps,
            "unsent": exchange.unsent,
            **{
                f"{name}_{i}": variable
                for name, variables in exchange.state.items()
                for i, variable in enumerate(variables)
            },
            **{f"accumulator_{i}": variable for i, variable in enumerate(self._accumulators)},
        }

    @property
    def iterations(self) -> Any:
        """The inner optimizer's."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def loss_scale_factor(self) -> float | None:
        """The inner optimizer's."""
        return self.inner_optimizer.loss_scale_factor if hasattr(self, "inner_optimizer") else None

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        if hasattr(self, "inner_optimizer"):  # the base class sets its own before there is one
            self.inner_optimizer.loss_scale_factor = factor

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """The inner optimizer's."""
        return self.inner_optimizer.scale_loss(loss)

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """The inner optimizer's."""
        self.inner_optimizer.exclude_from_weight_decay(*args, **kwargs)

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """The inner optimizer's."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def save_own_variables(self, store: Any) -> None:
        """Saves the exchange's state; Keras saves the inner optimizer next to it."""
        for name, variable in self._own_state().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads the exchange's state, or a checkpoint of the inner optimizer when used unwrapped.

        What the checkpoint does not have, such as residuals, starts at zero. What it has and this
        compressor does not keep is not loaded, and the log says so.
        """
        names, state = set(store.keys()), self._own_state()
        if "0" in names:
            self.inner_optimizer.load_own_variables(store)
            names = set()
        taken = names & set(state)
        if (f"{SECOND_MOMENT}_0" in names) != (f"{SECOND_MOMENT}_0" in state):
            # Divided gradients are of another size.
            taken = {name for name in taken if not name.startswith(RESIDUAL)}
        if state and names - taken:
            left = {name.rpartition("_")[0] for name in names - taken}
            _LOG.warning(_NOT_KEPT, self.compressor, ", ".join(sorted(left)))
        for name, variable in state.items():
            variable.assign(store[name] if name in taken else np.zeros(variable.shape))

    def get_config(self) -> dict[str, Any]:
        """The config, for `from_config` and Keras' saving."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "compressor": compressors.serialize(self.compressor),
            "policy": self.exchange.policy.get_config(),
            "precondition": self.precondition,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> CompressedOptimizer:
        """The optimizer that `get_config` described."""
        inner = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        policy = Policy(**config["policy"])
        return cls(
            inner,
            config["compressor"],
            policy=policy,
            precondition=config["precondition"],
            name=config["name"],
        )


def _checked_inner(
    inner: keras.optimizers.Optimizer | Mapping[str, Any] | str,
) -> keras.optimizers.Optimizer:
    if not isinstance(inner, (keras.optimizers.Optimizer, Mapping, str)):
        raise TypeError(
            "CompressedOptimizer: expected a Keras 3 optimizer such as keras.optimizers.Adam(), "
            f"its config or its name; received {inner!r}."
        )
    optimizer = keras.optimizers.get(dict(inner) if isinstance(inner, Mapping) else inner)
    inside = optimizer
    if isinstance(inside, keras.optimizers.LossScaleOptimizer):
        inside = inside.inner_optimizer
    if isinstance(inside, CompressedOptimizer):
        raise ValueError(
            "CompressedOptimizer: the inner optimizer is compressed already; wrap it once."
        )
    return optimizer


def _facts(label: str, optimizer: keras.optimizers.Optimizer) -> dict[str, str]:
    """An optimizer's settings, as text that is the same on all workers with the same program."""
    settings = {"class": type(optimizer).__name__, **optimizer.get_config()}
    facts = {
        f"{label}'s {name}": json.dumps(
            keras.saving.serialize_keras_object(value),
            sort_keys=True,
            default=lambda other: type(other).__name__,
        )
        for name, value in settings.items()
        if name not in ("name", "inner_optimizer")  # names have numbers, counted by each process
    }
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        facts |= _facts("loss-scaled optimizer", optimizer.inner_optimizer)
    return facts


def _check_current_strategy() -> None:
    strategy = tf.distribute.get_strategy()
    check_strategy(strategy)
    if getattr(strategy, "compressor", None) is not None:
        raise ValueError(
            "A compressor is set on both the strategy and the optimizer, and gradients would be "
            "compressed twice; give it to one: MultiWorkerMirroredStrategy(compressor=None), or "
            "the optimizer without CompressedOptimizer."
        )


def _check_created_in_scope(step_counter: keras.Variable) -> None:
    extended = tf.distribute.get_strategy().extended
    if not extended.variable_created_in_scope(step_counter.value):
        raise ValueError(
            "CompressedOptimizer: the inner optimizer was created outside of the strategy's scope, "
            "and replicas would share its state; create it inside `with strategy.scope():`."
        )


def _given(variables: Sequence[keras.Variable] | None) -> Sequence[keras.Variable]:
    if variables is None:
        raise ValueError(
            "CompressedOptimizer: gradients were given without variables before the optimizer was "
            "built; call optimizer.build(variables) first."
        )
    return variables


def _check_one_for_each(grads: Sequence[Any], variables: Sequence[Any]) -> None:
    if len(grads) != len(variables):
        raise ValueError(
            f"CompressedOptimizer: received {len(grads)} gradients for {len(variables)} variables; "
            "expected one gradient, or None, for each variable."
        )


def _checked_replica_context() -> tf.distribute.ReplicaContext:
    context = tf.distribute.get_replica_context()
    if context is None:
        raise ValueError("apply() must be called in a replica context, inside strategy.run.")
    return context


def _accumulator(variable: keras.Variable) -> keras.Variable:
    return keras.Variable(
        keras.initializers.Zeros(),
        shape=variable.shape,
        dtype=variable.dtype,
        trainable=False,
        synchronization="on_read",
        aggregation="sum",
        name=f"{variable.path.replace('/', '_')}_accumulator",
    )


def _constrain(variables: Sequence[keras.Variable]) -> None:
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))


def _divided(gradient: Gradient, scale: keras.Variable) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        values = _divided(gradient.values, scale)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(scale.value, gradient.dtype)


def _update_loss_scale(scaler: keras.optimizers.LossScaleOptimizer, finite: tf.Tensor) -> None:
    """Keras' rule, decided by what all replicas saw: halve, count, or double in time."""
    scale, counter = scaler.dynamic_scale, scaler.step_counter
    grows = tf.equal(counter.value, scaler.dynamic_growth_steps - 1)
    factor = tf.where(finite, tf.where(grows, 2.0, 1.0), 0.5)
    scale.assign(scale.value * factor)
    counts = tf.logical_and(finite, tf.logical_not(grows))
    counter.assign(tf.where(counts, counter.value + 1, 0))


def _is_compressed(optimizer: Any) -> bool:
    return isinstance(optimizer, CompressedOptimizer) and not optimizer.passes_through()


_private.on_loss_scaled_apply(
    _is_compressed,
    lambda scaler, grads, variables: scaler.inner_optimizer.apply_scaled(scaler, grads, variables),
)
