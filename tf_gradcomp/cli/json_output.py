"""The option `--json` of all commands: what a program reads instead of a table."""

from __future__ import annotations

import json
from typing import Any

import click

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON on stdout."
)


def print_json(result: Any) -> None:
    """Prints a result that a program can read."""
    click.echo(json.dumps(result, indent=1))
