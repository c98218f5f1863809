"""Callbacks that log the effects of compression."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import rich.box
import rich.console
import rich.table

from tf_gradcomp.chief import is_chief
from tf_gradcomp.compressors.settings import is_whole_number
from tf_gradcomp.exchange.exchange import GradientExchange, residual_norm
from tf_gradcomp.exchange.state import Traffic
from tf_gradcomp.groups.communicator import dense_ring_bytes, measures_per_step
from tf_gradcomp.groups.messages import log_info
from tf_gradcomp.keras.callbacks.shared import READERS, find_exchange, warn_if_behind
from tf_gradcomp.keras.common.fit import callbacks_of_fit
from tf_gradcomp.keras.common.wrappers import compressed_optimizer, wrappers_of
from tf_gradcomp.keras.local.rounds import measures_of_rounds
from tf_gradcomp.keras_version import keras
from tf_gradcomp.policy import GradientSpec
from tf_gradcomp.strategy.compressed_all_reduce import compressed_all_reduce

ALL = "all"
LARGEST = 10  # variables with a row in the table
_NUMBERS = ("elements", "payload")
_SHORTEST_NAME = 12
_LIMIT = 0.45  # between the cosines of methods that keep up with dense training, and that lag
_DELAYED = (
    "DelayCheck: much of the residual has been delayed for %d steps (cosine %.2f, limit %.2f). "
    "Compression by %s probably holds training back. Send more (a higher density, a lower rate), "
    "begin with a warm-up, or use 'adacomp'. `gradcomp simulate` compares methods with dense "
    "training."
)
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
    - `compression_ratio`: `dense_bytes / payload_bytes`, the payload ratio of the papers;
    - `fewer_bytes`: how many times fewer bytes it sends: the bytes that it would send in an
      uncompressed ring all-reduce, over `sent_bytes`;
    - `skipped_steps`: steps skipped since the start because a gradient was not finite;
    - `residual_norm`: the Euclidean norm of the residuals, at the end of each epoch;
    - `rounds`, with `local_steps`: the rounds since the start; the means above are over rounds;
    - `drift`, with `local_steps`: the distance of a worker's weights from the common weights at the
      end of the latest round, relative to the norm of the common weights: the mean over the
      workers. With gossip, the distance from the latest mean of all weights;
    - `steps_per_round`, with `local_steps`: the number of steps of the latest round that has begun,
      unless it ends early.

    The progress bar shows `fewer_bytes`, and `skipped_steps` once a step was skipped.

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
        for bar in callbacks_of_fit():
            if isinstance(bar, keras.callbacks.ProgbarLogger):
                bar.on_train_batch_end = _without_details(type(bar).on_train_batch_end, bar)
                bar.on_epoch_end = _without_details(type(bar).on_epoch_end, bar)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts counting; logs if nothing is compressed."""
        self._exchange = None
        compressed = compressed_all_reduce(self.model.distribute_strategy)
        if compressed is None and not any(wrappers_of(self.model)):
            log_info(_DENSE)
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
                largest = None if self._table == ALL else LARGEST
                console.print(traffic_table(exchange, traffic, console.width, largest))

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
        step_means = (total / traffic.exchanges for total in totals)
        return {**measures_per_step(exchange.group.size, *step_means), **measures}


class DelayCheck(keras.callbacks.Callback):
    """Warns if the same gradients are delayed over many steps.

    The log `residual_cosine` compares a worker's residuals with those of `every` exchanges before.
    Near 0, other gradients are delayed now; near 1, the same ones still are, which holds training
    back. Above 0.45, the chief warns once; docs/advise.md says what the check misses.

    Args:
        every: Exchanges between two checks. Each worker keeps a copy of its residuals.

    Raises:
        ValueError: If `every` is not a whole number of at least 1.
    """

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        if not is_whole_number(every, 1, sys.maxsize):
            raise ValueError(f"DelayCheck: every must be a whole number >= 1; received {every!r}.")
        self._every = every

    def set_model(self, model: keras.Model) -> None:
        """Called by Keras; warns if a callback before this one will not see its logs."""
        super().set_model(model)
        warn_if_behind(self, READERS, "see its logs")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resets the callback."""
        self._residuals = np.zeros(0)
        self._checked_at, self._warned = -self._every, False
        self._measures: dict[str, float] = {}

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks if it is time, and adds the latest cosine to the batch's logs."""
        exchange = find_exchange(self.model)
        if exchange is None or not exchange.built or not exchange.residuals:
            return
        if exchange.exchanges - self._checked_at >= self._every:
            self._check(exchange)
        self.on_epoch_end(0, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the latest cosine to the epoch's logs."""
        if logs is not None:
            logs.update(self._measures)

    def _check(self, exchange: GradientExchange) -> None:
        self._checked_at = exchange.exchanges
        local = (exchange.group.local(residual, 0).read_value() for residual in exchange.residuals)
        now = np.concatenate([np.ravel(residual) for residual in local])
        value, self._residuals = cosine(self._residuals, now), now
        self._measures = {} if math.isnan(value) else {"residual_cosine": value}
        if value > _LIMIT and not self._warned:
            self._warned = True
            log_info(_DELAYED % (self._every, value, _LIMIT, exchange.compressor))


def cosine(before: np.ndarray, now: np.ndarray) -> float:
    """Returns the cosine between two vectors; NaN if one is empty or zero."""
    if not before.any() or not now.any():
        return math.nan
    before, now = (vector.astype(np.float64) for vector in (before, now))
    return float(before @ now / (np.linalg.norm(before) * np.linalg.norm(now)))


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


def traffic_table(
    exchange: GradientExchange, traffic: Traffic, width: int, largest: int | None = LARGEST
) -> rich.console.Group:
    """Returns what this worker sent, as a sentence and a table of payloads by variable.

    The table is no wider than `width` unless numbers alone need more.

    Args:
        exchange: The exchange whose variables the table lists.
        traffic: The traffic of the exchange.
        width: The width in characters.
        largest: The number of variables with their own row; all others share a row. None: every
            variable has its own row.
    """
    exchanges = traffic.exchanges
    specs = sorted(exchange.specs, key=lambda spec: -spec.elements) if largest else exchange.specs
    if largest and len(specs) > largest + 1:  # a single one takes as much space
        specs, others = specs[:largest], specs[largest:]
    else:
        others = []
    rows = [(spec.path, spec.kind, *_cells([spec], traffic)) for spec in specs]
    if others:
        rows.append((f"{len(others)} others", "", *_cells(others, traffic)))
    header = (traffic.payload_bytes - sum(traffic.tensor_bytes.values())) / exchanges
    rows.append(("header", "", "", f"{header:,.0f}"))
    elements = sum(spec.elements for spec in exchange.specs)
    total = ("total payload", "", f"{elements:,}", f"{traffic.payload_bytes / exchanges:,.0f}")
    sent = traffic.sent_bytes / exchanges
    ring = dense_ring_bytes(exchange.group.size, traffic.dense_bytes / exchanges)
    return rich.console.Group(
        _sent_sentence(sent, ring),
        "",
        f"Payload of one exchange, in bytes, mean of {exchanges:,}:",
        _table(rows, total, width),
    )


def _sent_sentence(sent: float, uncompressed: float) -> str:
    """Compares the bytes that a worker sends in an exchange with those of an all-reduce."""
    if not sent or not uncompressed:
        return f"This worker sent {sent:,.0f} bytes in each exchange."
    sentence = f"This worker sent {sent:,.0f} bytes in each exchange instead of {uncompressed:,.0f}"
    if sent <= uncompressed:
        return f"{sentence}: {uncompressed / sent:,.1f} times fewer."
    times = f"{sent / uncompressed:,.1f} times MORE"
    return f"{sentence}: {times}. The model is too small for this compressor."


def _table(rows: Sequence[tuple[str, ...]], total: tuple[str, ...], width: int) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("variable", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for name in _NUMBERS:
        table.add_column(name, justify="right", no_wrap=True)
    every = [*rows, total, ("", "kind", *_NUMBERS)]
    width_of_others = sum(max(len(row[i]) for row in every) for i in range(1, len(total)))
    room = max(_SHORTEST_NAME, width - width_of_others - 2 * len(total))
    for name, *cells in rows[:-1]:
        table.add_row(shortened(name, room), *cells)
    table.add_row(*rows[-1], end_section=True)
    table.add_row(*total)
    return table


def _cells(specs: Sequence[GradientSpec], traffic: Traffic) -> tuple[str, str]:
    elements = sum(spec.elements for spec in specs)
    payload = sum(traffic.tensor_bytes[spec.path] for spec in specs) / traffic.exchanges
    return f"{elements:,}", f"{payload:,.0f}"


def shortened(path: str, most: int) -> str:
    """Returns a variable's path without its first parts, so that it has `most` characters."""
    if len(path) <= most:
        return path
    _, *parts = path.split("/")
    for first in range(len(parts)):
        short = "/".join(["\N{HORIZONTAL ELLIPSIS}", *parts[first:]])
        if len(short) <= most:
            return short
    return "\N{HORIZONTAL ELLIPSIS}" + path[1 - most :]
