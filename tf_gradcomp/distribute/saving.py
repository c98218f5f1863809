"""What a checkpoint holds of the variables that each replica has for itself: their sums."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_gradcomp.distribute import tf_private
from tf_gradcomp.distribute.gradients import native
from tf_gradcomp.distribute.group import Group

COLLECT_SECONDS = 3600.0  # that the ranks may be apart, where one of them validates alone
_NOT_COLLECTED = (
    "%s is another one on each rank, and a checkpoint holds their sum, which this rank does not "
    "have: call optimizer.collect_state() on all ranks just before rank 0 saves, or put "
    "gc.callbacks.CollectState() in front of the callback that saves, on all ranks."
)


class _Apart(NamedTuple):
    """A variable that each replica of a group has for itself."""

    variable: tf.Variable
    group: Group
    unused: Callable[[], bool]


class Saving:
    """Reads what a checkpoint holds, and gives replicas what it held.

    Of variables that a strategy has replicated, TensorFlow sums and shares out itself. Others are
    summed here. Under a strategy, where all processes save together, each sum is made when it is
    read. Elsewhere `collect` sums, on all processes together, so that one of them can save alone;
    what it has collected holds until the next step.

    Args:
        group: The replicas that exchange.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._apart: dict[int, _Apart] = {}
        self._counters: list[tf.Variable] = []
        self._sums: dict[int, np.ndarray] = {}
        self._collected_at: list[int] | None = None
        self._all_save = False

    def take_over(
        self,
        variables: Iterable[Any],
        counters: Sequence[tf.Variable],
        unused: Callable[[], bool] = lambda: False,
        group: Group | None = None,
    ) -> None:
        """Makes `tf.train.Checkpoint` save and restore variables by this, too.

        Args:
            variables: Those that each replica has for itself are taken.
            counters: One of them changes whenever a step changes the variables.
            unused: Tells that a variable which is zeros on one replica is so on all.
            group: The replicas that have the variables for themselves, if not those that exchange.
        """
        group = group or self._group
        self._counters += counters
        for variable in map(native, variables):
            summed = variable.aggregation == tf.VariableAggregation.SUM
            replicated = isinstance(variable, tf.distribute.DistributedValues)
            if group.size > 1 and summed and not replicated:
                self._apart[id(variable)] = _Apart(variable, group, unused)
                self._hook(variable)

    def collect(self) -> None:
        """Sums the variables over the processes; all of them must call it between the same steps.

        The first one keeps the sums, in host memory; where all save, all do.

        Raises:
            WorkersDisagreeError: If the others do something else, or are at another step; or on
                this one, if they do not come within an hour.
        """
        if self._group.by_strategy:
            return
        counts = self._counts()
        facts = {"next action": "collecting state to save", "steps": counts}
        self._group.agree(facts, COLLECT_SECONDS)
        self._sums = {}
        for number, one in self._apart.items():
            total = _total(one, f"collected_{len(self._sums)}")
            if self._group.is_first or self._all_save:
                self._sums[number] = total.numpy()
        self._collected_at = counts

    @contextlib.contextmanager
    def all_save(self) -> Iterator[None]:
        """Within this context all processes save, and what they save is collected then."""
        of_first = self._sums, self._collected_at
        self.forget()
        self._all_save = True
        try:
            yield
        finally:
            self._all_save = False
            self._sums, self._collected_at = of_first

    def forget(self) -> None:
        """Has the variables collected anew before they are saved: something has changed them."""
        self._sums, self._collected_at = {}, None

    def read(self, variable: Any) -> np.ndarray:
        """What a checkpoint holds of a variable.

        Raises:
            ValueError: If that has not been collected since the last step.
        """
        own = native(variable)
        apart = self._apart.get(id(own))
        if apart is None:
            return np.asarray(variable.numpy())
        if self._group.by_strategy:
            return np.asarray(_total(apart).numpy())
        if self._all_save and self._collected_at != self._counts():
            self.collect()
        if self._collected_at != self._counts() or id(own) not in self._sums:
            if apart.unused() and not np.any(own.numpy()):
                return np.asarray(own.numpy())
            raise ValueError(_NOT_COLLECTED % own.name)
        return self._sums[id(own)]

    def assign(self, variable: Any, value: Any) -> None:
        """Gives a replica its share of what a checkpoint held."""
        self.forget()
        apart = self._apart.get(id(native(variable)))
        variable.assign(value / apart.group.size if apart else value)

    def is_apart(self, variable: Any) -> bool:
        """Whether each replica has a variable for itself, and a checkpoint the sum."""
        return id(native(variable)) in self._apart

    def _counts(self) -> list[int]:
        return [int(counter.numpy()) for counter in self._counters]

    def _hook(self, variable: tf.Variable) -> None:
        tf_private.save_as(
            variable,
            lambda: tf.convert_to_tensor(self.read(variable)),
            lambda value: self.assign(variable, value),
        )


def _total(apart: _Apart, label: str = "") -> tf.Tensor:
    (communicator,) = apart.group.communicators()
    communicator.label = label
    flat = communicator.all_reduce(tf.reshape(apart.variable.read_value(), [-1]))
    return tf.reshape(flat, apart.variable.shape)
