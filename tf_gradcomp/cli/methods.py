"""`gradcomp methods`: lists the compressors, and when to use each."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tf_gradcomp.cli.options import json_option, print_json


@dataclasses.dataclass(frozen=True)
class _Method:
    name: str
    what: str
    use: str
    contrib: bool  # whether it is on the shelf for experiments


@click.command(short_help="List the compressors, and when to use each.")
@json_option
def methods(as_json: bool) -> None:
    """List the compressors, and when to use each.

    compressor= takes a name, or a name with settings such as "top_k(density=0.02)". The second
    table has the shelf for experiments: these methods are tested alike, but may change or go.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    found = _methods()
    if as_json:
        print_json(list(map(dataclasses.asdict, found)))
        return
    console = Console()
    for contrib, title in (
        (False, None),
        (True, "compressors.contrib: tested alike, but may change or go"),
    ):
        table = Table("compressor=", "what it does", "when to use it", title=title)
        for method in found:
            if method.contrib == contrib:
                table.add_row(Text(method.name), Text(method.what), Text(method.use))
        console.print(table)


def _methods() -> list[_Method]:
    # Imports TensorFlow, so it is here: `gradcomp run` and `--help` must start fast.
    from tf_gradcomp.compressors import registry

    return [_described(name, registry.class_named(name)) for name in registry.names()]


def _described(name: str, method: type[Any]) -> _Method:
    """The first paragraph of a docstring, and the first sentence on when to use the method."""
    text = re.sub(r"[`*]", "", inspect.getdoc(method) or "")
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    use = next((paragraph for paragraph in paragraphs if paragraph.startswith("Use it")), "")
    first_sentence = re.split(r"(?<=\.) ", use, maxsplit=1)[0]
    contrib = ".contrib." in method.__module__
    return _Method(name, paragraphs[0], first_sentence, contrib)
