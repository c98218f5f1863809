"""Imports point one way: a room may import from those below it, and never the other way round."""

import ast
from pathlib import Path

import pytest

import tf_gradcomp

pytestmark = pytest.mark.quick

ROOT = Path(tf_gradcomp.__file__).parent
# From the lowest to the highest. A file of the package's own folder is a room by itself.
ROOMS = [
    "keras_backend",
    "ops",
    "environment",
    "stall_reports",
    "tf_config",
    "horovod_here",
    "near_names",
    "private",
    "policy",
    "compressors",
    "adam",
    "chief",
    "whole_files",
    "groups",
    "exchange",
    "advice",
    "private/keras",
    "keras_version",
    "strategy",
    "keras/common",
    "keras/keras3",
    "keras/keras2",
    "keras/callbacks",
    "callbacks",
    "simulation",
    "launch",
    "__init__",
    "cli",
]
WITHOUT_KERAS = {*ROOMS[: ROOMS.index("private/keras")], "launch"}
SOURCES = sorted(ROOT.rglob("*.py"))


def name_of(source):
    return str(source.relative_to(ROOT))


def room_of(source):
    first, *rest = source.relative_to(ROOT).parts
    if first == "private" and rest[0].startswith("keras"):
        return "private/keras"
    if first == "keras" and len(rest) > 1 and rest[0] != "local":
        return f"{first}/{rest[0]}"
    return "keras/common" if first == "keras" else first.removesuffix(".py")


def imported(source):
    """The modules that a file imports, at its top or within its functions; not for types alone."""
    tree = ast.parse(source.read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_modules(source):
    """The modules of the package that a file imports, as paths without `.py`."""
    for module in imported(source):
        parts = module.split(".")
        if parts[0] == "tf_gradcomp":
            yield parts[1:]


def module_file(parts):
    """The file that an import names, of a module or of something in it."""
    for end in (len(parts), len(parts) - 1):
        path = ROOT.joinpath(*parts[:end])
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        if (path / "__init__.py").is_file():
            return path / "__init__.py"
    raise AssertionError(f"no module {'.'.join(parts)}")


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_no_arrow_runs_backwards(source):
    local = ROOMS.index(room_of(source))
    for parts in own_modules(source):
        other = room_of(module_file(parts))
        arrow = f"{name_of(source)} -> {'/'.join(parts)}"
        assert ROOMS.index(other) <= local, (
            f"{arrow} runs backwards: from {ROOMS[local]} to {other}"
        )


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_the_core_is_without_keras(source):
    if room_of(source) in WITHOUT_KERAS:
        assert not [module for module in imported(source) if module.split(".")[0] == "keras"]


def test_ray_is_not_imported():
    found = {module.split(".")[0] for source in SOURCES for module in imported(source)}
    assert "ray" not in found


def test_no_modules_import_each_other():
    graph = {
        source: {module_file(parts) for parts in own_modules(source)} - {source}
        for source in SOURCES
    }
    finished, path = set(), []

    def walk(source):
        if source in path:
            circle = [*path[path.index(source) :], source]
            raise AssertionError(" -> ".join(map(name_of, circle)))
        if source not in finished:
            path.append(source)
            for other in sorted(graph[source]):
                walk(other)
            finished.add(path.pop())

    for source in SOURCES:
        walk(source)


def test_the_parts_for_keras_2_and_3_do_not_import_each_other():
    for source in SOURCES:
        if room_of(source) in ("keras/keras2", "keras/keras3"):
            other = {"keras/keras2": "keras3", "keras/keras3": "keras2"}[room_of(source)]
            assert not [parts for parts in own_modules(source) if parts[:2] == ["keras", other]]


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_no_stack_is_inspected_and_no_class_is_swapped(source):
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("_getframe", "currentframe", "f_back"), ast.unparse(node)
            swaps = node.attr == "__class__" and isinstance(node.ctx, ast.Store)
            assert not swaps, ast.unparse(node)
        if isinstance(node, ast.Call):
            assert "'__class__'" not in map(ast.unparse, node.args), ast.unparse(node)
