"""Other backends of Keras are refused at the import, by a message that says what to set."""

import json
import os
import subprocess
import sys
import types

import pytest

from tf_gradcomp import keras_backend

pytestmark = pytest.mark.quick
MESSAGE = (
    "tf_gradcomp works with Keras on TensorFlow only, and {} says that Keras' backend is {}: set "
    "the environment variable KERAS_BACKEND to tensorflow before Keras is imported."
)


def test_the_import_fails_before_keras_is_imported():
    program = "import sys\ntry:\n  import tf_gradcomp\nfinally:\n  print('keras' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == "False\n"
    message = MESSAGE.format("the environment variable KERAS_BACKEND", "jax")
    assert done.stderr.splitlines()[-1] == f"ImportError: {message}"


@pytest.fixture
def keras(monkeypatch, tmp_path):
    """Sets Keras' configuration, or its backend as if it were imported."""
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "keras", raising=False)

    def choose(variable=None, file=None, imported=None):
        if variable is not None:
            monkeypatch.setenv("KERAS_BACKEND", variable)
        if file is not None:
            (tmp_path / "keras.json").write_text(file)
        if imported is not None:
            backend = types.SimpleNamespace(backend=lambda: imported)
            monkeypatch.setitem(sys.modules, "keras", types.SimpleNamespace(backend=backend))

    return choose


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"variable": ""},
        {"file": "{"},
        {"file": "{}"},
        {"file": json.dumps({"backend": "jax"}), "variable": "tensorflow"},
        {"variable": "jax", "imported": "tensorflow"},
    ],
)
def test_tensorflow_as_keras_finds_it_is_accepted(keras, chosen):
    keras(**chosen)
    keras_backend.check()


def test_the_message_names_what_chose_the_backend(keras, tmp_path):
    sources = {}
    for source, chosen in (
        (tmp_path / "keras.json", {"file": json.dumps({"backend": "torch"})}),
        ("the environment variable KERAS_BACKEND", {"variable": "torch"}),
        ("keras.config.backend()", {"imported": "torch"}),
    ):
        keras(**chosen)
        with pytest.raises(ImportError) as caught:
            keras_backend.check()
        sources[source] = str(caught.value)
    assert sources == {source: MESSAGE.format(source, "torch") for source in sources}


def test_keras_2_ignores_the_choice(keras, monkeypatch):
    keras(variable="jax")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    keras_backend.check()
    monkeypatch.delenv("TF_USE_LEGACY_KERAS")
    monkeypatch.setattr(keras_backend.metadata, "version", {"keras": "2.15.0"}.get)
    keras_backend.check()
