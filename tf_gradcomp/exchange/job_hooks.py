"""The hooks of an exchange's method, which change its state between two steps."""

from __future__ import annotations

from typing import Any, TypeVar

from tf_gradcomp.compressors.between_steps import BetweenSteps, Proposing, hooks_of
from tf_gradcomp.exchange.replica import Replica
from tf_gradcomp.exchange.saving import Saving
from tf_gradcomp.exchange.setup import Setup
from tf_gradcomp.groups.agreement import LATER_LIST_SECONDS
from tf_gradcomp.groups.notices import out_of_scope

Hook = TypeVar("Hook", bound=BetweenSteps)


class JobHooks:
    """Runs the hooks of a method on all workers alike.

    There are no hooks before the exchange is built, nor with a single replica, which exchanges
    nothing.

    Attributes:
        plans_by: The caller of `plan_settings`, with its settings. It must be equal on all workers.
    """

    def __init__(self) -> None:
        self.plans_by = "nobody"
        self._hooks: list[BetweenSteps] = []
        self._setup: Setup
        self._saving: Saving

    def start(self, setup: Setup, saving: Saving) -> None:
        """Takes over the hooks of the method that the exchange was built with."""
        hooks = hooks_of(setup.compressor, setup.specs, setup.group.size)
        self._hooks = hooks if setup.group.size > 1 else []
        self._setup, self._saving = setup, saving

    def get(self, kind: type[Hook]) -> Hook | None:
        """Returns the hook that is a `kind`; None if there is none."""
        return next((hook for hook in self._hooks if isinstance(hook, kind)), None)

    def notices(self) -> list[str]:
        """Returns the notices of all hooks for the user."""
        return [notice for hook in self._hooks for notice in hook.notices()]

    def progress(self) -> dict[str, Any]:
        """Returns facts that must be equal on all workers when they begin to exchange or plan."""
        first = Replica.of_all(self._setup)
        facts: dict[str, Any] = {"exchanges so far": first.exchanges}
        proposing = self.get(Proposing)
        if proposing:
            facts[proposing.caller_fact] = self.plans_by
        for hook in self._hooks:
            facts |= hook.facts(first.job_state())
        return facts

    def plan_settings(self) -> Any:
        """Plans the method's settings again; see `GradientExchange.plan_settings`."""
        hook = self.get(Proposing)
        if hook is None:
            return None
        group = self._setup.group
        group.processes.agree({"next action": hook.action, **self.progress()}, LATER_LIST_SECONDS)
        proposed = hook.no_change()
        if group.processes.is_first:
            first = Replica.of_all(self._setup)
            of_first = [total.numpy() for total in first.state()[hook.state_name]]
            job_state = first.job_state()
            # Other workers wait for the proposal, so no worker can take part in creating a
            # variable.
            proposed = out_of_scope(lambda: hook.propose(of_first, job_state))
        proposed = group.processes.from_first(proposed)
        for number in range(group.local_size):
            replica = Replica.of_all(self._setup, number)
            hook.install(proposed, replica.job_state(), replica.state()[hook.state_name])
        self._saving.collect_again()
        return self.plan_in_force()

    def plan_in_force(self) -> Any:
        """Returns the plan for the next step; None if nothing is planned."""
        hook = self.get(Proposing)
        return hook.in_force(Replica.of_all(self._setup).job_state()) if hook else None
