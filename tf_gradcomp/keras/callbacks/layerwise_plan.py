"""Plans the settings of all layers by L-GreCo during training."""

from __future__ import annotations

import time
from typing import Any

import rich.console
import rich.table

from tf_gradcomp.chief import is_chief
from tf_gradcomp.compressors.lgreco import LayerPlanner
from tf_gradcomp.compressors.plans import PlanInForce
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.keras.callbacks.shared import (
    EPOCH,
    READERS,
    SAVERS,
    checked_every,
    find_exchange,
    warn_if_behind,
)
from tf_gradcomp.keras.callbacks.worker_state import CollectState
from tf_gradcomp.keras_version import keras


class LayerwisePlan(keras.callbacks.Callback):
    """Has `LGreCo` plan the settings of all layers again, after each epoch or some steps.

    All workers must have this callback, with the same `every`: one worker plans, and all install
    the plan at the same step. With another method, or with one replica, the callback does nothing.

    The logs, and thus the progress bar, `History` and `TensorBoard`, get:

    - `plan_ratio`: the bytes of the method's own settings over the plan's bytes;
    - `plan_budget_used`: the plan's share of the allowed error;
    - `plan_at_bound`: the number of layers with the smallest setting of their choices.

    These values belong to the last plan; at the end of an epoch, to the plan that was just made.
    The three values are 1, 1 and 0 before the first plan, and while the method keeps its own
    settings. The chief prints the settings of all layers at the end.

    Callbacks see the logs, and save the plan, in the order of their list: put this callback before
    callbacks that read logs or save the model.

    Args:
        every: `"epoch"`, or a number of exchanges: skipped exchanges count, batches that are only
            accumulated do not. With `steps_per_execution`, the plan comes at the end of the
            execution that completes the number. A plan takes 10 ms or more, even for a small model,
            so choose a large number.
        table: Whether to print the settings at the end of training.

    Raises:
        ValueError: If `every` is neither `"epoch"` nor a whole number of at least 1.
    """

    def __init__(self, every: str | int = EPOCH, table: bool = True) -> None:
        super().__init__()
        self._every = checked_every("LayerwisePlan", every)
        self._table = table
        self._exchange: GradientExchange | None = None

    def set_model(self, model: keras.Model) -> None:
        """Called by Keras; warns if a callback before this one will miss its logs or its plan."""
        super().set_model(model)
        warn_if_behind(self, READERS, "see its logs")
        warn_if_behind(self, SAVERS, "save the plan that is made at the same step")
        warn_if_behind(self, (CollectState,), "collect the state that the plan leaves")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resets the callback."""
        self._exchange = None
        self._plan: PlanInForce | None = None
        self._last: int | None = None  # unknown until other callbacks have restored a backup
        self._plans, self._seconds = 0, 0.0
        exchange = find_exchange(self.model)
        if exchange:
            exchange.hooks.planner = f"LayerwisePlan(every={self._every!r})"

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the start of the period."""
        if self._last is None:
            self._last = self._steps()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Plans after some steps, and adds to the batch's logs."""
        if isinstance(self._every, int):
            steps = self._steps()
            if steps // self._every > (self._last or 0) // self._every:
                self._plan_now()
            self._last = steps
        self._add_to(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Plans after an epoch, and adds to its logs."""
        if self._every == EPOCH and self._steps() != self._last:
            self._plan_now()
            self._last = self._steps()
        self._add_to(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Prints the table."""
        exchange = self._planned_exchange()
        planner = exchange.hooks.get(LayerPlanner) if exchange else None
        if not (planner and self._plan and self._table):
            return
        if is_chief(self.model.distribute_strategy):
            rich.console.Console().print(self._by_layer(planner, self._plan))

    def _plan_now(self) -> None:
        """Plans again, if the method has plans; adds up plans and seconds for the summary."""
        exchange = self._planned_exchange()
        if exchange:
            started = time.perf_counter()
            self._plan = exchange.plan_settings()
            self._seconds += time.perf_counter() - started
            self._plans += 1

    def _add_to(self, logs: dict[str, Any] | None) -> None:
        exchange = self._planned_exchange()
        if self._plan is None and exchange:
            self._plan = exchange.hooks.plan_in_force()
        if self._plan and logs is not None:
            logs.update(self._plan.measures())

    def _steps(self) -> int:
        exchange = self._planned_exchange()
        return exchange.exchanges if exchange else 0

    def _planned_exchange(self) -> GradientExchange | None:
        """The model's exchange, if its settings can be planned."""
        if self._exchange is None:  # the strategy's exchange exists from the first step on
            self._exchange = find_exchange(self.model)
        exchange = self._exchange
        return exchange if exchange and exchange.hooks.get(LayerPlanner) else None

    def _by_layer(self, planner: LayerPlanner, plan: PlanInForce) -> rich.table.Table:
        table = rich.table.Table(
            title=f"L-GreCo's settings, after {self._plans} plans in {self._seconds:.2f} s "
            "(in which workers also wait for each other)",
            caption=f"{plan.ratio:.2f} times fewer bytes than the method's own settings, with "
            f"{plan.budget_used:.1%} of the allowed error. Layers at their bound: {plan.at_bound}",
        )
        table.add_column("layer", overflow="fold")
        table.add_column("layer kind")
        for name in ("elements", "own setting", "choices", "plan"):
            table.add_column(name, justify="right")
        defaults = planner.lgreco.settings(planner.specs)
        for index in planner.layers:
            spec = planner.specs[index]
            choices = planner.lgreco.choices(spec) or []
            allowed = f"{min(choices):,} to {max(choices):,}"
            settings = (f"{defaults[index]:,}", allowed, f"{plan.settings[index]:,}")
            table.add_row(spec.path, spec.kind, f"{spec.elements:,}", *settings)
        return table
