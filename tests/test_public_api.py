"""Tests the names that `import tf_gradcomp` offers, and the cost of the import."""

import importlib
import inspect
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import keras
import pytest

import tf_gradcomp as gc

pytestmark = pytest.mark.quick

PUBLIC = [
    "Advice",
    "Autoencoder",
    "CompressedAllReduce",
    "CompressedOptimizer",
    "Gossip",
    "HorovodGroup",
    "LocalSteps",
    "MultiWorkerMirroredStrategy",
    "Policy",
    "WorkersDisagreeError",
    "__version__",
    "advise",
    "broadcast_initial_state",
    "callbacks",
    "compressors",
    "is_chief",
    "ops",
    "simulation",
    "worker_path",
]
MODULES = ["callbacks", "compressors", "ops", "simulation"]
NAMESPACES = ["tf_gradcomp", *(f"tf_gradcomp.{module}" for module in MODULES)]


def public_objects():
    for namespace in NAMESPACES:
        module = importlib.import_module(namespace)
        for name in module.__all__:
            if name != "__version__":
                yield f"{namespace}.{name}", getattr(module, name)


def loads_tensorflow(statement):
    program = f"import sys\n{statement}\nprint('tensorflow' in sys.modules, 'keras' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True, timeout=180
    )
    return "True" in run.stdout


def test_public_names():
    assert sorted(gc.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(gc))
    assert all(getattr(gc, name) is not None for name in PUBLIC)
    assert gc.compressors.AdaComp
    assert gc.callbacks.CompressionMonitor
    assert gc.callbacks.BackupAndRestore
    assert gc.callbacks.BroadcastInitialState
    assert gc.callbacks.CollectState
    assert gc.callbacks.DelayCheck


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tf_gradcomp' has no attribute 'compress'"):
        _ = gc.compress


@pytest.mark.parametrize(
    "statement", ["import tf_gradcomp", "import tf_gradcomp.cli.main", "import tf_gradcomp.launch"]
)
def test_tensorflow_is_not_loaded_before_it_is_needed(statement):
    assert not loads_tensorflow(statement)


def test_tensorflow_is_loaded_with_what_needs_it():
    assert loads_tensorflow("import tf_gradcomp; tf_gradcomp.Policy")


def test_a_program_that_imports_it_after_keras_can_load_what_was_saved(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(gc.CompressedOptimizer("adam"), loss="mse")
    model.save(tmp_path / "model.keras")
    autoencoder = gc.Autoencoder()
    autoencoder.save(tmp_path / "autoencoder.keras")
    program = """
import sys, keras, tf_gradcomp
model, autoencoder = (keras.models.load_model(path) for path in sys.argv[1:])
print(model.optimizer, autoencoder)
"""
    paths = [tmp_path / "model.keras", tmp_path / "autoencoder.keras"]
    command = [sys.executable, "-c", program, *paths]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=180)
    assert "CompressedOptimizer" in run.stdout
    assert "Autoencoder" in run.stdout


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_star_import(namespace):
    names = {}
    exec(f"from {namespace} import *", names)
    assert set(importlib.import_module(namespace).__all__) <= set(names)


@pytest.mark.parametrize(
    ("name", "value"), [*public_objects()], ids=[name for name, _ in public_objects()]
)
def test_public_names_have_docstrings(name, value):
    assert inspect.getdoc(value), name
    if not inspect.isclass(value):
        return
    for attribute, member in vars(value).items():
        public = not attribute.startswith("_")
        if public and (inspect.isfunction(member) or isinstance(member, (property, classmethod))):
            assert inspect.getdoc(getattr(value, attribute)), f"{name}.{attribute}"


@pytest.mark.parametrize(
    ("name", "value"), [*public_objects()], ids=[name for name, _ in public_objects()]
)
def test_public_functions_are_typed(name, value):
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        assert signature.return_annotation is not inspect.Signature.empty, name
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, f"{name}, {parameter}"


def test_the_package_is_marked_as_typed():
    assert (Path(gc.__file__).parent / "py.typed").exists()


def test_version():
    assert gc.__version__ == metadata.version("tf-gradcomp")
    assert gc.__version__.count(".") == 2
