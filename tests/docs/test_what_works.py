"""The page's table of what works with what says "yes" where there is a test, and nowhere else."""

import ast
import functools
from pathlib import Path

import pytest

from tests.docs.what_works import COLUMNS, ROWS, named_in, said

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "compatibility.md"


def table():
    """The cells of each row, by the row's name; the header is one of them."""
    section = PAGE.read_text().partition("\n## What works with what\n")[2].partition("\n## ")[0]
    rows = [line.strip("| \n") for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in row.split("|")] for row in rows if not row.startswith("-")]
    return {row[0]: tuple(row[1:]) for row in rows[1:]}, tuple(rows[0])


@functools.cache
def functions(file):
    return {
        node.name
        for node in ast.parse((TESTS / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


def named_tests():
    return sorted({test for cells in ROWS.values() for cell in cells for test in named_in(cell)})


def test_the_table_matches_the_tests():
    rows, header = table()
    assert header == COLUMNS
    assert rows == {name: tuple(map(said, cells)) for name, cells in ROWS.items()}


@pytest.mark.parametrize("test", named_tests())
def test_there_is_the_test(test):
    file, _, name = test.partition("::")
    function, _, parameter = name.partition("[")
    assert function in functions(file)
    if parameter:
        assert f'"{parameter.removesuffix("]")}"' in (TESTS / file).read_text()
