"""Shows predictions as a table and as a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from tf_gradcomp.advice.cost_model import Curve, Kind, Prediction

WORTHWHILE = 0.05  # of a step: predictions are not more exact than that
_WIDTH = 110
_TIMES = ("compute", "encode", "latency", "transfer", "decode", "step")


def table(predictions: Sequence[Prediction], curves: Mapping[Kind, Curve]) -> str:
    """The table of all predictions, and below it the measured collectives.

    Args:
        predictions: A row for each; the others are compared with the first.
        curves: The measured times of all kinds of collectives that are needed.
    """
    rows = Table(title="Milliseconds of a step", title_justify="left")
    rows.add_column("compressor", min_width=14, overflow="fold")
    for title in (*_TIMES, "times faster", "bytes sent"):
        rows.add_column(title, justify="right", no_wrap=True)
    for one in predictions:
        times = (_milliseconds(getattr(one, name)) for name in _TIMES)
        faster = predictions[0].step / one.step
        rows.add_row(one.method, *times, f"{faster:.2f}", f"{one.sent_bytes:,.0f}")
    console = Console(width=_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(rows)
        for kind, curve in curves.items():
            most = curve.points[-1][0]
            latency, whole = (_milliseconds(curve.seconds(sent)) for sent in (0, most))
            console.print(f"{kind.wish}, {kind.dtype}: {latency} ms, {whole} ms for {most:,.0f} B")
    return capture.get()


def verdict(predictions: Sequence[Prediction]) -> str:
    """Says what to use and what it saves, or that compression will not pay; baseline first."""
    baseline, best = predictions[0], min(predictions, key=lambda one: one.step)
    if best is baseline:
        return f"Compression will not pay: nothing here is faster than {baseline.method}."
    what = "a step" if best.compute else "the exchange of a step"
    times = f"{_milliseconds(best.step)} ms instead of {_milliseconds(baseline.step)} ms"
    if best.step > (1 - WORTHWHILE) * baseline.step:
        return f"Compression will not pay: with {best.method}, the fastest, {what} takes {times}."
    return f'Use compressor="{best.method}": {what} takes {times}.'


def line(predictions: Sequence[Prediction]) -> str:
    """A line that says how long the exchange of a step takes with each method."""
    return ", ".join(f"{one.method} {_milliseconds(one.exchange)} ms" for one in predictions)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"
