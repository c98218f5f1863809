"""The exchange: the gradients of a step in, the reduced gradients out; and the state it keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gradcomp import _private
from tf_gradcomp.compressors.base import RESIDUAL, Compressor, Exchanged, ExchangeInputs
from tf_gradcomp.distribute import handshake
from tf_gradcomp.distribute.choice import (
    Precondition,
    candidates_of,
    choose,
    in_front_of_residuals,
)
from tf_gradcomp.distribute.communicator import Communicator, Sent, converse
from tf_gradcomp.distribute.gradients import (
    all_finite,
    dense,
    gradient_specs,
    native,
    norm,
    path_of,
)
from tf_gradcomp.distribute.host_state import OnHost
from tf_gradcomp.distribute.leftovers import Leftovers
from tf_gradcomp.distribute.padded_gather import WordsAhead
from tf_gradcomp.distribute.state import new_variables, shared_variable, state_specs
from tf_gradcomp.distribute.supported import check_strategy, check_warmup
from tf_gradcomp.distribute.traffic import Traffic, TrafficCounter
from tf_gradcomp.ops import library
from tf_gradcomp.policy import GradientSpec, Policy, checked_policy
from tf_gradcomp.preconditioner import AdamState, Preconditioner

_LOG = tf.get_logger()  # beside TensorFlow's own messages about the strategy
_WHY_LOCAL = "what is compressed is divided by its root (precondition=None leaves it to Adam)"


class GradientExchange(tf.Module):
    """A compressor at work on the gradients of given variables, with its residuals.

    Both doors use it: `CompressedOptimizer` has one of its own, and `CompressedAllReduce` has the
    strategy's. Its variables are ordinary ones: each replica has its own residual, a checkpoint
    holds their sum, and each of N replicas gets 1/N of it back.

    Attributes:
        compressor: As it was given.
        chosen: What exchanges: that, or which of its candidates it chose when it was built.
        preconditioner: In front of the chosen one, if any.
        keeps_state: Whether these two leave anything for later steps.
        specs: Of the gradients.
        state: What all candidates keep, by name, in the order of `specs`.
    """

    def __init__(self, compressor: Compressor, policy: Policy | None = None) -> None:
        super().__init__(name="gradient_exchange")
        library.load()  # what is wrong with it shows now, and not in the first step
        self.compressor = self.chosen = compressor
        self.policy = checked_policy(policy)
        self.preconditioner: Preconditioner | None = None
        self.specs: list[GradientSpec] = []
        self.state: dict[str, list[keras.Variable]] = {}

    @property
    def built(self) -> bool:
        """Whether the state exists."""
        return bool(self.specs)

    def build(
        self,
        variables: Sequence[keras.Variable | tf.Variable],
        facts: Mapping[str, Any] | None = None,
        precondition: Precondition = lambda compressor: None,
    ) -> None:
        """Creates the state for the gradients of `variables`; a second call does nothing.

        Args:
            variables: All variables whose gradients will be exchanged.
            facts: What else all workers must have alike, by name; JSON-serializable.
            precondition: What is in front of a method, if anything; then `reduce` needs an
                `AdamState`.

        Raises:
            ValueError: If a variable's dtype, the strategy, or a choice among these candidates is
                not supported.
            WorkersDisagreeError: If the workers have other variables or settings.
        """
        if self.built:
            return
        strategy = tf.distribute.get_strategy()
        check_strategy(strategy)
        check_warmup(self.compressor, strategy)
        specs = gradient_specs(variables, self.policy)
        candidates = candidates_of(self.compressor, precondition)
        self._in_front = self.preconditioner = in_front_of_residuals(candidates, specs)
        with tf.init_scope():
            handshake.agree(strategy, {**self._facts(specs), **(facts or {})})
            if strategy.num_replicas_in_sync > 1:
                self.chosen, self.preconditioner = choose(strategy, candidates, specs)
            self.state = new_variables(self.compressor, specs, self._in_front)
            self.step = shared_variable(0, "int64", "exchange_step")
            self.skipped_steps = shared_variable(0, "int64", "skipped_steps")
            self.unsent = shared_variable(False, "bool", "unsent")
            self._traffic = TrafficCounter(len(specs))
            self._ahead = WordsAhead() if _private.is_one_collective_replica(strategy) else None
        self._strategy = strategy
        self._numbers = _Numbers(variables)
        self.keeps_state = bool(state_specs(self.chosen, specs, self.preconditioner))
        self.specs = specs
        _announce(strategy, self.preconditioner)

    def knows(self, variables: Sequence[keras.Variable | tf.Variable]) -> bool:
        """Whether it was built for all of `variables`."""
        return self.built and all(self._numbers.get(v) is not None for v in variables)

    @property
    def variables(self) -> list[keras.Variable]:
        """What a checkpoint holds: counters, then the state by name, in the order of `specs`."""
        if not self.built:
            return []
        state = itertools.chain.from_iterable(self.state.values())
        return [self.step, self.skipped_steps, self.unsent, *state]

    @property
    def residuals(self) -> list[keras.Variable]:
        """What is not yet sent, in the order of `specs`; empty if the method keeps nothing."""
        return self.state.get(RESIDUAL, [])

    def reduce(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        variables: Sequence[keras.Variable | tf.Variable],
        communicator: Communicator,
        local_replica: int,
        all_reduce_slices: Callable[[tf.IndexedSlices], tf.IndexedSlices],
        adam: AdamState | None = None,
    ) -> tuple[list[tf.Tensor | tf.IndexedSlices], tf.Tensor]:
        """One replica's side of a step; every replica calls it for the same variables.

        Args:
            gradients: One for each of `variables`, in their shapes and dtypes.
            variables: Some or all of those it was built for.
            communicator: A fresh one, which reaches the other replicas.
            local_replica: Which of this process's replicas this is.
            all_reduce_slices: Sums over the replicas, uncompressed, what the policy leaves sparse.
            adam: For the preconditioner: what the inner optimizer of `variables` is at.

        Returns:
            The gradients summed over the replicas, in the dtypes they came in, and a bool scalar
            that is equal on all replicas: where it is false, the step must be skipped.

        Raises:
            ValueError: If it was not built for one of `variables`, or XLA is to compile the step.
        """
        if _private.in_xla():
            raise ValueError(
                "Compressed gradients cannot be exchanged in code that XLA compiles; use "
                "jit_compile=False in model.compile or tf.function."
            )
        self.check_scope()
        numbers = [self._number(variable) for variable in variables]
        if self.state and not self.keeps_state:
            gradients = self.flush(gradients, variables, 1.0, adam, communicator, local_replica)
        reduced: list[tf.Tensor | tf.IndexedSlices] = list(gradients)
        finite = tf.constant(True)
        dense_places = []
        slices: dict[int, tf.IndexedSlices] = {}
        for place, (number, gradient) in enumerate(zip(numbers, gradients, strict=True)):
            if self._stays_sparse(number, gradient):
                slices[number] = gradient
                reduced[place] = all_reduce_slices(gradient)
                finite &= tf.reduce_all(tf.math.is_finite(reduced[place].values))
            else:
                dense_places.append(place)
        if dense_places:
            whole = [dense(gradients[place]) for place in dense_places]
            exchanged = self._exchange(
                [numbers[place] for place in dense_places],
                whole,
                finite,
                communicator,
                local_replica,
                adam and adam.of(dense_places),
            )
            finite = exchanged.finite
            for place, gradient, total in zip(dense_places, whole, exchanged.reduced, strict=True):
                reduced[place] = tf.cast(total, gradient.dtype)
                if gradient.dtype == tf.float16:  # the sum is float32, and may not fit
                    finite &= all_finite([reduced[place]])
        if slices:
            self._traffic.add_slices(
                self._local(self._traffic.totals, local_replica),
                slices,
                sum(4 * self.specs[number].elements for number in slices),
                communicator.size,
                counted=bool(dense_places),
            )
        self._count_step(finite)
        return reduced, finite

    def flush(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        variables: Sequence[keras.Variable | tf.Variable],
        divisor: tf.Tensor | float = 1.0,
        adam: AdamState | None = None,
        communicator: Communicator | None = None,
        local_replica: int = 0,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """The gradients, plus what an earlier job left unsent: for a replica that keeps nothing.

        That is the only one of a job, or one whose method has no residual.

        Args:
            gradients: One for each of `variables`. Where one is not finite, on any replica, nothing
                is added yet, for the step may be skipped.
            variables: Some or all of those it was built for.
            divisor: What the gradients will be divided by, such as a loss scale.
            adam: For the preconditioner: of `variables`; it is given back its second moments.
            communicator: Reaches the other replicas; None if there are none.
            local_replica: Which of this process's replicas this is.
        """
        numbers = [self._number(variable) for variable in variables]
        if not self.state:
            return list(gradients)
        state = self._local_state(numbers, local_replica)
        leftovers = Leftovers(
            state.get(RESIDUAL, []),
            {name: state[name] for name in adam.moments} if adam else {},
            self._local(self.unsent, local_replica),
            self.compressor.residual_scale,
            self._in_front,
        )
        if adam:
            adam = self._on_replica(adam, local_replica)
        return leftovers.added_to(gradients, divisor, adam, communicator)

    def count_skip(self, finite: tf.Tensor) -> None:
        """Counts a step that is skipped because its gradients are not `finite`."""
        self.skipped_steps.assign_add(tf.cast(tf.logical_not(finite), tf.int64))

    def traffic(self) -> Traffic:
        """What this process's first replica has exchanged since the program started."""
        exchanges, payload, sent, dense, *tensors = self._local(self._traffic.totals, 0).numpy()
        paths = [spec.path for spec in self.specs]
        return Traffic(
            int(exchanges),
            int(payload),
            int(sent),
            int(dense),
            {path: int(n) for path, n in zip(paths, tensors, strict=True)},
        )

    def residual_norm(self) -> float:
        """The Euclidean norm of the residuals of this process's first replica; 0 without any."""
        return norm([self._local(r, 0).read_value() for r in self.residuals])

    def _exchange(
        self,
        numbers: Sequence[int],
        gradients: Sequence[tf.Tensor],
        finite: tf.Tensor,
        communicator: Communicator,
        local_replica: int,
        adam: AdamState | None,
    ) -> Exchanged:
        specs = [self.specs[number] for number in numbers]
        state = self._local_state(numbers, local_replica)
        if self.preconditioner and adam:
            self._begin(state, adam, communicator.size, local_replica)
        if self._ahead:
            communicator.ahead = self._local(self._ahead.words, local_replica)
        with OnHost(state) as handles:
            second_moments = None
            if self.preconditioner and adam:
                second_moments = self.preconditioner.second_moments(
                    handles, adam.updates, communicator.size
                )
            inputs = ExchangeInputs(
                specs,
                gradients,
                handles,
                self._local(self.step, local_replica).read_value(),
                finite,
                communicator.rank,
                communicator.size,
                second_moments,
            )
            exchanged, sent = _exchange_by(self.chosen, inputs, communicator)
        self._traffic.add(
            self._local(self._traffic.totals, local_replica),
            sent,
            sum(4 * spec.elements for spec in specs),
            numbers,
            exchanged.tensor_bytes,
        )
        return exchanged

    def _begin(
        self,
        state: Mapping[str, Sequence[tf.Variable]],
        adam: AdamState,
        replicas: int,
        local_replica: int,
    ) -> None:
        """Takes its share of the inner optimizer's, unless replicas have their own already."""

        def take_share() -> None:
            for name, slots in adam.moments.items():
                for own, whole in zip(state[name], slots, strict=True):
                    own.assign(tf.cast(whole.value, tf.float32) / replicas)

        exchanged_before = self._local(self.unsent, local_replica).read_value()
        tf.cond(exchanged_before, lambda: None, take_share)

    def _count_step(self, finite: tf.Tensor) -> None:
        self.step.assign_add(1)
        self.count_skip(finite)
        if self.keeps_state or not self.state:  # otherwise `flush` knows whether it has sent all
            self.unsent.assign(self.keeps_state)

    def _local(self, variable: keras.Variable | tf.Variable, local_replica: int) -> tf.Variable:
        return self._strategy.experimental_local_results(native(variable))[local_replica]

    def _on_replica(self, adam: AdamState, local_replica: int) -> AdamState:
        moments = {
            name: [self._local(slot, local_replica) for slot in slots]
            for name, slots in adam.moments.items()
        }
        return AdamState(adam.updates, moments)

    def _local_state(
        self, numbers: Sequence[int], local_replica: int
    ) -> dict[str, list[tf.Variable]]:
        return {
            name: [self._local(variables[number], local_replica) for number in numbers]
            for name, variables in self.state.items()
        }

    def _facts(self, specs: Sequence[GradientSpec]) -> dict[str, Any]:
        return {
            **handshake.package_versions(),
            "compressor": repr(self.compressor),
            "max_dense_elements": self.policy.max_dense_elements,
            "number of variables": len(specs),
            **{f"variable {i}": str(spec) for i, spec in enumerate(specs)},
        }

    def _number(self, variable: keras.Variable | tf.Variable) -> int:
        number = self._numbers.get(variable)
        if number is None:
            raise ValueError(
                f"Variable {path_of(variable)!r} is not among those whose gradients are exchanged: "
                f"{', '.join(spec.path for spec in self.specs)}. Build the optimizer with all "
                "variables that it will be given, or use another one for this variable."
            )
        return number

    def check_scope(self) -> None:
        """Refuses to run under another strategy than it was built under.

        Raises:
            ValueError: If it does.
        """
        if tf.distribute.get_strategy() is not self._strategy:
            raise ValueError(
                "The exchange of gradients was built outside of the scope of the strategy that "
                "runs it; build the optimizer inside `with strategy.scope():`."
            )

    def _stays_sparse(self, number: int, gradient: tf.Tensor | tf.IndexedSlices) -> bool:
        large = self.specs[number].elements > self.policy.max_dense_elements
        return large and isinstance(gradient, tf.IndexedSlices)


def _announce(strategy: tf.distribute.Strategy, preconditioner: Preconditioner | None) -> None:
    if strategy.num_replicas_in_sync == 1:
        _LOG.info("One replica: gradients are not exchanged.")
        return
    if preconditioner:
        _LOG.info("Each replica keeps Adam's second moment of its own gradients: %s.", _WHY_LOCAL)
    if any("GPU" in device for device in strategy.extended.worker_devices):
        _LOG.info("Gradients are copied from the GPU to the host for compression.")


class _Numbers:
    """Which place a variable has, by identity: a plain object, which `tf.Module` does not track."""

    def __init__(self, variables: Sequence[keras.Variable | tf.Variable]) -> None:
        self._variables = [native(variable) for variable in variables]  # keeps the ids taken
        self._numbers = {id(variable): i for i, variable in enumerate(self._variables)}

    def get(self, variable: keras.Variable | tf.Variable) -> int | None:
        return self._numbers.get(id(native(variable)))


def _exchange_by(
    compressor: Compressor, inputs: ExchangeInputs, communicator: Communicator
) -> tuple[Exchanged, Sent]:
    """One replica's side of a step, by the method or its warm-up: all replicas know the step."""
    if not compressor.warmup:
        return converse(compressor.conversation(inputs), communicator)
    return tf.cond(
        inputs.step < compressor.warmup_steps,
        lambda: _exchange_by(compressor.warmup, inputs, communicator),
        lambda: converse(compressor.conversation(inputs), communicator),
    )
