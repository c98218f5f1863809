"""The hooks of an exchange: all that happens between two steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

from tf_gradcomp.compressors.base import Hook
from tf_gradcomp.compressors.stages import all_stages
from tf_gradcomp.exchange.replica import Replica
from tf_gradcomp.exchange.setup import Setup
from tf_gradcomp.groups.agreement import LATER_LIST_SECONDS
from tf_gradcomp.groups.group import outside_scope

Kind = TypeVar("Kind", bound=Hook)


class JobHooks:
    """Runs hooks on all workers alike: those of the method, and the rounds of local steps.

    A method has no hooks before the exchange is built, nor with a single replica, which exchanges
    nothing.

    Attributes:
        planner: The caller of `plan_settings`, with its settings. It must be equal on all workers.
    """

    def __init__(self) -> None:
        self.planner = "nobody"
        self._hooks: list[Hook] = []
        self._setup: Setup

    def start(self, setup: Setup) -> None:
        """Sets the hooks of the exchange's method."""
        self._hooks = _hooks_of(setup) if setup.group.size > 1 else []
        self._setup = setup

    def add(self, hook: Hook) -> None:
        """Adds a hook that does not belong to the method."""
        self._hooks.append(hook)

    def get(self, kind: type[Kind]) -> Kind | None:
        """Returns the hook that is a `kind`; None if there is none."""
        return next((hook for hook in self._hooks if isinstance(hook, kind)), None)

    @property
    def _proposing(self) -> Hook | None:
        return next((hook for hook in self._hooks if hook.action), None)

    def notices(self) -> list[str]:
        """Returns the notices of all hooks for the user."""
        return [notice for hook in self._hooks for notice in hook.notices()]

    def progress(self) -> dict[str, Any]:
        """Returns facts that must be equal on all workers when they begin to exchange or plan."""
        first = Replica.with_all_gradients(self._setup)
        facts: dict[str, Any] = {"exchanges so far": first.exchanges}
        if self._proposing:
            facts[f"{self._proposing.action} by"] = self.planner
        for hook in self._hooks:
            facts |= hook.facts(first.job_state())
        return facts

    def plan_settings(self) -> Any:
        """Plans the method's settings again; see `GradientExchange.plan_settings`."""
        hook = self._proposing
        if hook is None:
            return None
        group = self._setup.group
        group.processes.agree({"next action": hook.action, **self.progress()}, LATER_LIST_SECONDS)
        proposed = hook.no_change()
        if group.processes.is_first:
            first = Replica.with_all_gradients(self._setup)
            state = [total.numpy() for total in first.state()[hook.state_name]]
            job_state = first.job_state()
            # Other workers wait for the proposal, so no worker can take part in creating a
            # variable.
            proposed = outside_scope(lambda: hook.propose(state, job_state))
        proposed = group.processes.broadcast_values(proposed)
        for replica_index in range(group.local_size):
            replica = Replica.with_all_gradients(self._setup, replica_index)
            hook.install(proposed, replica.job_state(), replica.state()[hook.state_name])
        return self.plan_in_force()

    @property
    def pending(self) -> bool:
        """Whether work of several steps has begun and not ended."""
        return any(hook.pending for hook in self._hooks)

    def finish(self) -> None:
        """Finishes such work; all processes call it between the same two steps."""
        for hook in self._hooks:
            hook.finish()

    @contextlib.contextmanager
    def rolled_back(self) -> Iterator[None]:
        """Restores the state from before unfinished work, within this context."""
        with contextlib.ExitStack() as stack:
            for hook in self._hooks:
                if hook.pending:
                    stack.enter_context(hook.rolled_back())
            yield

    def abandon(self) -> None:
        """Forgets unfinished work, because a checkpoint overwrites the changed variables."""
        for hook in self._hooks:
            hook.abandon()

    def plan_in_force(self) -> Any:
        """Returns the plan for the next step; None if nothing is planned."""
        hook = self._proposing
        return hook.in_force(Replica.with_all_gradients(self._setup).job_state()) if hook else None


def _hooks_of(setup: Setup) -> list[Hook]:
    """Returns the hooks of a method, its warm-up and its stages, at most one of each class."""
    hooks: list[Hook] = []
    for stage in all_stages(setup.compressor):
        hook = stage.hook(setup.specs, setup.group.size)
        if hook is None:
            continue
        if type(hook) in map(type, hooks):
            raise ValueError(
                f"{setup.compressor!r}: only one of its stages can be {type(stage).__name__}, "
                "because its state belongs to the whole job; use another method in the other "
                "stages."
            )
        hooks.append(hook)
    return hooks
