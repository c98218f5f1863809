"""`gradcomp methods`: lists the compressors, and when to use each."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

import tf_gradcomp
from tf_gradcomp.cli.options import json_option, print_json
from tf_gradcomp.near_names import near

_FOLDER = Path(tf_gradcomp.__file__).parent / "compressors"
_FIRST = ("adacomp", "cast", "auto", "no_compression")
_DEFAULT = _FIRST[0]


@dataclasses.dataclass(frozen=True)
class _Method:
    name: str
    what: str
    use: str
    contrib: bool  # whether it is on the shelf for experiments


class CompressorText(click.ParamType):
    """A compressor as text; refuses a misspelled name before any worker starts.

    Other unknown names may be those of methods that the program defines.
    """

    name = "compressor"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text."""
        name = str(value).partition("(")[0].strip().lower()
        known = [method.name for method in described_methods()]
        found = near(name, known)
        if name not in known and found:
            self.fail(
                f"unknown name {name!r}; did you mean {' or '.join(map(repr, found))}? "
                "`gradcomp methods` lists them.",
                param,
                ctx,
            )
        return str(value)


@click.command(short_help="List the compressors, and when to use each.")
@json_option
def methods(as_json: bool) -> None:
    """List the compressors, and when to use each.

    compressor= takes a name, or a name with settings such as "top_k(density=0.02)". The last table
    has the shelf for experiments: these methods are tested alike, but may change or go.
    """
    found = described_methods()
    if as_json:
        print_json(list(map(dataclasses.asdict, found)))
        return
    others = [method for method in found if method.name not in _FIRST]
    first = sorted((m for m in found if m.name in _FIRST), key=lambda m: _FIRST.index(m.name))
    console = Console()
    _show(console, "Start with", first)
    _show(console, "Special cases", [method for method in others if not method.contrib])
    title = "Experiments (compressors.contrib): tested alike, but may change or go"
    _show(console, title, [method for method in others if method.contrib])


def _show(console: Console, title: str, listed: list[_Method]) -> None:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for header in ("compressor=", "what it does", "when to use it"):
        table.add_column(header, min_width=14)
    for method in listed:
        name = f"{method.name}\n(the default)" if method.name == _DEFAULT else method.name
        use = method.use.removeprefix("Use it ")
        table.add_row(Text(name), Text(method.what), Text(use[0].upper() + use[1:]))
    console.print(table)


def described_methods() -> list[_Method]:
    """Reads the docstrings of the methods' classes, without TensorFlow, which takes seconds."""
    found = []
    for path in sorted(_FOLDER.rglob("*.py")):
        contrib = path.parent.name == "contrib"
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and (name := _assigned_name(node)):
                found.append(_described(name, ast.get_docstring(node) or "", contrib))
    # Bases and stages of methods have names, too, but no advice on when to use them.
    return sorted((method for method in found if method.use), key=lambda method: method.name)


def _assigned_name(node: ast.ClassDef) -> str | None:
    """Returns the text that the class assigns to `name`, as every method does."""
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            targets: list[ast.expr] = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        is_name = any(isinstance(target, ast.Name) and target.id == "name" for target in targets)
        if is_name and isinstance(statement.value, ast.Constant):
            return str(statement.value.value)
    return None


def _described(name: str, docstring: str, contrib: bool) -> _Method:
    """The first paragraph of a docstring, and the first sentence on when to use the method."""
    text = re.sub(r"[`*]", "", docstring)
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    use = next((paragraph for paragraph in paragraphs if paragraph.startswith("Use it")), "")
    return _Method(name, paragraphs[0], re.split(r"(?<=\.) ", use, maxsplit=1)[0], contrib)
