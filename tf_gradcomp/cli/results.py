"""Checks, before the work of a command begins, that its results can be written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click


def results_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds `--results`, a `Path`, and `--overwrite` to a command, for `results_folder`."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option(
            "--overwrite",
            is_flag=True,
            help="Replace the results of an earlier run in that folder.",
        )(command)
        return click.option(
            "--results",
            default=default,
            metavar="FOLDER",
            type=click.Path(file_okay=False, writable=True, path_type=Path),
            help="Write all results into this folder.",
        )(command)

    return add


def results_folder(folder: Path, files: Iterable[str], overwrite: bool) -> Path:
    """Makes the folder into which a command will write `files`, and returns it.

    Files of an earlier run are removed if they may be overwritten, so that all files are of one
    run.
    """
    found = [name for name in dict.fromkeys(files) if (folder / name).exists()]
    if found and not overwrite:
        raise click.UsageError(
            f"'{folder}' holds the results of an earlier run ({', '.join(found)}): give another "
            "folder by --results, or --overwrite."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(
            f"The folder for the results cannot be made: {error}; give another by --results."
        ) from error
    for name in found:
        (folder / name).unlink()
    return folder


def check_plots(way_out: str) -> None:
    """Refuses to begin what would end in a plot if matplotlib cannot draw one."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.UsageError(
            f"The plot needs matplotlib, which cannot be imported ({error}): "
            f"pip install matplotlib, or {way_out}."
        ) from error
