"""The table of the bytes of an exchange, by variable."""

from __future__ import annotations

from collections.abc import Sequence

import rich.box
import rich.console
import rich.table

from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.state import Traffic
from tf_gradcomp.groups.communicator import dense_ring_bytes
from tf_gradcomp.policy import GradientSpec

LARGEST = 10
_NUMBERS = ("elements", "payload", "ratio")
_SHORTEST_NAME = 12


def made(
    exchange: GradientExchange, traffic: Traffic, width: int, largest: int | None = LARGEST
) -> rich.console.Group:
    """Returns the table, no wider than `width` unless numbers alone need more.

    Args:
        exchange: The exchange whose variables the table lists.
        traffic: The traffic of the exchange.
        width: The width in characters.
        largest: The number of variables with their own row; all others share a row. None: every
            variable has its own row.
    """
    number = traffic.exchanges
    specs = sorted(exchange.specs, key=lambda spec: -spec.elements) if largest else exchange.specs
    if largest and len(specs) > largest + 1:  # one alone takes no more space by itself
        specs, others = specs[:largest], specs[largest:]
    else:
        others = []
    rows = [(spec.path, spec.kind, *_cells([spec], traffic)) for spec in specs]
    if others:
        rows.append((f"{len(others)} others", "", *_cells(others, traffic)))
    header = (traffic.payload_bytes - sum(traffic.tensor_bytes.values())) / number
    rows.append(("header", "", "", f"{header:,.0f}", ""))
    elements = sum(spec.elements for spec in exchange.specs)
    dense, payload = traffic.dense_bytes / number, traffic.payload_bytes / number
    of_all = ("all", "", *_numbers(elements, dense, payload))
    sent = traffic.sent_bytes / number
    ring = dense_ring_bytes(exchange.group.size, dense)
    times = f", {ring / sent:,.1f} times as many" if sent else ""
    return rich.console.Group(
        f"Payload of an exchange by this {exchange.group.kind}, in bytes, over {number} exchanges",
        _table(rows, of_all, width),
        f"Sent per exchange: {sent:,.0f} bytes, including payloads that are forwarded for others.",
        f"A dense all-reduce would send {ring:,.0f}{times}.",
    )


def _table(
    rows: Sequence[tuple[str, ...]], of_all: tuple[str, ...], width: int
) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("variable", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for name in _NUMBERS:
        table.add_column(name, justify="right", no_wrap=True)
    every = [*rows, of_all, ("", "kind", *_NUMBERS)]
    others = sum(max(len(row[i]) for row in every) for i in range(1, len(of_all)))
    room = max(_SHORTEST_NAME, width - others - 2 * len(of_all))
    for name, *cells in rows[:-1]:
        table.add_row(shortened(name, room), *cells)
    table.add_row(*rows[-1], end_section=True)
    table.add_row(*of_all)
    return table


def _cells(specs: Sequence[GradientSpec], traffic: Traffic) -> tuple[str, str, str]:
    elements = sum(spec.elements for spec in specs)
    payload = sum(traffic.tensor_bytes[spec.path] for spec in specs) / traffic.exchanges
    return _numbers(elements, 4 * elements, payload)


def _numbers(elements: int, dense_bytes: float, payload_bytes: float) -> tuple[str, str, str]:
    ratio = f"{dense_bytes / payload_bytes:,.1f}" if payload_bytes else "-"
    return f"{elements:,}", f"{payload_bytes:,.0f}", ratio


def shortened(path: str, most: int) -> str:
    """Returns a variable's path without its first parts, so that it has `most` characters."""
    if len(path) <= most:
        return path
    _, *rest = path.split("/")
    for first in range(len(rest)):
        short = "/".join(["\N{HORIZONTAL ELLIPSIS}", *rest[first:]])
        if len(short) <= most:
            return short
    return "\N{HORIZONTAL ELLIPSIS}" + path[1 - most :]
