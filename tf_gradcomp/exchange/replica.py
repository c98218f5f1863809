"""The variables of one replica."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.compressors.base import RESIDUAL
from tf_gradcomp.exchange.gradients import Gradients, add_residuals, all_finite
from tf_gradcomp.exchange.setup import Setup
from tf_gradcomp.groups.communicator import Communicator, Sent


class Replica:
    """One replica of this process, which accesses its variables by the places of gradients.

    Args:
        setup: The parts of the exchange.
        numbers: The places, in the setup, of the gradients.
        local_replica: The number of the replica among the replicas of this process.
        communicator: Reaches the other replicas; None outside a step.
    """

    def __init__(
        self,
        setup: Setup,
        numbers: Sequence[int],
        local_replica: int = 0,
        communicator: Communicator | None = None,
    ) -> None:
        self.setup = setup
        self.numbers = list(numbers)
        self._local_replica = local_replica
        self._communicator = communicator

    @classmethod
    def of_all(cls, setup: Setup, local_replica: int = 0) -> Replica:
        """Returns a replica with its state of all gradients, outside a step."""
        return cls(setup, range(len(setup.specs)), local_replica)

    @property
    def communicator(self) -> Communicator:
        """The communicator with the other replicas; raises RuntimeError outside a step."""
        if self._communicator is None:
            raise RuntimeError("A replica exchanges gradients only in a step of several replicas.")
        return self._communicator

    def local(self, variable: tf.Variable) -> tf.Variable:
        """Returns this replica's own variable."""
        return self.setup.group.local(variable, self._local_replica)

    @property
    def exchanges(self) -> int:
        """The number of exchanges so far, with the count of a restored checkpoint."""
        return int(self.local(self.setup.variables.step).numpy())

    def state(self, places: Iterable[int] | None = None) -> dict[str, list[tf.Variable]]:
        """Returns the state of some of the gradients by name; of all by default."""
        numbers = self.numbers if places is None else [self.numbers[place] for place in places]
        return {
            name: [self.local(variables[number]) for number in numbers]
            for name, variables in self.setup.variables.state.items()
        }

    def job_state(self) -> dict[str, tf.Variable]:
        """Returns the state of the job by name."""
        return {name: self.local(v) for name, v in self.setup.variables.job_state.items()}

    def fact(self, fact: tf.Variable, places: Iterable[int] | None = None) -> tf.Tensor:
        """Reads a fact of some of the gradients; of all by default."""
        numbers = self.numbers if places is None else [self.numbers[place] for place in places]
        values = self.local(fact).read_value()
        return values if self._is_every(numbers) else tf.gather(values, numbers)

    def set_fact(self, fact: tf.Variable, values: Any, places: Iterable[int]) -> None:
        """Writes a fact of some of the gradients."""
        local, numbers = self.local(fact), [self.numbers[place] for place in places]
        values = tf.convert_to_tensor(values, local.dtype)
        if not self._is_every(numbers):
            indices = tf.constant([[number] for number in numbers])
            values = tf.tensor_scatter_nd_update(local.read_value(), indices, values)
        local.assign(values)

    def _is_every(self, numbers: Sequence[int]) -> bool:
        """Returns whether these are all gradients in their order, so that nothing is selected."""
        return list(numbers) == list(range(len(self.setup.specs)))

    @property
    def residual_scale(self) -> float:
        """The residuals divided by this are in units of the gradients."""
        return 1.0 if self.setup.residual_scale is None else self.setup.residual_scale

    def residuals_wait(self, places: Sequence[int]) -> tf.Tensor:
        """Returns whether the residuals of some gradients may be nonzero."""
        return tf.reduce_any(self.fact(self.setup.variables.facts.residual_waits, places))

    def add_residuals(
        self, places: Sequence[int], gradients: Gradients, divisor: tf.Tensor | float = 1.0
    ) -> tuple[list[tf.Tensor | tf.IndexedSlices], list[tf.Tensor]]:
        """Adds residuals to the gradients that the compressor does not exchange.

        Returns all gradients; and the new residuals at `places`, for `write_residuals`.
        """
        residuals = self.state(places).get(RESIDUAL, [])
        if not residuals:
            return list(gradients), []
        given = [gradients[place] for place in places]
        wanted = tf.logical_and(self.residuals_wait(places), all_finite(given))
        values = [residual.read_value() for residual in residuals]
        scale, size = self.residual_scale / divisor, self.setup.group.size
        found, left = add_residuals(given, values, wanted, scale, size)
        sums = list(gradients)
        for place, gradient in zip(places, found, strict=True):
            sums[place] = gradient
        return sums, left

    def write_residuals(
        self,
        sparse: Sequence[int],
        dense: Sequence[int],
        finite: tf.Tensor,
        left: Sequence[tf.Tensor],
    ) -> None:
        """Writes the new residuals after a step."""
        waits = self.setup.variables.facts.residual_waits
        if RESIDUAL not in self.setup.variables.state:
            return
        residuals, done = self.state(sparse)[RESIDUAL], list(sparse)
        if self.setup.residual_scale is None:
            done += dense  # the exchange has cleared their residuals
        elif dense:
            self.set_fact(waits, [True] * len(dense), dense)
        if not done:
            return

        def clear() -> None:
            for residual, rest in zip(residuals, left, strict=True):
                residual.assign(rest)
            # Equal on all replicas, unless the residuals of a float16 table differ among them.
            still = [tf.reduce_any(tf.not_equal(rest, 0)) for rest in left]
            self.set_fact(waits, [*still, *[False] * (len(done) - len(sparse))], done)

        tf.cond(tf.logical_and(self.residuals_wait(done), finite), clear, lambda: None)

    def count(self, places: Sequence[int], sent: Sent, tensor_bytes: tf.Tensor) -> None:
        """Counts the bytes of some gradients."""
        numbers = [self.numbers[place] for place in places]
        dense_bytes = sum(4 * self.setup.specs[number].elements for number in numbers)
        traffic = self.setup.variables.traffic
        traffic.add(self.local(traffic.totals), sent, dense_bytes, numbers, tensor_bytes)

    def count_exchange(self, finite: tf.Tensor) -> None:
        """Counts a step, once it is known whether the step is taken or skipped."""
        traffic = self.setup.variables.traffic
        with tf.control_dependencies([finite]):
            traffic.count_exchange(self.local(traffic.totals))


def count_exchange(
    setup: Setup, numbers: Sequence[int], sent: Sent, tensor_bytes: tf.Tensor
) -> None:
    """Counts an exchange that the caller has made by itself, on this process's first replica.

    Args:
        setup: The parts of the exchange.
        numbers: The indices, in the setup, of the exchanged gradients.
        sent: The bytes that the replica sent.
        tensor_bytes: int64, the bytes of the payload for each of `numbers`.
    """
    replica = Replica(setup, numbers)
    replica.count(range(len(numbers)), sent, tensor_bytes)
    replica.count_exchange(tf.constant(True))
    replica.local(setup.variables.step).assign_add(1)
