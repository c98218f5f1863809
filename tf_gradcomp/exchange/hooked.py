"""Work of a method between two steps."""

from __future__ import annotations

from typing import Any

from tf_gradcomp.compressors.between_steps import Hook, Hooks, Proposing
from tf_gradcomp.exchange.replica import Replica
from tf_gradcomp.exchange.setup import Setup
from tf_gradcomp.groups.agreement import LATER_LIST_SECONDS
from tf_gradcomp.groups.own_values import out_of_scope


class HookedExchange:
    """Base of an exchange whose method may have hooks between two steps.

    Attributes:
        built: Whether the state exists.
        setup: The parts of the built exchange.
        plans_by: The caller of `plan_settings`, with its settings. The key must be equal on all
            workers.
    """

    built = False
    plans_by = "nobody"
    setup: Setup
    _hooks: Hooks

    def hook(self, kind: type[Hook]) -> Hook | None:
        """Returns the method's hook of a kind; None without one, or if nothing is exchanged."""
        return self._hooks.get(kind) if self.built else None

    def replica(self, local_replica: int = 0) -> Replica:
        """Returns one of the replicas of this process, with its state of all gradients."""
        return Replica(self.setup, range(len(self.setup.specs)), local_replica)

    @property
    def exchanges(self) -> int:
        """Returns the number of exchanges so far, with the count of a restored checkpoint."""
        if not self.built:
            return 0
        return int(self.setup.group.local(self.setup.variables.step, 0).numpy())

    def plan_settings(self) -> Any:
        """Lets the method plan its settings again, if it can; called between two steps.

        The process with the first replica makes a plan, and all replicas install it at once. All
        workers must call it between the same two steps; otherwise it raises `WorkersDisagreeError`.
        Returns the plan for the next step; None if another method is in use, or if there is one
        replica.
        """
        hook = self.hook(Proposing)
        if hook is None:
            return None
        group = self.setup.group
        group.processes.agree({"next action": hook.action, **self._progress()}, LATER_LIST_SECONDS)
        proposed = hook.no_change()
        if group.processes.is_first:
            first = self.replica()
            of_first = [total.numpy() for total in first.state()[hook.state_name]]
            job_state = first.job_state()
            # Other workers wait for the proposal, so no worker can take part in creating a
            # variable.
            proposed = out_of_scope(lambda: hook.propose(of_first, job_state))
        proposed = group.processes.from_first(proposed)
        for replica in map(self.replica, range(group.local_size)):
            hook.install(proposed, replica.job_state(), replica.state()[hook.state_name])
        self._after_change()
        return self.plan_in_force()

    def plan_in_force(self) -> Any:
        """Returns the plan for the next step; None if nothing is planned."""
        hook = self.hook(Proposing)
        return hook.in_force(self.replica().job_state()) if hook else None

    def _after_change(self) -> None:
        """Does nothing; a job that saves its state overrides this."""

    def _progress(self) -> dict[str, Any]:
        """Returns facts that must be equal on all workers when they begin to exchange or plan."""
        proposing = self.hook(Proposing)
        return {
            "exchanges so far": self.exchanges,
            **({proposing.caller_fact: self.plans_by} if proposing else {}),
            **self._hooks.facts(self.replica().job_state()),
        }
