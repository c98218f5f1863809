"""What a checkpoint holds of the variables that each replica has for itself: their sums."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.distribute import tf_private
from tf_gradcomp.distribute.communicator import Communicator
from tf_gradcomp.distribute.gradients import native
from tf_gradcomp.distribute.group import Group

_NOT_COLLECTED = (
    "%s is another one on each rank, and a checkpoint holds their sum, which this rank does not "
    "have: call optimizer.collect_state() on all ranks just before rank 0 saves, or put "
    "gc.callbacks.CollectState() in front of the callback that saves, on all ranks."
)


class Saving:
    """Reads what a checkpoint holds, and gives replicas what it held.

    Of variables that a strategy has replicated, TensorFlow sums and shares out itself. Others are
    summed here. Under a strategy, where all processes save together, each sum is made when it is
    read. Elsewhere `collect` sums, on all processes together, so that one of them can save alone;
    what it has collected holds until the next step.

    Args:
        group: The replicas.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._apart: dict[int, tuple[tf.Variable, Callable[[], bool]]] = {}
        self._counters: list[tf.Variable] = []
        self._sums: dict[int, np.ndarray] = {}
        self._collected_at: list[int] | None = None
        self._all_save = False

    def take_over(
        self,
        variables: Iterable[Any],
        counters: Sequence[tf.Variable],
        unused: Callable[[], bool] = lambda: False,
    ) -> None:
        """Makes `tf.train.Checkpoint` save and restore variables by this, too.

        Args:
            variables: Those that each replica has for itself are taken.
            counters: One of them changes whenever a step changes the variables.
            unused: Tells that a variable which is zeros on one replica is so on all.
        """
        self._counters += counters
        for variable in map(native, variables):
            if self._is_apart(variable):
                self._apart[id(variable)] = variable, unused
                self._hook(variable)

    def collect(self) -> None:
        """Sums the variables over the processes; all of them must call it between the same steps.

        The first one keeps the sums, in host memory; where all save, all do.

        Raises:
            WorkersDisagreeError: If the others do something else, or are at another step.
        """
        if self._group.by_strategy:
            return
        counts = self._counts()
        self._group.agree({"next action": "collecting state to save", "steps": counts})
        (communicator,) = self._group.communicators()
        communicator.label = "collected"
        self._sums = {}
        for number, (variable, _) in self._apart.items():
            total = _total(variable, communicator)
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
        if not self._is_apart(own):
            return np.asarray(variable.numpy())
        if self._group.by_strategy:
            (communicator,) = self._group.communicators()
            return np.asarray(_total(own, communicator).numpy())
        if self._all_save and self._collected_at != self._counts():
            self.collect()
        if self._collected_at != self._counts() or id(own) not in self._sums:
            _, unused = self._apart[id(own)]
            if unused() and not np.any(own.numpy()):
                return np.asarray(own.numpy())
            raise ValueError(_NOT_COLLECTED % own.name)
        return self._sums[id(own)]

    def assign(self, variable: Any, value: Any) -> None:
        """Gives a replica its share of what a checkpoint held."""
        self.forget()
        own = native(variable)
        variable.assign(value / self._group.size if self._is_apart(own) else value)

    def _is_apart(self, variable: tf.Variable) -> bool:
        summed = variable.aggregation == tf.VariableAggregation.SUM
        replicated = isinstance(variable, tf.distribute.DistributedValues)
        return self._group.size > 1 and summed and not replicated

    def _counts(self) -> list[int]:
        return [int(counter.numpy()) for counter in self._counters]

    def _hook(self, variable: tf.Variable) -> None:
        tf_private.save_as(
            variable,
            lambda: tf.convert_to_tensor(self.read(variable)),
            lambda value: self.assign(variable, value),
        )


def _total(variable: tf.Variable, communicator: Communicator) -> tf.Tensor:
    flat = communicator.all_reduce(tf.reshape(variable.read_value(), [-1]))
    return tf.reshape(flat, variable.shape)
