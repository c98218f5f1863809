"""Tests `gradcomp methods`, and the help of the commands."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tf_gradcomp import compressors
from tf_gradcomp.cli.main import main

pytestmark = pytest.mark.quick


def test_the_module_of_the_command_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module("tf_gradcomp.cli", run_name="__main__")
    assert capsys.readouterr().out.startswith("gradcomp, version")


def commands():
    return [main.commands[name] for name in sorted(main.commands)]


def test_every_compressor_is_listed_with_what_it_is_for():
    table = CliRunner().invoke(main, ["methods"]).output
    found = json.loads(CliRunner().invoke(main, ["methods", "--json"]).output)
    values = map(vars(compressors).get, compressors.__all__)
    local = [value.name for value in values if isinstance(getattr(value, "name", None), str)]
    assert {"adacomp", "auto", "no_compression"} <= set(local)
    described = {method["name"]: method for method in found}
    for name in local:
        assert f" {name} " in table
        assert described[name]["what"].endswith(".")
        assert described[name]["use"].startswith("Use it")
        assert described[name]["use"].endswith(".")


def test_methods_on_the_shelf_for_experiments_have_a_table_of_their_own():
    before, shelf_table = CliRunner().invoke(main, ["methods"]).output.split("Experiments")
    first, special = before.split("Special cases")
    found = json.loads(CliRunner().invoke(main, ["methods", "--json"]).output)
    folder = Path(compressors.__file__).parent / "contrib"
    shelf = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {method["name"] for method in found if method["contrib"]} == shelf
    for method in found:
        tables = [f" {method['name']} " in table for table in (first, special, shelf_table)]
        assert sum(tables) == 1, method
        assert tables[-1] == (method["name"] in shelf)
    assert " adacomp " in first
    assert "(the default)" in first


def test_methods_are_those_that_can_be_named():
    found = json.loads(CliRunner().invoke(main, ["methods", "--json"]).output)
    assert [method["name"] for method in found] == sorted(compressors.names())


def test_methods_are_listed_without_tensorflow():
    code = """
import sys
sys.modules["tensorflow"] = None  # cannot be imported
from tf_gradcomp.cli.main import main
main(["methods"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "power_sgd" in done.stdout


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_every_command_prints_json_on_request_and_explains_itself_in_sentences(command):
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert "--json" in [name for option in options for name in option.opts]
    for text in [command.help, *(option.help for option in options)]:
        assert text, command.name
        first, last = text.split()[0], text.rstrip()
        assert first[0].isupper(), text
        assert last.endswith(".") or "Example" in text, text
        assert len(text.split()) > 3, text
