"""Sums over the replicas of their per-replica variables, as checkpoints hold them."""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tf_gradcomp.exchange.gradients import native
from tf_gradcomp.exchange.hooks import JobHooks
from tf_gradcomp.groups.group import Group
from tf_gradcomp.groups.means import sums_over_workers
from tf_gradcomp.private import tensorflow as tf_private

_PIECE_BYTES = 2**25  # of the variables that one collective sums
COLLECT_SECONDS = 3600.0  # how long ranks wait, such as for a rank that validates alone
_NOT_COLLECTED = (
    "%s differs on each rank, and a checkpoint holds the sum over all ranks, which this rank does "
    "not have: let rank 0 save (`if hvd.rank() == 0:`), or call optimizer.collect_state() on all "
    "ranks just before the save."
)
_NOT_FOUND = (
    "%s has a different value on each worker, and a checkpoint holds the sum of these values. The "
    "sum is unknown, because the saved object does not contain the exchange of gradients. Save "
    "the optimizer or its exchange together with the variable, or call optimizer.collect_state() "
    "on all workers before the save."
)


_local_readers: contextvars.ContextVar[tuple[object, ...]]
_local_readers = contextvars.ContextVar("local_readers", default=())


@contextlib.contextmanager
def reading_locally(*owners: object) -> Iterator[None]:
    """Within this context, some owners of variables read only this process's parts."""
    token = _local_readers.set((*_local_readers.get(), *owners))
    try:
        yield
    finally:
        _local_readers.reset(token)


def reads_locally(owner: object) -> bool:
    """True if an owner of variables reads only this process's parts."""
    return any(reader is owner for reader in _local_readers.get())


class Counter(Protocol):
    """A variable, or another number that is equal on all processes."""

    def numpy(self) -> Any:
        """Returns the number."""


class _SummedVariable(NamedTuple):
    """A variable with a separate value on each replica of a group.

    Attributes:
        variable: The variable.
        group: The group.
        unused: Returns whether the variable is zeros on all replicas if it is zeros on one.
        replicated: Whether the values of the processes are about equal, as second moments are.
        by_strategy: Whether the strategy has replicated the variable, and sums it when it is read.
    """

    variable: tf.Variable
    group: Group
    unused: Callable[[], bool]
    replicated: bool
    by_strategy: bool


class Saving:
    """Reads state for a checkpoint, and gives replicas the state of a checkpoint.

    `collect` sums variables on all processes together, so that one process can save alone. The
    collected sums are valid until the next step. Before anything is collected, hooks finish their
    work of several steps. Under a strategy, variables that were not collected are summed when they
    are read, but not within `reading_locally(saving)`.
    """

    def __init__(self, group: Group, hooks: JobHooks) -> None:
        self.group = group
        self.hooks = hooks
        self._summed: dict[int, _SummedVariable] = {}
        self._counters: list[Counter] = []
        self._sums: dict[int, np.ndarray] = {}
        self._collected_at: list[int] | None = None
        self._saving_on_all = False
        self._assigned = 0

    def register(
        self,
        variables: Iterable[Any],
        counters: Sequence[Counter],
        unused: Callable[[], bool] = lambda: False,
        group: Group | None = None,
        *,
        replicated: bool = False,
    ) -> None:
        """Routes `tf.train.Checkpoint`'s saves and restores of variables through this object.

        Args:
            variables: Only variables with a separate value on each replica are registered.
            counters: One of them changes whenever a step changes the variables.
            unused: Returns whether a variable is zeros on all replicas if it is zeros on one.
            group: The replicas with separate values, if these are not the replicas that exchange.
            replicated: Whether the values of all processes are about equal. The sum is then
                estimated by one process that saves alone.
        """
        group = group or self.group
        self._counters += counters
        for variable in map(native, variables):
            summed = variable.aggregation == tf.VariableAggregation.SUM
            by_strategy = isinstance(variable, tf.distribute.DistributedValues)
            if summed and group.size > 1 and not (by_strategy and group.processes.size == 1):
                self._summed[id(variable)] = _SummedVariable(
                    variable, group, unused, replicated, by_strategy
                )
                _owners[id(variable)] = self
                self._hook(variable)

    def collect(self) -> None:
        """Sums the variables over the processes; all processes must call it between the same steps.

        Each process keeps the sums, in host memory. Raises `WorkersDisagreeError` if the other
        processes do something else, or do not call it within an hour.
        """
        self.hooks.finish()
        if self.group.processes.size == 1 or not self._summed:
            return
        counts = self.counts()
        facts = {"next action": "collecting state to save", "steps": counts}
        self.group.processes.agree(facts, COLLECT_SECONDS)
        totals: list[np.ndarray] = []
        for piece in _pieces(self._summed.values()):
            totals += _totals(piece, f"collected_{len(totals)}")
        self._sums = dict(zip(self._summed, totals, strict=True))
        self._collected_at = counts

    def collect_again(self) -> None:
        """Forgets collected sums, and collects again if they were collected under a strategy.

        All processes must call it after the same change between two steps.
        """
        collected = self.is_collected
        self.forget()
        if collected and self.group.by_strategy:
            self.collect()

    def forget(self) -> None:
        """Discards collected sums, because something has changed the variables."""
        self._sums, self._collected_at = {}, None

    @property
    def keeps_sums(self) -> bool:
        """True if replicas have separate values, such as residuals."""
        return bool(self._summed)

    @property
    def is_collected(self) -> bool:
        """True if all sums are collected, and no step has changed the variables since."""
        if not self._summed:
            return not self.hooks.pending
        return self._collected_at == self.counts()

    @contextlib.contextmanager
    def saving_on_all(self) -> Iterator[None]:
        """Declares that all processes save within this context; a read then collects the sums."""
        self._saving_on_all = True
        try:
            yield
        finally:
            self._saving_on_all = False

    def read(self, variable: Any) -> np.ndarray:
        """Returns the value of a variable for a checkpoint.

        Raises:
            ValueError: Under Horovod, if the sum has not been collected since the last step, unless
                the rank reads its own value. Under a strategy, if this save began without this
                object.
        """
        native_variable = native(variable)
        entry = self._summed.get(id(native_variable))
        if entry is None:
            return np.asarray(variable.numpy())
        if self._saving_on_all and not self.is_collected:
            self.collect()
        if self.is_collected and id(native_variable) in self._sums:
            return self._sums[id(native_variable)]
        if reads_locally(self):
            return _contribution(entry)
        if self.group.by_strategy:
            if reads_locally(getattr(entry.group, "strategy", None)):
                raise ValueError(_NOT_FOUND % native_variable.name)
            return np.asarray(_total(entry).numpy())
        if entry.unused() and not np.any(native_variable.numpy()):
            return np.asarray(native_variable.numpy())
        raise ValueError(_NOT_COLLECTED % native_variable.name)

    def assign(self, variable: Any, value: Any) -> None:
        """Assigns this replica's share of a restored value."""
        self.forget()
        self._assigned += 1
        self.hooks.abandon()
        target = native(variable)
        entry = self._summed.get(id(target))
        # A strategy divides the value itself, and would sum the new value to return it.
        share = value / entry.group.size if entry and not entry.by_strategy else value
        target.assign(share, read_value=False)

    def is_per_process(self, variable: Any) -> bool:
        """Whether each process has its own copy of a variable, without a strategy."""
        entry = self._summed.get(id(native(variable)))
        return entry is not None and not entry.by_strategy

    def counts(self) -> list[int]:
        """The counters, which identify a state of the variables."""
        return [int(counter.numpy()) for counter in self._counters]

    def state_id(self) -> list[int]:
        """Numbers that identify a state of the variables, equal on all processes."""
        return [*self.counts(), self._assigned]

    def _hook(self, variable: tf.Variable) -> None:
        tf_private.save_as(
            variable,
            lambda: tf.convert_to_tensor(self.read(variable)),
            lambda value: self.assign(variable, value),
        )


# Each variable lives at least as long as its owner, so no other object gets its id.
_owners: weakref.WeakValueDictionary[int, Saving] = weakref.WeakValueDictionary()


def owners_of(parts: Iterable[Any]) -> list[Saving]:
    """Returns the objects that save the variables among some parts of a checkpoint."""
    variables = [part for part in parts if isinstance(part, tf.Variable)]
    found = [
        _owners[id(variable)] for variable in map(native, variables) if id(variable) in _owners
    ]
    return list(dict.fromkeys(found))


def _total(entry: _SummedVariable, label: str = "") -> tf.Tensor:
    if entry.by_strategy:
        return tf.convert_to_tensor(entry.variable)
    (communicator,) = entry.group.communicators()
    communicator.label = label
    flat = communicator.all_reduce(tf.reshape(entry.variable.read_value(), [-1]))
    return tf.reshape(flat, entry.variable.shape)


def _pieces(summed: Iterable[_SummedVariable]) -> Iterator[list[_SummedVariable]]:
    """Yields variables in order, in lists that are each summed by one collective."""
    piece: list[_SummedVariable] = []
    size = 0
    for entry in summed:
        alike = piece and entry.by_strategy and piece[0].by_strategy
        if piece and not (alike and entry.variable.dtype == piece[0].variable.dtype):
            yield piece
            piece, size = [], 0
        piece.append(entry)
        size += entry.variable.dtype.size * entry.variable.shape.num_elements()
        if size >= _PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _totals(piece: Sequence[_SummedVariable], label: str) -> list[np.ndarray]:
    """Returns the sums over all processes of the variables of a piece."""
    first = piece[0]
    if not first.by_strategy:
        return [_total(first, label).numpy()]
    strategy = first.variable.distribute_strategy
    return sums_over_workers(strategy, [_local_sum(entry) for entry in piece])


def _contribution(entry: _SummedVariable) -> np.ndarray:
    return _local_sum(entry) * (
        entry.group.size // entry.group.local_size if entry.replicated else 1
    )


def _local_sum(entry: _SummedVariable) -> np.ndarray:
    group = entry.group
    return np.sum([group.local(entry.variable, i).numpy() for i in range(group.local_size)], 0)
