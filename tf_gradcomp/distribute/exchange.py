"""The exchange: the gradients of a step in, the reduced gradients out; and the state it keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_gradcomp import _private
from tf_gradcomp.advice import report
from tf_gradcomp.advice.probe import Candidate, probe
from tf_gradcomp.compressors.base import RESIDUAL, Compressor, Exchanged, ExchangeInputs
from tf_gradcomp.distribute import handshake
from tf_gradcomp.distribute.communicator import Communicator, Sent, converse
from tf_gradcomp.distribute.gradients import (
    all_finite,
    dense,
    gradient_specs,
    native,
    norm,
    path_of,
    plus_residual,
)
from tf_gradcomp.distribute.host_state import OnHost
from tf_gradcomp.distribute.state import state_specs
from tf_gradcomp.distribute.traffic import Traffic, TrafficCounter
from tf_gradcomp.ops import library
from tf_gradcomp.policy import GradientSpec, Policy, checked_policy
from tf_gradcomp.preconditioner import SECOND_MOMENT, AdamState, Preconditioner

Precondition = Callable[[Compressor], Preconditioner | None]

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
        _check_warmup(self.compressor, strategy)
        specs = gradient_specs(variables, self.policy)
        methods = self.compressor.candidates or (self.compressor,)
        candidates = [Candidate(method, precondition(method)) for method in methods]
        self._in_front = _in_front_of_residuals(candidates, specs)
        with tf.init_scope():
            handshake.agree(strategy, {**self._facts(specs), **(facts or {})})
            self._choose(strategy, specs, candidates)
            self.state = _new_state(self.compressor, specs, self._in_front)
            self.step = _state_variable(0, "int64", "exchange_step")
            self.skipped_steps = _state_variable(0, "int64", "skipped_steps")
            self.unsent = _state_variable(False, "bool", "unsent")
            self._traffic = TrafficCounter(len(specs))
        self._strategy = strategy
        self._numbers = _Numbers(variables)
        self.keeps_state = bool(state_specs(self.chosen, specs, self.preconditioner))
        self.specs = specs
        _announce(strategy, self.preconditioner)

    def _choose(
        self,
        strategy: tf.distribute.Strategy,
        specs: Sequence[GradientSpec],
        candidates: Sequence[Candidate],
    ) -> None:
        """All workers alike, for what was measured is equal on all."""
        if strategy.num_replicas_in_sync == 1:
            self.preconditioner = self._in_front
            return
        if not self.compressor.candidates:
            self.chosen, self.preconditioner = candidates[0]
            how = repr(self.chosen)
        else:
            predictions = probe(strategy, specs, candidates).predictions
            exchanges = [prediction.exchange for prediction in predictions]
            self.chosen, self.preconditioner = candidates[exchanges.index(min(exchanges))]
            how = f"{self.chosen!r}, of which the probe predicted: {report.line(predictions)}"
        _LOG.info("%d replicas exchange gradients by %s.", strategy.num_replicas_in_sync, how)

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
        for place, (number, gradient) in enumerate(zip(numbers, gradients, strict=True)):
            if self._stays_sparse(number, gradient):
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
        of_state = {
            name: [self._local(of_all[number], local_replica) for number in numbers]
            for name, of_all in self.state.items()
        }
        if not of_state:
            return list(gradients)
        residuals = of_state.get(RESIDUAL, [])

        def plus_residuals() -> list[tf.Tensor | tf.IndexedSlices]:
            factors = [divisor / self.compressor.residual_scale for _ in variables]
            moments = _totals(of_state.get(SECOND_MOMENT, []), communicator)
            if self._in_front and adam:
                factors = [
                    factor * self._in_front.divisor(moment, adam.updates)
                    for factor, moment in zip(factors, moments, strict=True)
                ]
            sums = list(gradients)
            for i, residual in enumerate(residuals):
                sums[i] = plus_residual(gradients[i], residual * factors[i])
            with tf.control_dependencies(tf.nest.flatten(sums, expand_composites=True)):
                for residual in residuals:
                    residual.assign(tf.zeros(residual.shape))
                if adam:
                    for slot, moment in zip(adam.second_moments, moments, strict=True):
                        self._local(slot, local_replica).assign(tf.cast(moment, slot.dtype))
                self._local(self.unsent, local_replica).assign(False)  # no merge call in a branch
            return sums

        ready = tf.cond(
            self._local(self.unsent, local_replica).read_value(),
            lambda: _finite_on_all(all_finite(gradients), communicator),
            lambda: tf.constant(False),
        )
        return tf.cond(ready, plus_residuals, lambda: list(gradients))

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
        state = {
            name: [self._local(variables[number], local_replica) for number in numbers]
            for name, variables in self.state.items()
        }
        if self.preconditioner and adam:
            self._begin(state[SECOND_MOMENT], adam, communicator.size, local_replica)
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
        second_moments: Sequence[tf.Variable],
        adam: AdamState,
        replicas: int,
        local_replica: int,
    ) -> None:
        """Takes its share of the inner optimizer's, unless replicas have their own already."""

        def take_share() -> None:
            for own, whole in zip(second_moments, adam.second_moments, strict=True):
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


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Refuses strategies whose replicas do not reduce gradients among themselves.

    Raises:
        ValueError: With the reason and the way out.
    """
    refused = (tf.distribute.ParameterServerStrategy, tf.distribute.TPUStrategy)
    if isinstance(strategy, (*refused, tf.distribute.experimental.ParameterServerStrategy)):
        raise ValueError(
            f"Gradient compression does not work under {type(strategy).__name__}, whose replicas "
            "do not exchange gradients with each other over a network; use "
            "gc.MultiWorkerMirroredStrategy, or the optimizer without compression."
        )


def _check_warmup(compressor: Compressor, strategy: tf.distribute.Strategy) -> None:
    if compressor.warmup and not (
        strategy.num_replicas_in_sync == 1 or _private.is_collective(strategy)
    ):
        raise ValueError(
            f"A warm-up needs collectives in a branch, which {type(strategy).__name__} does not "
            "allow; use gc.MultiWorkerMirroredStrategy, or warmup_steps=0."
        )


def _announce(strategy: tf.distribute.Strategy, preconditioner: Preconditioner | None) -> None:
    if strategy.num_replicas_in_sync == 1:
        _LOG.info("One replica: gradients are not exchanged.")
        return
    if preconditioner:
        _LOG.info("Each replica keeps Adam's second moment of its own gradients: %s.", _WHY_LOCAL)
    if any("GPU" in device for device in strategy.extended.worker_devices):
        _LOG.info("Gradients are copied from the GPU to the host for compression.")


def _in_front_of_residuals(
    candidates: Sequence[Candidate], specs: Sequence[GradientSpec]
) -> Preconditioner | None:
    """By what residuals are divided, so that any of the candidates can go on with them."""
    if len(candidates) == 1:
        return candidates[0].preconditioner
    found = set()
    for compressor, preconditioner in candidates:
        if state_specs(compressor, specs):
            found.add(preconditioner)
        elif preconditioner:
            found.update({preconditioner, None})
    if len(found) > 1:
        raise ValueError(
            "Of the candidates, some are preconditioned for Adam and some are not, and could not "
            'go on with each other\'s residuals: use precondition=None, or precondition="auto" '
            "with candidates that send the largest entries or keep no residual."
        )
    return found.pop() if found else None


def _finite_on_all(finite: tf.Tensor, communicator: Communicator | None) -> tf.Tensor:
    if communicator is None:
        return finite
    bad = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(communicator.all_reduce(bad[tf.newaxis])[0], 0)


def _totals(
    of_replica: Sequence[tf.Variable], communicator: Communicator | None
) -> list[tf.Tensor]:
    """The sums over the replicas."""
    if communicator is None or not of_replica:
        return [tf.convert_to_tensor(variable) for variable in of_replica]
    flat = tf.concat([tf.reshape(variable, [-1]) for variable in of_replica], 0)
    sizes = [variable.shape.num_elements() for variable in of_replica]
    parts = tf.split(communicator.all_reduce(flat), sizes)
    return [
        tf.reshape(part, variable.shape) for part, variable in zip(parts, of_replica, strict=True)
    ]


class _Numbers:
    """Which place a variable has, by identity: a plain object, which `tf.Module` does not track."""

    def __init__(self, variables: Sequence[keras.Variable | tf.Variable]) -> None:
        self._variables = [native(variable) for variable in variables]  # keeps the ids taken
        self._numbers = {id(variable): i for i, variable in enumerate(self._variables)}

    def get(self, variable: keras.Variable | tf.Variable) -> int | None:
        return self._numbers.get(id(native(variable)))


def _state_variable(initial: Any, dtype: str, name: str) -> keras.Variable:
    return keras.Variable(
        initial, dtype=dtype, trainable=False, aggregation="only_first_replica", name=name
    )


def _new_state(
    compressor: Compressor,
    specs: Sequence[GradientSpec],
    preconditioner: Preconditioner | None,
) -> dict[str, list[keras.Variable]]:
    return {
        name: [
            keras.Variable(
                keras.initializers.Zeros(),
                shape=of_one.shape,
                dtype="float32",
                trainable=False,
                synchronization="on_read",
                aggregation="only_first_replica" if of_one.shared else "sum",
                name=f"{spec.path.replace('/', '_')}_{name}",
            )
            for of_one, spec in zip(of_all, specs, strict=True)
        ]
        for name, of_all in state_specs(compressor, specs, preconditioner).items()
    }


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
