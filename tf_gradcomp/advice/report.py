"""Shows predictions as a table and as a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from tf_gradcomp.advice.cost_model import (
    EXCHANGE_SHARE,
    Curve,
    Kind,
    Prediction,
    best_of,
    enough_local_steps,
    step_with,
)

_WIDTH = 120
_TIMES = ("compute", "encode", "latency", "transfer", "decode", "step")
_RESERVATION = {
    True: "",
    False: " In our measurements, this method trained less well than dense.",
    None: " We did not measure whether this method trains like dense.",
}
_MEASURED = {True: "yes", False: "no", None: "not tried"}
_ACCURACY = (
    "Accuracy: did it train like dense in our tests; what of random gradients waits for later "
    "steps: docs/advise.md"
)


def table(predictions: Sequence[Prediction], curves: Mapping[Kind, Curve]) -> str:
    """Returns a table of all predictions, and below it the measured collectives.

    The other predictions are compared with the first.
    """
    rows = Table(title="Milliseconds of a step", title_justify="left")
    rows.add_column("compressor", min_width=14, overflow="fold")
    for title in (*_TIMES, "times\nfaster", "bytes sent", "trains\nlike dense", "late,\n%"):
        rows.add_column(title, justify="right", no_wrap=True)
    for one in predictions:
        times = (_milliseconds(getattr(one, name)) for name in _TIMES)
        faster = predictions[0].step / one.step
        accuracy = (_MEASURED[one.trains_like_dense], f"{100 * one.late:.1f}")
        rows.add_row(one.method, *times, f"{faster:.2f}", f"{one.sent_bytes:,.0f}", *accuracy)
    console = Console(width=_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(rows)
        console.print(_ACCURACY)
        for kind, curve in curves.items():
            most = curve.points[-1][0]
            latency, whole = (_milliseconds(curve.seconds(sent)) for sent in (0, most))
            console.print(
                f"{kind.request}, {kind.dtype}: {latency} ms, {whole} ms for {most:,.0f} B"
            )
        console.print(local_steps(best_of(predictions, None)))
    return capture.get()


def local_steps(prediction: Prediction) -> str:
    """Returns the times of a step with local steps; empty if the time of computing is unknown."""
    enough = enough_local_steps(prediction)
    if enough is None:
        return ""
    lengths = sorted({4, 16, 64, enough})
    each = ", ".join(f"{n}: {_milliseconds(step_with(prediction, n))}" for n in lengths)
    return (
        f"Milliseconds of a step with {prediction.method} and so many local_steps: {each}. From "
        f"local_steps={enough} on, the exchange takes at most {EXCHANGE_SHARE:.0%} of the time."
    )


def verdict(predictions: Sequence[Prediction]) -> str:
    """Recommends a method, or says that compression will not pay; the baseline comes first."""
    baseline = predictions[0]
    best = best_of(predictions, baseline)
    pays = best is not baseline
    if not pays:
        best = min(predictions, key=lambda one: one.step)
    if best is baseline:
        return f"Compression will not pay: nothing here is faster than {baseline.method}."
    what = "a step" if best.compute else "the exchange of a step"
    how_long = f"{what} takes {_milliseconds(best.step)} ms"
    times = f"{how_long} instead of {_milliseconds(baseline.step)} ms"
    if not pays:
        return f"Compression will not pay: with {best.method}, the fastest, {times}."
    return f'Use compressor="{best.method}": {times}.{_RESERVATION[best.trains_like_dense]}'


def of_tables(paths: Sequence[str]) -> str:
    """A sentence on embeddings, which are exchanged in another way than predicted; or nothing."""
    if not paths:
        return ""
    return (
        f" The gradient of {', '.join(map(repr, paths))} was counted as dense: no_compression and "
        "cast send only the rows of a batch, and may be faster than predicted (docs/advise.md)."
    )


def line(predictions: Sequence[Prediction]) -> str:
    """A line with the time of a step's exchange for each method."""
    return ", ".join(f"{one.method} {_milliseconds(one.exchange)} ms" for one in predictions)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"
