"""`CompressedOptimizer`: exchanges gradients compressed, then lets a Keras optimizer apply them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tf_gradcomp.exchange.gradients import (
    all_finite,
    as_tensors,
    check_created_in_scope,
    check_no_overwriting,
    check_same_length,
    check_variables_passed,
    native,
)
from tf_gradcomp.exchange.step import count_skip
from tf_gradcomp.groups.current import check_not_single_by_mistake, checked_replica_context
from tf_gradcomp.keras.common import equality, saved_state
from tf_gradcomp.keras.common.compressed import Compressed, Gradient
from tf_gradcomp.keras.common.inner import check_set_on_inner, in_loss_scaler
from tf_gradcomp.keras.common.saved_state import check_built, check_shapes
from tf_gradcomp.keras.keras3 import steps
from tf_gradcomp.keras.keras3.accumulation import Accumulated, Accumulation
from tf_gradcomp.keras.local.gossip import new_rounds
from tf_gradcomp.keras.local.local_steps import LocalSteps
from tf_gradcomp.private import keras3 as keras_private


@keras.saving.register_keras_serializable(package="tf_gradcomp")
class CompressedOptimizer(Compressed, keras.optimizers.Optimizer):
    """Wraps a Keras optimizer; the replicas of a job exchange its gradients compressed.

    Works under `gc.MultiWorkerMirroredStrategy` and Horovod in `fit` and in training loops, and
    under TensorFlow's own `MultiWorkerMirroredStrategy` and `MirroredStrategy` in training loops.
    With one replica, it equals the inner optimizer, bit for bit. Under a strategy, Keras itself
    cannot accumulate gradients or average weights. With such settings and a strategy of one
    replica, it equals the inner optimizer without a strategy, and skips non-finite steps.

    - Everything is set on the inner optimizer: learning rate and schedule, weight decay, EMA, and
      clipping. Clipping acts on the reduced gradient, as on one worker. However, if `precondition`
      divides gradients, clipping acts on each replica's own gradient before the division.
    - With the inner optimizer's `gradient_accumulation_steps`, each replica accumulates its own
      gradients, and replicas exchange on update steps.
    - If any replica's gradient is not finite, all replicas skip the step: the optimizer is not
      called, the bad gradient is discarded, and finite gradients wait for the next step.
    - `LossScaleOptimizer` may be around it (Keras puts it there under `mixed_float16`) or inside;
      the loss scale follows the gradients of all replicas, and residuals are in unscaled units.
    - If workers have several replicas (GPUs), each worker's replicas first sum their gradients, and
      workers exchange the sums; `gc.MultiWorkerMirroredStrategy(two_level=False)` prevents it.
    - Residuals are saved with the model, as their sum over the replicas: see docs/checkpoints.md.

    Args:
        inner_optimizer: A Keras 3 optimizer, its config (`keras.optimizers.serialize`) or its name.
        compressor: A compressor, its name or its config: see `gc.compressors.get`.
        policy: The layer kind of each variable; by default `gc.Policy()` with its documented rules.
        precondition: `"local"`: each replica keeps Adam's second moment of its own gradients, and
            divides them by its root before compression. The inner optimizer applies the sum, and
            bypasses its momentum for delayed entries. For Adam, AdamW, Nadam and Lamb. None: the
            inner optimizer gets the sum of the gradients. With Adam, sparse methods then make the
            steps of early training too short. `"auto"`: like `"local"` if the inner optimizer
            allows it and the method trains better with it; otherwise like None.
        name: The optimizer's name.
        group: The replicas that exchange gradients. By default, the replicas of the strategy in
            scope. `"horovod"`: the processes of a Horovod job, without any strategy, after
            `hvd.init()`. For some of these processes, pass `gc.HorovodGroup(process_set)`. See
            docs/horovod.md.
        reduction: Whether the inner optimizer gets the sum or the mean of the replicas' gradients.
            `"sum"` is for a loss that is divided by the number of replicas, like Keras' own losses
            under a strategy. `"mean"` is for a loss that is a mean over the rows of its replica, as
            in programs for PyTorch's DDP. None: the sum under a strategy, the mean under Horovod.
        local_steps: The number of steps that each worker takes on its own weights before the
            workers exchange the changes of their weights; or a `gc.LocalSteps` or `gc.Gossip` with
            further settings. None: the workers exchange gradients in each step. See
            docs/local_steps.md.

    Raises:
        ImportError: If Horovod is requested, but not installed.
        TypeError: If `inner_optimizer` is not a Keras optimizer, or `policy` is not a `gc.Policy`.
        ValueError: If it is wrapped twice, an argument is unknown, the inner optimizer cannot be
            preconditioned as requested, the current strategy has its own compressor or does not
            exchange gradients, or Horovod is requested and cannot be used.

    Example:
        ```python
        with gc.MultiWorkerMirroredStrategy().scope():
            model = build_model()
            model.compile(optimizer=gc.CompressedOptimizer(keras.optimizers.Adam()), loss="mse")
        ```
    """

    # Keras 3's own function does not find Lamb under the name that it wrote.
    _deserialized = staticmethod(keras.saving.deserialize_keras_object)

    _base_settings: ClassVar[Mapping[str, Any]] = {"learning_rate": 0.0}
    _accepted = keras.optimizers.Optimizer

    def _set_up_keras(self) -> None:
        self._accumulation: Accumulation | None = None
        self._loaded_by_scaler = False
        self._inside_loss_scaler = False
        self._initial_attributes = frozenset(vars(self))

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the inner optimizer's state and, for several replicas, the exchange's state.

        Raises:
            ValueError: If a variable cannot be compressed.
            WorkersDisagreeError: If the workers have different variables or settings.
        """
        if self.built:
            return
        variables = list(variables)
        self._check_scope(variables, keras_private.step_counter(self._core))
        check_no_overwriting(variables, self.group.size)
        super().build(variables)
        self._build_exchange(variables)
        # There are two sets of accumulators, so that checkpoints fit any number of replicas.
        equality.build_optimizer(self.group, self.inner_optimizer, variables)
        keras_private.decay_in_updates(self._core)
        steps = self._core.gradient_accumulation_steps
        if steps:
            inner = keras_private.accumulators(self._core)
            replicas = self.group.all_replicas
            accumulation = Accumulation(variables, steps, self._index_of, inner, replicas)
            counters = [Accumulated(native(keras_private.step_counter(self._core)), steps)]
            sums = accumulation.accumulators
            self.exchange.saving.register(sums, counters, group=replicas)
            self._accumulation = accumulation  # from now on, a checkpoint may restore it
        self._take_moments()
        if self.local_steps:
            self._build_rounds(self.local_steps, variables)

    def _build_rounds(self, settings: LocalSteps, variables: Sequence[keras.Variable]) -> None:
        if not self.passes_through():
            steps.check_no_constraints(variables)
        outer = self.outer_optimizer
        if outer is not None:
            if not self.passes_through():
                check_created_in_scope(keras_private.step_counter(outer), "outer")
            equality.build_optimizer(self.group, outer, variables)
        units = self._residual_units
        self.rounds = new_rounds(settings, self.exchange, units, variables, self)

    # The next methods are those of `LocalOptimizer`, which rounds call.

    def update_common(
        self,
        strategy: tf.distribute.Strategy,
        means: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> None:
        """Lets the outer optimizer apply mean pseudo-gradients."""
        outer: Any = self.outer_optimizer
        with keras_private.applying_at_once(outer):
            strategy.extended.call_for_each_replica(outer.apply, args=(means, variables))

    def inner_slots(self) -> Sequence[Any]:
        """Returns all variables of the inner optimizer."""
        return keras_private.state_variables(self._core)

    def inner_updates(self) -> tf.Tensor:
        """Returns the inner optimizer's number of updates, on a replica of the process: int64."""
        return steps.updates(self._core, self.group)

    def _index_of(self, variable: keras.Variable) -> int:
        return keras_private.variable_index(self, variable)

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
        scaler: keras.optimizers.LossScaleOptimizer | None = None,
    ) -> None:
        """Exchanges the gradients of this replica and applies their sum over the replicas.

        Args:
            grads: One for each variable; None for no gradient, equally on all replicas.
            trainable_variables: By default, the variables that the optimizer was built with.
            scaler: A loss scaler around this optimizer; by default the scaler inside, if any.

        Raises:
            ValueError: If it is not called in a replica context, XLA is to compile it, or there is
                no strategy although the process is one of several.
        """
        if scaler is None and self._applying_optimizer is not self._core:
            scaler = self._applying_optimizer
        context = checked_replica_context()
        check_not_single_by_mistake(self.group)
        if not self.built:
            self.build(check_variables_passed(trainable_variables))
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        check_same_length(grads, trainable_variables)
        made_with = self._initial_attributes if type(self) is CompressedOptimizer else vars(self)
        check_set_on_inner(self, in_loss_scaler(self.inner_optimizer), made_with)
        if not grads:
            return
        grads, variables = self._filter_empty_gradients(list(grads), list(trainable_variables))
        self.exchange.indices.check(variables)
        grads = [as_tensors(g, v) for g, v in zip(grads, variables, strict=True)]
        if self.rounds and self.group.size == 1:
            self.rounds.apply_residuals()
            self.rounds.count_step(counts=steps.is_update(self._core))
        if self.passes_through():
            if self._accumulation:
                self._accumulation.move_to_inner()
            if scaler is not None:
                count_skip(self.exchange.skipped_steps, all_finite(grads))
            inner = self.inner_state(variables)
            grads = self.exchange.flush(grads, variables, self._divisor(scaler), inner)
            self._applying_optimizer.apply(grads, variables)
            return
        self.exchange.group.check_current()
        grads = steps.unscaled(grads, scaler, self._core.loss_scale_factor)
        grads = self._shares(grads)
        # Not before the gradients exist: at the end of the data, an error ends the step.
        # Without the group, each op would depend on each gradient.
        with tf.control_dependencies([tf.group(*tf.nest.flatten(grads, expand_composites=True))]):
            across = self._accumulate if self._accumulation else self._step
            context.merge_call(across, args=(scaler, list(grads), list(variables)))

    @tf.autograph.experimental.do_not_convert
    def apply_scaled(
        self,
        scaler: keras.optimizers.LossScaleOptimizer,
        grads: Sequence[Gradient | None],
        trainable_variables: Sequence[keras.Variable] | None,
        original: Callable[..., None],
    ) -> None:
        """Like `apply`, and also updates the loss scaler around this optimizer.

        If there is another one inside, it is left out: the loss was not multiplied by its scale.

        Args:
            scaler: The loss scaler.
            grads: As for `apply`.
            trainable_variables: As for `apply`.
            original: The loss scaler's own function, for other optimizers.
        """
        if not scaler.built:
            scaler.build(list(check_variables_passed(trainable_variables)))
        if not self.passes_through():
            CompressedOptimizer.apply(self, grads, trainable_variables, scaler)
            return
        count_skip(self.exchange.skipped_steps, all_finite([g for g in grads if g is not None]))
        self._inside_loss_scaler = True
        try:
            original(grads, trainable_variables)
        finally:
            self._inside_loss_scaler = False

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient | None, keras.Variable]]
    ) -> keras.Variable:
        """Applies pairs of gradients and variables, like `apply`; returns `iterations`."""
        super().apply_gradients(grads_and_vars)
        return self.iterations

    def passes_through(self) -> bool:
        """Whether the inner optimizer runs unchanged: with one replica, if possible.

        No strategy, whatever its size, allows Keras' own branches for accumulation and averaging.
        """
        branches = self._core.gradient_accumulation_steps or self._core.ema_overwrite_frequency
        is_single = self.group.size == 1
        return is_single and not (branches and tf.distribute.has_strategy())

    def _divisor(self, scaler: keras.optimizers.LossScaleOptimizer | None) -> Any:
        """Returns the divisor that the inner optimizer applies to a gradient before use."""
        divisor = (self._core.gradient_accumulation_steps or 1) * (
            self._core.loss_scale_factor or 1.0
        )
        return divisor if scaler is None else divisor * scaler.dynamic_scale.value

    # The next two methods run across replicas, because only there may branches update variables.

    def _accumulate(
        self,
        strategy: tf.distribute.Strategy,
        scaler: keras.optimizers.LossScaleOptimizer | None,
        grads: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> None:
        accumulation: Any = self._accumulation
        accumulation.take(strategy)
        each_replica = strategy.extended.call_for_each_replica
        counter = keras_private.step_counter(self._core)

        def update() -> None:
            means = each_replica(accumulation.take_means, args=(grads, variables))
            self._step(strategy, scaler, means, variables)

        def accumulate() -> None:
            each_replica(accumulation.add, args=(grads, variables))
            # Keras averages and constrains weights on these steps, too.
            each_replica(keras_private.update_averages, args=(self._core,))
            constrain = functools.partial(each_replica, steps.constrain, args=(variables,))
            self._overwrite_by_averages(strategy, self._core.iterations + 1, constrain)
            counter.assign_add(1)

        tf.cond(steps.is_update(self._core), update, accumulate)

    @property
    def _step(self) -> Callable[..., None]:
        if self.rounds is None or self.group.size == 1:
            return self._exchange_and_apply
        return functools.partial(steps.step, self.rounds, self._core, self._exchange_and_apply)

    def _exchange_and_apply(
        self,
        strategy: tf.distribute.Strategy,
        scaler: keras.optimizers.LossScaleOptimizer | None,
        grads: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> None:
        each_replica = strategy.extended.call_for_each_replica
        reduce = self._reduction_of(variables)
        reduced, finite, *_ = self.group.each_replica(reduce, args=(grads,))
        finite = strategy.experimental_local_results(finite)[0]

        def update() -> None:
            with keras_private.applying_at_once(self._core), self._applying(variables):
                each_replica(self._core.apply, args=(reduced, variables))
            self._overwrite_by_averages(strategy, self._core.iterations)

        tf.cond(finite, update, lambda: steps.restart_accumulation(self._core))
        if scaler is not None:
            steps.update_loss_scale(scaler, finite)

    @property
    def trained_variables(self) -> Sequence[keras.Variable]:
        return self._trainable_variables

    @property
    def _inner_variables(self) -> Sequence[keras.Variable]:
        return self.inner_optimizer.variables

    def _overwrite_by_averages(self, strategy: tf.distribute.Strategy, *arguments: Any) -> None:
        steps.overwrite_if_due(strategy, self._core, self._trainable_variables, *arguments)

    @property
    def variables(self) -> list[keras.Variable]:
        """The inner optimizer's variables; `exchange.variables` are TensorFlow variables."""
        sums = self._accumulation.accumulators if self._accumulation else []
        outer_variables = self.outer_optimizer.variables if self.outer_optimizer else []
        return [*self.inner_optimizer.variables, *sums, *outer_variables]

    def _exchange_state(self) -> dict[str, Any]:
        sums = self._accumulation.saved if self._accumulation else {}
        return super()._exchange_state() | sums

    @property
    def loss_scale_factor(self) -> float | None:
        """The inner optimizer's static loss scale."""
        return self.inner_optimizer.loss_scale_factor if hasattr(self, "inner_optimizer") else None

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        if hasattr(self, "inner_optimizer"):  # the base class sets it too early
            self.inner_optimizer.loss_scale_factor = factor

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Scales a loss like the inner optimizer."""
        return self.inner_optimizer.scale_loss(loss)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the values of `variables`; the exchange's state, such as residuals, stays unchanged.

        Under Horovod, `variables` has the rank's own accumulated gradients, not sums over the
        ranks, so these values are set unchanged.

        Raises:
            ValueError: If the optimizer is not built, if the number or the shapes of the weights
                differ, or if the exchange's state has second moments that divide gradients.
        """
        check_built(self)
        variables = self.variables
        if len(weights) != len(variables):
            raise ValueError(
                f"CompressedOptimizer has {len(variables)} variables of its inner optimizer; "
                f"received {len(weights)} weights. These weights belong to another optimizer."
            )
        check_shapes(variables, weights)
        if self.exchange.setup.preconditioner:
            raise ValueError(
                "CompressedOptimizer: set_weights cannot set the second moments that divide "
                "gradients, and the inner optimizer's momentum is useless without them. Use "
                "model.save_weights and model.load_weights, which handle both."
            )
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)
        self.exchange.saving.forget()

    def load_without_scaler(self, store: Any) -> None:
        """Loads the exchange's state, if the inner optimizer's state is in this wrapper's place."""
        self.load_own_variables(store)
        self._loaded_by_scaler = True  # the following values belong to the inner optimizer

    def load_own_variables(self, store: Any) -> None:
        """Loads like the base class; refuses momentums that the inner optimizer cannot use."""
        if self.built:
            saved_state.warn_if_empty(store)
        if "0" in store.keys() and self._loaded_by_scaler:  # noqa: SIM118
            self._loaded_by_scaler = False
            self.inner_optimizer.load_own_variables(store)
            return
        if isinstance(self._core, keras.optimizers.Adam) and not self._possible_preconditioner():
            saved_state.check_not_divided(store, self._core)
        super().load_own_variables(store)
