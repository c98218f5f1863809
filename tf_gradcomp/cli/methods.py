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


@click.command(short_help="List the compressors, and when to use each.")
@json_option
def methods(as_json: bool) -> None:
    """List the compressors, and when to use each.

    compressor= takes a name, or a name with settings such as "top_k(density=0.02)".
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    found = _methods()
    if as_json:
        print_json(list(map(dataclasses.asdict, found)))
        return
    table = Table("compressor=", "what it does", "when to use it")
    for method in found:
        table.add_row(*map(Text, dataclasses.astuple(method)))
    Console().print(table)


def _methods() -> list[_Method]:
    # Imports TensorFlow, so it is here: `gradcomp run` and `--help` must start fast.
    from tf_gradcomp.compressors import registry

    return [_described(name, registry.class_named(name)) for name in registry.names()]


def _described(name: str, method: type[Any]) -> _Method:
    """The first paragraph of a docstring, and the first sentence on when to use the method."""
    text = re.sub(r"[`*]", "", inspect.getdoc(method) or "")
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    use = next((paragraph for paragraph in paragraphs if paragraph.startswith("Use it")), "")
    return _Method(name, paragraphs[0], re.split(r"(?<=\.) ", use, maxsplit=1)[0])
