"""dev.py, without making any environment."""

import contextlib
import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dev():
    spec = importlib.util.spec_from_file_location("dev", ROOT / "dev.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["dev"] = module  # dataclasses look there for the annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules["dev"]


def assert_one_sentence(error):
    message = str(error.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert len(re.findall(r"\.(\s|$)", message)) == 1


def test_a_missing_compiler_is_named(dev, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"C\+\+ compiler.*install g\+\+") as error:
        dev.find_compiler()
    assert_one_sentence(error)


def test_a_wrong_compiler_is_named(dev, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler -m64")
    with pytest.raises(SystemExit, match="/no/such/compiler") as error:
        dev.find_compiler()
    assert_one_sentence(error)


def test_the_named_compiler_is_taken(dev, monkeypatch):
    monkeypatch.setenv("CXX", f"{sys.executable} -x")
    assert dev.find_compiler() == f"{sys.executable} -x"


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 14, 0)])
def test_an_unsupported_python_is_refused(dev, monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 to 3\.13") as error:
        dev.check_python(dev.NEWEST)
    assert_one_sentence(error)


def test_the_oldest_tensorflow_has_no_newest_python(dev, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    dev.check_python(dev.NEWEST)
    with pytest.raises(SystemExit, match=r"TensorFlow 2\.17.*needs Python 3\.11 to 3\.12"):
        dev.check_python(dev.OLDEST)


def test_keras_2_needs_an_old_python(dev, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    with pytest.raises(
        SystemExit, match=r"2\.15\.1 needs Python 3\.11.*python3\.11 dev\.py"
    ) as error:
        dev.check_python(dev.KERAS2)
    assert_one_sentence(error)


def runs_of_pytest(dev, monkeypatch, *argv):
    """The arguments of each run of pytest, and whether it is with tf_keras."""
    ran = []

    def run(command, tree, variables):
        ran.append((command[1 + len(dev.PYTEST) :], variables.get("TF_USE_LEGACY_KERAS") == "1"))
        return 0

    for name in ("check_python", "prepare", "prepare_tf_keras", "prepare_horovod"):
        monkeypatch.setattr(dev, name, lambda *_: None)
    monkeypatch.setattr(dev, "alone_in", lambda folder: contextlib.nullcontext())
    monkeypatch.setattr(dev, "run", run)
    monkeypatch.setattr(sys, "argv", ["dev.py", "test", *argv])
    assert dev.main() == 0
    return ran


def test_the_quick_tests_are_run_unless_others_are_named(dev, monkeypatch):
    keras2 = ["-n0", "tests/keras2"]
    for argv, expected in (
        ([], [(["-m", "quick"], False), (["-m", "quick", *keras2], True)]),
        (["--all"], [([], False), (["-m", "tf_keras", *keras2], True)]),
        (["--", "tests/ops", "-x"], [(["tests/ops", "-x"], False)]),
        (["--all", "--", "-m", "not quick"], [(["-m", "not quick"], False)]),
        (["--oldest"], [(["-m", "oldest"], False)]),
        (["--oldest", "--all"], [([], False)]),
        (["--keras2"], [(keras2, False)]),
        (["--tf-keras"], [(["-m", "tf_keras", *keras2], True)]),
        (["--tf-keras", "--", "tests/keras2"], [(["tests/keras2"], True)]),
    ):
        assert runs_of_pytest(dev, monkeypatch, *argv) == expected


def test_a_failure_of_any_run_of_the_tests_is_the_exit_code(dev, monkeypatch):
    runs_of_pytest(dev, monkeypatch)
    for codes in ([1, 0], [0, 1]):
        of_runs = iter(codes)
        monkeypatch.setattr(dev, "run", lambda *_, of_runs=of_runs: next(of_runs))
        assert dev.main() == 1
        assert not list(of_runs)


def test_tf_keras_is_installed_alone_and_once(dev, monkeypatch, tmp_path):
    installed = []
    target = dev.dataclasses.replace(dev.TF_KERAS, folder=tmp_path)
    monkeypatch.setattr(dev, "pip", lambda target, action, what, needs: installed.append(needs))
    dev.prepare_tf_keras(target)
    (tmp_path / "lib/python3.11/site-packages/tf_keras-2.21.0.dist-info").mkdir(parents=True)
    dev.prepare_tf_keras(target)
    assert installed == [["--no-deps", "tf-keras==2.21.*"]]


def test_arguments_after_the_dashes_are_passed_on(dev, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dev.py", "test", "--oldest", "--", "-k", "name"])
    arguments = dev.parse_arguments()
    assert (arguments.target, arguments.extra) == (dev.OLDEST, ["-k", "name"])
    assert arguments.commands == [dev.PYTEST]


def test_wheels_are_built_for_the_tensorflows_with_keras_3(dev, monkeypatch):
    made = []
    monkeypatch.setattr(dev, "check_python", lambda target: None)
    monkeypatch.setattr(dev, "find_compiler", lambda: "g++")
    monkeypatch.setattr(dev, "prepare", lambda *_: None)
    monkeypatch.setattr(
        dev, "make_wheel", lambda target: made.append(target.tensorflow) or dev.ROOT / "dist" / "w"
    )
    for argv, versions in (
        ([], ["2.21.*"]),
        (["2.18", "2.20"], ["2.18.*", "2.20.*"]),
        (["all"], [f"2.{minor}.*" for minor in range(17, 22)]),
    ):
        made.clear()
        monkeypatch.setattr(sys, "argv", ["dev.py", "wheel", *argv])
        assert dev.main() == 0
        assert made == versions
    (supported,) = re.findall(r"^SUPPORTED = (.*)$", (ROOT / "setup.py").read_text(), re.M)
    of_keras_2, *others = eval(supported)
    assert of_keras_2 == (2, 15)
    assert list(dev.TARGETS) == [f"{major}.{minor}" for major, minor in others]


def test_an_unchanged_environment_is_left_alone(dev, monkeypatch, tmp_path):
    """And one whose op library or build inputs have changed is not."""
    target = dev.dataclasses.replace(dev.NEWEST, folder=tmp_path)
    installed = []
    monkeypatch.setattr(dev, "ROOT", tmp_path / "tree")

    def pip(target, action, what, needs, *_):
        installed.extend(needs)

    monkeypatch.setattr(dev, "pip", pip)
    monkeypatch.setattr(dev, "make_environment", lambda folder: make_fake_environment(folder))
    for name in ("setup.py", "pyproject.toml", str(dev.LIBRARY)):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text("")
    project = "[project.optional-dependencies]\nexamples = ['plots']\ntest = ['runner', 'timer']\n"
    (tmp_path / "tree" / "pyproject.toml").write_text(project)

    def installs(*extras):
        installed.clear()
        dev.prepare(target, extras, "g++")
        return installed

    tree = tmp_path / "tree"
    assert f"{tree}[examples]" in installs("examples")
    assert not installs("examples")
    assert installs("test")[:-1] == ["runner", "timer"]  # and the ops are not built again
    assert not installs("examples", "test")
    (tree / "setup.py").write_text("2")
    assert f"{tree}[examples,test]" in installs("test")
    (tree / dev.LIBRARY).unlink()
    assert f"{tree}[examples,test]" in installs("test")


def test_horovod_is_built_once_for_each_tensorflow_and_compiler(dev, monkeypatch, tmp_path):
    """The wheel outlives the environment and the checkout."""
    target = dev.dataclasses.replace(dev.NEWEST, folder=tmp_path / ".venv")
    done = []

    def pip(target, action, what, arguments, variables=None):
        done.append(action)
        if action == "wheel":
            folder = Path(arguments[arguments.index("--wheel-dir") + 1])
            (folder / "horovod-0.whl").touch()

    def actions(tensorflow, compiler="g++"):
        done.clear()
        shutil.rmtree(target.folder, ignore_errors=True)
        packages = target.folder / "lib" / "python3.11" / "site-packages"
        (packages / f"tensorflow_cpu-{tensorflow}.dist-info").mkdir(parents=True)
        dev.prepare_horovod(target, compiler)
        return list(done)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(dev, "pip", pip)
    monkeypatch.setattr(dev, "horovod_variables", lambda *_: {})
    assert actions("2.21.0") == ["install", "wheel", "install"]
    assert actions("2.21.0") == ["install", "install"]
    assert actions("2.21.1") == ["install", "wheel", "install"]
    assert actions("2.21.1", "clang++") == ["install", "wheel", "install"]
    done.clear()
    dev.prepare_horovod(target, "g++")
    assert not done


def test_horovod_is_left_out_on_request(dev, monkeypatch):
    for argv, wanted in (
        (["test"], True),
        (["test", "--without-horovod"], False),
        (["demo"], False),
    ):
        monkeypatch.setattr(sys, "argv", ["dev.py", *argv])
        assert dev.parse_arguments().horovod == wanted


def make_fake_environment(folder):
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "pip").touch()


def test_the_copy_of_the_tree_keeps_its_own_op_library(dev, monkeypatch, tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    for root, content in ((source, "newest"), (copy, "oldest")):
        (root / dev.LIBRARY).parent.mkdir(parents=True)
        (root / dev.LIBRARY).write_text(content)
    (source / "tests").mkdir()
    (source / "tests" / "test_new.py").touch()
    (copy / "deleted.py").touch()
    monkeypatch.setattr(dev, "ROOT", source)
    dev.copy_tree(copy)
    assert (copy / dev.LIBRARY).read_text() == "oldest"
    assert (copy / "tests" / "test_new.py").exists()
    assert not (copy / "deleted.py").exists()
