"""The types of options that several commands take."""

from __future__ import annotations

import math
from typing import Any

import click


class Threads(click.ParamType):
    """A number of threads, or `auto`: this machine's cores shared out among the workers."""

    name = "auto|N"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """The number, or `auto`."""
        if value == "auto":
            return value
        if value.isdecimal() and int(value) > 0:
            return int(value)
        self.fail(f"{value!r} is neither a number of threads nor 'auto'.", param, ctx)


class Seconds(click.FloatRange):
    """A time; unlike click's own range, without NaN."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is no number of seconds.", param, ctx)
        return seconds


class Workers(click.IntRange):
    """A number of workers; it knows what users of `mpirun -np` write."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        if str(value).startswith("p"):
            self.fail("there is no option -np; write -n, as in -n 2.", param, ctx)
        return super().convert(value, param, ctx)
