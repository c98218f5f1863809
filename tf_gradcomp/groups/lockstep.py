"""Several replicas of an exchange that one process runs in lockstep."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.compressors.requests import AllGather, AllReduce, Request
from tf_gradcomp.groups.agreement import Processes
from tf_gradcomp.groups.communicator import Communicator, next_room
from tf_gradcomp.groups.group import Group, Result


class _Meeting:
    """Holds the requests of all replicas at one point of a step; computes each answer once."""

    def __init__(self, requests: Sequence[Request]) -> None:
        if len({_kind(request) for request in requests}) != 1:
            raise RuntimeError(f"The replicas of one exchange make different requests: {requests}.")
        if not (isinstance(requests[0], AllGather) and not requests[0].same_length):
            _check_equal_lengths(requests)
        self._requests = requests

    @functools.cached_property
    def rows(self) -> tf.Tensor:
        """The payloads as rows, padded with zeros."""
        payloads = [request.sent for request in self._requests]
        longest = tf.reduce_max([tf.size(words) for words in payloads])
        return tf.stack([tf.pad(words, [[0, longest - tf.size(words)]]) for words in payloads])

    @functools.cached_property
    def total(self) -> tf.Tensor:
        """The sum of all vectors, followed by the sum of their metadata."""
        return functools.reduce(tf.add, map(_with_metadata, self._requests))


def _kind(request: Request) -> tuple[Any, ...]:
    """Returns the parts of a request that must be equal on all replicas."""
    same_length = isinstance(request, AllGather) and request.same_length
    return type(request), request.sent.dtype, same_length


def _check_equal_lengths(requests: Sequence[Request]) -> None:
    """Refuses vectors of different lengths, with which real collectives hang or fail."""
    first, *lengths = (tf.size(request.sent) for request in requests)
    kind = type(requests[0]).__name__
    for length in lengths:
        tf.debugging.assert_equal(
            length, first, f"{kind}: the replicas' vectors must have equal lengths, but do not"
        )


def _with_metadata(request: Request) -> tf.Tensor:
    if isinstance(request, AllReduce) and request.metadata is not None:
        return tf.concat([request.values, request.metadata], 0)
    return request.sent


class LockstepCommunicator(Communicator):
    """Communicates between replicas of one process, after all replicas have made their requests.

    Args:
        size: The number of replicas.
        rank: This replica's number.
        meetings: The latest meeting, in a list that all replicas share.
    """

    def __init__(self, size: int, rank: int, meetings: list[_Meeting]) -> None:
        super().__init__(size, rank, rank)
        self._meetings = meetings

    def meet(self, requests: Sequence[Request]) -> None:
        self._meetings[:] = [_Meeting(requests)]

    def all_gather(self, row: tf.Tensor) -> tf.Tensor:
        """Gathers int32 rows of one length, in the order of the replicas."""
        return self._meetings[0].rows

    def all_gather_padded(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers rows like a job, whose padding counts although nothing is padded here."""
        rows = self._meetings[0].rows
        longest = tf.shape(rows)[1]
        if self.ahead is None:
            return rows, longest + 1
        room = tf.cast(self.ahead.read_value(), tf.int32)
        return rows, 1 + room + next_room(self.ahead, room, longest)

    def all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sum of vectors of one length and dtype."""
        return self._meetings[0].total

    def sum(self, request: AllReduce) -> tf.Tensor:
        return self._meetings[0].total

    def broadcast(self, payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
        """Returns the int32 vector of the replica whose rank is `root`."""
        return tf.gather(self._meetings[0].rows, root)


def lockstep_communicators(size: int) -> list[Communicator]:
    """Returns communicators of replicas that one process runs in lockstep."""
    meetings: list[_Meeting] = []
    return [LockstepCommunicator(size, rank, meetings) for rank in range(size)]


class LockstepVariable:
    """Represents a variable with a separate value for each replica in lockstep; never saved."""

    aggregation = tf.VariableAggregation.NONE

    def __init__(self, variables: Sequence[tf.Variable]) -> None:
        self.variables = list(variables)


class LockstepGroup(Group):
    """Replicas of one process that take each step together."""

    kind = "learner"

    def __init__(self, size: int) -> None:
        self.size = self.local_size = size
        self.processes = Processes(1, True, tf.identity)

    def check_current(self) -> None:
        """Allows every caller."""

    def communicator(self, label: str = "") -> Communicator:
        """Refuses, because no replica runs alone."""
        raise RuntimeError("Replicas in lockstep take a step together.")

    def communicators(self) -> list[Communicator]:
        return lockstep_communicators(self.size)

    def local(self, variable: Any, local_replica: int | None = None) -> tf.Variable:
        if isinstance(variable, LockstepVariable):
            return variable.variables[local_replica or 0]
        return variable

    def create(self, make: Callable[[], Result]) -> Result:
        """Gives each replica its own copy of the variables that `make` creates."""

        def create(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> Any:
            if kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ:
                return next_creator(**kwargs)
            return LockstepVariable([next_creator(**kwargs) for _ in range(self.size)])

        with tf.variable_creator_scope(create):
            return make()

    @property
    def is_collective(self) -> bool:
        """True: a branch that all replicas take may contain their requests."""
        return True

    @property
    def devices(self) -> Sequence[str]:
        return ["CPU:0"]
