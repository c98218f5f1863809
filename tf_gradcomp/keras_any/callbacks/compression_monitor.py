"""Shows in Keras' logs what compression does."""

from __future__ import annotations

from typing import Any

import rich.console
import rich.table

from tf_gradcomp.chief import is_chief
from tf_gradcomp.distribute import tf_private
from tf_gradcomp.distribute.communicator import measures_per_step
from tf_gradcomp.distribute.cross_device_ops import CompressedAllReduce
from tf_gradcomp.distribute.exchange import GradientExchange
from tf_gradcomp.distribute.traffic import Traffic
from tf_gradcomp.keras_any.callbacks.order import READERS, warn_if_behind
from tf_gradcomp.keras_here import keras
from tf_gradcomp.wrapper.compressed import compressed_optimizer


class CompressionMonitor(keras.callbacks.Callback):
    """Adds to Keras' logs what this replica exchanges, and prints a table by variable at the end.

    The logs, and so the progress bar, `History` and `TensorBoard`, get, as means over the exchanges
    of the epoch so far:

    - `payload_bytes`: what this replica puts on the wire for one step, header and all;
    - `sent_bytes`: what its network interface sends, what it passes on for others included;
    - `dense_bytes`: its gradients as float32;
    - `compression_ratio`: `dense_bytes / payload_bytes`, the papers' ratio, honestly counted;
    - `wire_ratio`: what a dense ring all-reduce would have it send, over `sent_bytes`;
    - `skipped_steps`: steps skipped since the start because a gradient was not finite;
    - `residual_norm`: the Euclidean norm of the residuals, at the end of each epoch.

    Callbacks see the logs in the order of their list: put this one first. With one replica nothing
    is exchanged, and only `skipped_steps` and `residual_norm` are logged.

    Args:
        table: Whether to print the table at the end of training (the chief does).
    """

    def __init__(self, table: bool = True) -> None:
        super().__init__()
        self._table = table
        self._exchange: GradientExchange | None = None

    def set_model(self, model: keras.Model) -> None:
        """Called by Keras; warns if a callback before this one will not see its logs."""
        super().set_model(model)
        warn_if_behind(self, READERS, "see what it logs")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts counting."""
        self._exchange = None
        self._before_training = self._before_epoch = self._traffic()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts new means."""
        self._before_epoch = self._traffic()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the batch's logs."""
        exchange = self._built_exchange()
        if exchange and logs is not None:
            logs.update(self._measures(exchange))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the epoch's logs."""
        exchange = self._built_exchange()
        if exchange and logs is not None:
            logs.update(self._measures(exchange), residual_norm=exchange.residual_norm())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Prints the table."""
        exchange = self._built_exchange()
        traffic = self._traffic().since(self._before_training)
        if (
            exchange
            and traffic.exchanges
            and self._table
            and is_chief(self.model.distribute_strategy)
        ):
            rich.console.Console().print(_by_variable(exchange, traffic))

    def _built_exchange(self) -> GradientExchange | None:
        if self._exchange is None:  # a strategy's own exists from the first step on
            self._exchange = find_exchange(self.model)
        return self._exchange if self._exchange and self._exchange.built else None

    def _traffic(self) -> Traffic:
        exchange = self._built_exchange()
        return exchange.traffic() if exchange else Traffic(0, 0, 0, 0, {})

    def _measures(self, exchange: GradientExchange) -> dict[str, float]:
        measures: dict[str, float] = {"skipped_steps": int(exchange.skipped_steps.numpy())}
        traffic = exchange.traffic().since(self._before_epoch)
        if not traffic.payload_bytes:
            return measures
        totals = (traffic.payload_bytes, traffic.sent_bytes, traffic.dense_bytes)
        each = (total / traffic.exchanges for total in totals)
        return {**measures_per_step(exchange.group.size, *each), **measures}


def find_exchange(model: keras.Model) -> GradientExchange | None:
    """The exchange that a model's training goes through, or None if it is not compressed."""
    optimizer = compressed_optimizer(model)
    if optimizer:
        return optimizer.exchange
    ops = tf_private.cross_device_ops(model.distribute_strategy)
    if isinstance(ops, CompressedAllReduce):
        return ops.find_exchange(model.trainable_variables)
    return None


def _by_variable(exchange: GradientExchange, traffic: Traffic) -> rich.table.Table:
    title = f"Sent per step by this {exchange.group.kind}, over {traffic.exchanges} steps"
    table = rich.table.Table(title=title)
    table.add_column("variable", overflow="fold")
    table.add_column("layer kind")
    for name in ("elements", "dense bytes", "payload bytes", "ratio"):
        table.add_column(name, justify="right")
    header = traffic.payload_bytes - sum(traffic.tensor_bytes.values())
    for spec in exchange.specs:
        sent = traffic.tensor_bytes[spec.path] / traffic.exchanges
        table.add_row(spec.path, spec.kind, *_cells(spec.elements, 4 * spec.elements, sent))
    table.add_row("header", "", "", "", f"{header / traffic.exchanges:,.0f}", "", end_section=True)
    elements = sum(spec.elements for spec in exchange.specs)
    dense, sent = traffic.dense_bytes / traffic.exchanges, traffic.payload_bytes / traffic.exchanges
    table.add_row("all", "", *_cells(elements, dense, sent))
    return table


def _cells(elements: int, dense_bytes: float, payload_bytes: float) -> tuple[str, str, str, str]:
    ratio = f"{dense_bytes / payload_bytes:,.1f}" if payload_bytes else "-"
    return f"{elements:,}", f"{dense_bytes:,.0f}", f"{payload_bytes:,.0f}", ratio
