"""Settings of malloc that benchmarks compare: see docs/malloc.md."""

from __future__ import annotations

import click

from tf_gradcomp.environment import MALLOC
from tf_gradcomp.launch.resources import DEFAULT, TUNABLES, TUNED, malloc_settings

SETTINGS = {name: {TUNABLES: "", **malloc_settings({MALLOC: name})} for name in (DEFAULT, TUNED)}

malloc_option = click.option(
    "--malloc",
    "mallocs",
    type=click.Choice(list(SETTINGS)),
    multiple=True,
    default=tuple(SETTINGS),
    show_default=True,
    help="The settings of malloc to measure under.",
)
