"""Options that several commands take, their types, and the checks of `--results`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click


class Seconds(click.FloatRange):
    """A time in seconds; refuses NaN, which click's own range accepts."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


class Workers(click.IntRange):
    """A number of workers; explains the option `-np`, which belongs to `mpirun`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        if str(value).startswith("p"):
            self.fail("there is no option -np; write -n, as in -n 2.", param, ctx)
        return super().convert(value, param, ctx)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON on stdout."
)


def print_json(result: Any) -> None:
    """Prints a machine-readable result."""
    click.echo(json.dumps(result, indent=1))


def results_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds `--results`, a `Path`, and `--overwrite` to a command, for `results_folder`."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option(
            "--overwrite",
            is_flag=True,
            help="Replace the results of an earlier run in the results folder.",
        )(command)
        return click.option(
            "--results",
            default=default,
            metavar="FOLDER",
            type=click.Path(file_okay=False, writable=True, path_type=Path),
            help="Write all results into this folder.",
        )(command)

    return add


def refuse_earlier_results(folder: Path, files: Iterable[str], overwrite: bool) -> list[str]:
    """Returns which files of an earlier run are in a folder; refuses them unless `overwrite`."""
    found = [name for name in dict.fromkeys(files) if (folder / name).exists()]
    if found and not overwrite:
        raise click.UsageError(
            f"'{folder}' holds the results of an earlier run ({', '.join(found)}): give another "
            "folder by --results, or --overwrite."
        )
    return found


def results_folder(folder: Path, files: Iterable[str], overwrite: bool) -> Path:
    """Makes the folder into which a command will write `files`, and returns it.

    Files of an earlier run are removed if they may be overwritten, so that all files belong to one
    run.
    """
    found = refuse_earlier_results(folder, files, overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(
            f"Cannot create the folder for the results: {error}; give another folder by --results."
        ) from error
    for name in found:
        (folder / name).unlink()
    return folder


def check_plots(alternative: str) -> None:
    """Raises early if a plot is wanted but matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.UsageError(
            f"The plot needs matplotlib, which cannot be imported ({error}): "
            f"pip install matplotlib, or {alternative}."
        ) from error
