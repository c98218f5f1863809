"""Logs the effects of compression in Keras."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import rich.console

from tf_gradcomp.chief import is_chief
from tf_gradcomp.exchange.exchange import GradientExchange, residual_norm
from tf_gradcomp.exchange.state import Traffic
from tf_gradcomp.groups.communicator import measures_per_step
from tf_gradcomp.groups.notices import tell_user
from tf_gradcomp.keras.callbacks import traffic_table
from tf_gradcomp.keras.callbacks.order import READERS, progress_bars, warn_if_behind
from tf_gradcomp.keras.common.compressed_all_reduce import compressed_all_reduce
from tf_gradcomp.keras.common.version import keras
from tf_gradcomp.keras.common.wrappers import compressed_optimizer, wrappers_of
from tf_gradcomp.keras.local.rounds import measures_of_rounds

ALL = "all"
_NOT_IN_BAR = {
    "payload_bytes",
    "sent_bytes",
    "dense_bytes",
    "compression_ratio",
    "residual_norm",
}
_DENSE = (
    "CompressionMonitor: nothing compresses the gradients of this model. Wrap its optimizer in "
    "gc.CompressedOptimizer(...), or give gc.MultiWorkerMirroredStrategy a compressor."
)


class CompressionMonitor(keras.callbacks.Callback):
    """Adds this replica's traffic to Keras' logs, and prints a table by variable at the end.

    The logs, and thus `History`, `TensorBoard` and `CSVLogger`, get these means over the exchanges
    of the epoch so far:

    - `payload_bytes`: the bytes of this replica's payload in a step, including its header;
    - `sent_bytes`: the bytes that it sends, including payloads that it forwards for others;
    - `dense_bytes`: the bytes of its gradients as float32;
    - `compression_ratio`: `dense_bytes / payload_bytes`, the papers' ratio, honestly counted;
    - `wire_ratio`: the bytes that it would send in a dense ring all-reduce, over `sent_bytes`;
    - `skipped_steps`: steps skipped since the start because a gradient was not finite;
    - `residual_norm`: the Euclidean norm of the residuals, at the end of each epoch;
    - `rounds`, with `local_steps`: the rounds since the start; the means above are over rounds;
    - `drift`, with `local_steps`: the distance of a worker's weights from the common weights at the
      end of the latest round, relative to the norm of the common weights: the mean over the
      workers. With gossip, the distance from the latest mean of all weights;
    - `steps_per_round`, with `local_steps`: the number of steps of the latest round that has begun,
      unless it ends early.

    The progress bar shows `wire_ratio`, and `skipped_steps` once a step was skipped.

    Callbacks see the logs in the order of their list: put this callback first. With one replica,
    nothing is exchanged, and only `skipped_steps` and `residual_norm` are logged.

    Args:
        table: Whether the chief prints the table, once, at the end of the first training: with the
            ten largest variables, or with `"all"`.

    Raises:
        ValueError: If `table` is none of True, False and `"all"`.
    """

    def __init__(self, table: bool | str = True) -> None:
        super().__init__()
        if table not in (True, False, ALL):
            raise ValueError(
                f"CompressionMonitor: expected table=True, False or {ALL!r}; received {table!r}."
            )
        self._table = table
        self._exchange: GradientExchange | None = None

    def set_model(self, model: keras.Model) -> None:
        """Called by Keras; warns if a callback before this one will not see its logs."""
        super().set_model(model)
        warn_if_behind(self, READERS, "see its logs")
        for bar in progress_bars():
            bar.on_train_batch_end = _without_details(type(bar).on_train_batch_end, bar)
            bar.on_epoch_end = _without_details(type(bar).on_epoch_end, bar)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts counting; tells the user if nothing is compressed."""
        self._exchange = None
        compressed = compressed_all_reduce(self.model.distribute_strategy)
        if compressed is None and not any(wrappers_of(self.model)):
            tell_user(_DENSE)
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
            logs.update(self._measures(exchange), residual_norm=residual_norm(exchange))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Prints the table."""
        exchange = self._built_exchange()
        traffic = self._traffic().since(self._before_training)
        if exchange and traffic.exchanges and self._table and exchange not in _with_table:
            _with_table.add(exchange)
            if is_chief(self.model.distribute_strategy):
                console = rich.console.Console()
                rows = None if self._table == ALL else traffic_table.LARGEST
                console.print(traffic_table.made(exchange, traffic, console.width, rows))

    def _built_exchange(self) -> GradientExchange | None:
        if self._exchange is None:  # the strategy's exchange exists from the first step on
            self._exchange = find_exchange(self.model)
        return self._exchange if self._exchange and self._exchange.built else None

    def _traffic(self) -> Traffic:
        exchange = self._built_exchange()
        return exchange.traffic() if exchange else Traffic(0, 0, 0, 0, {})

    def _measures(self, exchange: GradientExchange) -> dict[str, float]:
        measures: dict[str, float] = {"skipped_steps": int(exchange.skipped_steps.numpy())}
        optimizer = compressed_optimizer(self.model)
        if optimizer is not None:
            measures |= measures_of_rounds(optimizer)
        traffic = exchange.traffic().since(self._before_epoch)
        if not traffic.payload_bytes:
            return measures
        totals = (traffic.payload_bytes, traffic.sent_bytes, traffic.dense_bytes)
        each = (total / traffic.exchanges for total in totals)
        return {**measures_per_step(exchange.group.size, *each), **measures}


def find_exchange(model: keras.Model) -> GradientExchange | None:
    """The exchange of a model's gradients, or None if they are not compressed."""
    optimizer = compressed_optimizer(model)
    if optimizer:
        return optimizer.exchange
    compressed = compressed_all_reduce(model.distribute_strategy)
    return compressed.find_exchange(model.trainable_variables) if compressed else None


_with_table: weakref.WeakSet[GradientExchange] = weakref.WeakSet()


def _without_details(show: Callable[..., None], bar: keras.callbacks.Callback) -> Any:
    """Replaces a method of a progress bar, which then shows at most two of our measures."""

    @functools.wraps(show)
    def shown(at: int, logs: dict[str, Any] | None = None) -> None:
        seen = {k: v for k, v in (logs or {}).items() if k not in _NOT_IN_BAR}
        if not seen.get("skipped_steps"):
            seen.pop("skipped_steps", None)
        show(bar, at, seen)

    return shown
