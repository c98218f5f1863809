"""Settings of malloc that benchmarks compare: see docs/malloc.md."""

from __future__ import annotations

import click

from tf_gradcomp.environment import MALLOC
from tf_gradcomp.launch import malloc

SETTINGS = {
    name: {malloc.TUNABLES: "", **malloc.settings({MALLOC: name})}
    for name in (malloc.DEFAULT, malloc.TUNED)
}

malloc_option = click.option(
    "--malloc",
    "mallocs",
    type=click.Choice(list(SETTINGS)),
    multiple=True,
    default=tuple(SETTINGS),
    show_default=True,
    help="The settings of malloc to measure under.",
)
