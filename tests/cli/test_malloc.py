"""`gradcomp run` tunes `malloc` for its workers, unless the user decides otherwise."""

import os

import pytest

from tests.cli.test_run import gradcomp
from tf_gradcomp.environment import MALLOC
from tf_gradcomp.launch.resources import TUNABLES, malloc_settings

pytestmark = pytest.mark.quick

PROGRAM = """
import os
print(f"[{os.environ.get('GLIBC_TUNABLES')}]")
"""


@pytest.fixture
def shown(tmp_path):
    """Runs a job whose workers print their setting; returns its stdout and stderr."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    neutral = {name: value for name, value in os.environ.items() if name not in (TUNABLES, MALLOC)}

    def run(*options, **env):
        done = gradcomp("run", "-n", "2", *options, program, env={**neutral, **env})
        return done.stdout, done.stderr

    return run


def test_workers_get_the_settings_and_verbose_output_names_them_once(shown):
    stdout, stderr = shown("--verbose")
    expected = malloc_settings({})[TUNABLES]
    assert stdout.count(f"[{expected}]") == 2
    assert stderr.count(expected) == 1
    assert "GRADCOMP_MALLOC=default" in stderr


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({TUNABLES: "glibc.malloc.check=0"}, "glibc.malloc.check=0"),
        ({TUNABLES: ""}, ""),
        ({MALLOC: "default"}, "None"),
    ],
    ids=["own", "empty", "default"],
)
def test_the_user_decides(shown, env, expected):
    stdout, stderr = shown("--verbose", **env)
    assert stdout.count(f"[{expected}]") == 2
    assert TUNABLES not in stderr


def test_another_value_is_refused_before_anything_starts(shown):
    stdout, stderr = shown(**{MALLOC: "jemalloc"})
    assert not stdout
    assert "GRADCOMP_MALLOC: expected tuned or default; received 'jemalloc'." in stderr
