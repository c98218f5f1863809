"""dev.py, without making any environment."""

import contextlib
import importlib.util
import os
import re
import runpy
import shutil
import site
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "tf_gradcomp/ops/_tf_gradcomp_ops_2_21.so"


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

    def run(command, tree, variables=None):
        if command[1:] == dev.EXAMPLE:
            ran.append("example")
        else:
            with_keras_2 = variables.get("TF_USE_LEGACY_KERAS") == "1"
            ran.append((command[1 + len(dev.PYTEST) :], with_keras_2))
        return 0

    for name in ("check_python", "prepare", "prepare_tf_keras", "prepare_horovod"):
        monkeypatch.setattr(dev, name, lambda *_: None)
    monkeypatch.setattr(dev, "locked", lambda folder: contextlib.nullcontext())
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


@pytest.mark.parametrize(
    ("tensorflow", "keras", "installable", "expected"),
    [
        ("2.21.0", "3.15.0.dev1", True, None),
        ("", "", True, None),  # the index cannot be asked
        ("2.22.0rc0", "3.16.0.dev1", False, None),
        ("2.22.0rc0", "3.16.0.dev1", True, ("2.22.0rc0", "keras-nightly==3.16.0.dev1")),
        ("2.22.0rc0", "3.15.0.dev1", True, ("2.22.0rc0",)),
        ("2.21.0", "3.16.0.dev1", True, ("2.21.*", "keras-nightly==3.16.0.dev1")),
        ("2.9.0", "4.0.0.dev1", True, ("2.21.*", "keras-nightly==4.0.0.dev1")),
    ],
)
def test_the_next_releases_are_those_newer_than_the_tested_ones(
    dev, monkeypatch, tensorflow, keras, installable, expected
):
    newest = {dev.tensorflow_package(): tensorflow, dev.KERAS_NIGHTLY: keras}
    monkeypatch.setattr(dev, "newest_in_index", newest.get)
    monkeypatch.setattr(dev, "run", lambda *_: 0 if installable else 1)
    target = dev.find_next()
    assert (target and (target.tensorflow, *target.packages)) == expected


def test_versions_of_the_index_are_read(dev, monkeypatch):
    found = dev.subprocess.CompletedProcess([], 0, "keras-nightly (3.16.0.dev1)\nAvailable: 1\n")
    monkeypatch.setattr(dev.subprocess, "run", lambda *_, **__: found)
    assert dev.newest_in_index("keras-nightly") == "3.16.0.dev1"
    found.stdout = ""
    assert dev.newest_in_index("keras-nightly") == ""


@pytest.mark.parametrize("found", [True, False])
def test_the_next_releases_run_an_example_and_some_tests(dev, monkeypatch, found):
    target = dev.dataclasses.replace(dev.NEXT, tensorflow="2.22.0rc0")
    monkeypatch.setattr(dev, "find_next", lambda: target if found else None)
    monkeypatch.setattr(dev, "prepare_keras_nightly", lambda target: None)
    ran = runs_of_pytest(dev, monkeypatch, "--next")
    assert ran == (["example", (["-m", "oldest"], False)] if found else [])


def test_a_failure_of_any_run_of_the_tests_is_the_exit_code(dev, monkeypatch):
    runs_of_pytest(dev, monkeypatch)
    for codes in ([1, 0], [0, 1]):
        exit_codes = iter(codes)
        monkeypatch.setattr(dev, "run", lambda *_, exit_codes=exit_codes: next(exit_codes))
        assert dev.main() == 1
        assert not list(exit_codes)


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


@pytest.fixture
def built_wheel(dev, monkeypatch, tmp_path):
    """Builds a wheel without compiling, downloading or installing; returns what pip was asked."""
    calls = []

    def pip(target, action, what, arguments, variables=None):
        calls.append((action, arguments, variables))
        if action == "download":
            version = arguments[-1].partition("==")[2].replace("*", "0")
            folder = Path(arguments[arguments.index("--dest") + 1])
            with zipfile.ZipFile(folder / "tensorflow.whl", "w") as archive:
                facts = f"tensorflow-{version}.dist-info"
                archive.writestr(f"{facts}/top_level.txt", "tensorflow\n")
                archive.writestr(f"{facts}/METADATA", f"Version: {version}\n")
                for name in ("include/op.h", "include/external/curl.h", "python/ops.so"):
                    archive.writestr(f"tensorflow/{name}", "")
        elif action == "wheel":
            made = Path(arguments[arguments.index("--wheel-dir") + 1])
            made.mkdir()
            (made / "tf_gradcomp-1-new.whl").touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "pip", pip)
    monkeypatch.setattr(dev, "locked", lambda folder: contextlib.nullcontext())
    monkeypatch.setattr(dev, "copy_tree", lambda tree: None)
    monkeypatch.setattr(dev, "make_portable", lambda wheel, dist: shutil.move(wheel, dist))
    for name in ("check_python", "prepare"):
        monkeypatch.setattr(dev, name, lambda *_: None)
    monkeypatch.setattr(dev, "find_compiler", lambda: "g++")

    def build(*options):
        calls.clear()
        monkeypatch.setattr(sys, "argv", ["dev.py", "wheel", *options])
        assert dev.main() == 0
        return calls

    return build


def test_the_wheel_is_built_with_each_supported_tensorflow(built_wheel, tmp_path):
    *_, (action, _, variables) = built_wheel()
    assert action == "wheel"
    folders = variables["TF_GRADCOMP_UNPACKED_TENSORFLOWS"].split(os.pathsep)
    setup = run_setup(TF_GRADCOMP_UNPACKED_TENSORFLOWS=os.pathsep.join(folders))
    versions = [f"{major}.{minor}.0" for major, minor in setup["SUPPORTED"]]
    assert setup["TENSORFLOWS"] == dict(zip(versions, folders, strict=True))
    unpacked = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert unpacked == {"METADATA", "top_level.txt", "op.h"}
    (wheel,) = (tmp_path / "dist").iterdir()
    wheel.rename(wheel.with_name("tf_gradcomp-0-earlier.whl"))
    assert [action for action, *_ in built_wheel()] == ["wheel"]  # nothing is downloaded again
    assert [*(tmp_path / "dist").iterdir()] == [wheel]


def test_the_wheel_is_checked_with_the_newest_and_the_oldest_tensorflow_and_no_compiler(
    dev, built_wheel, monkeypatch
):
    ran = []
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    monkeypatch.setattr(dev, "make_environment", lambda folder: None)
    monkeypatch.setattr(dev, "run", lambda command, *_: ran.append(command[1:]))
    monkeypatch.setattr(shutil, "copy", lambda source, folder: source)
    calls = built_wheel("--check")
    installed = [arguments for action, arguments, _ in calls if action == "install"]
    wheel = str(dev.ROOT / "dist" / "tf_gradcomp-1-new.whl")
    for target, (*_, packages) in ((dev.NEWEST, installed[:2]), (dev.OLDEST, installed[2:])):
        assert packages == [*dev.packages_of(target), wheel]
    *_, (_, _, variables) = calls
    assert Path(variables["PATH"]).parts[-2:] == ("venv", "bin")
    assert [arguments[0] for arguments in ran] == ["-c", "info", "run"] * 2


def run_setup(**variables):
    """The names that setup.py defines, without building anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(setuptools, "setup", lambda **_: None)
        for name in ("TF_GRADCOMP_UNPACKED_TENSORFLOWS", "CXX"):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        return runpy.run_path("setup.py")


@pytest.fixture
def installed_tensorflow(monkeypatch, tmp_path):
    """Makes setup.py find this version in the environment, or none."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    without = [path for path in sys.path if not Path(path, "tensorflow").is_dir()]
    monkeypatch.setattr(sys, "path", without)
    monkeypatch.setattr(site, "getusersitepackages", lambda: "/nowhere")

    def install(version):
        shutil.rmtree(tmp_path)
        packages = {"tensorflow_addons": "0.23.0", **({"tensorflow": version} if version else {})}
        for name, one in packages.items():
            facts = tmp_path / f"{name}-{one}.dist-info"
            facts.mkdir(parents=True)
            (facts / "METADATA").write_text(f"Name: {name}\nVersion: {one}\n")
            (facts / "top_level.txt").write_text(f"{name}\n")
            (tmp_path / name / "include").mkdir(parents=True)

    return install


@pytest.mark.parametrize("version", ["2.21.1", "2.22.0-rc0", "3.0.0", "2.16.2", "1.15.5"])
def test_the_ops_are_built_for_newer_tensorflows_with_a_warning(
    installed_tensorflow, capsys, tmp_path, version
):
    installed_tensorflow(version)
    if version < "2.17":
        with pytest.raises(SystemExit, match=rf"supports TensorFlow .*; found {version}: install"):
            run_setup()
        return
    assert run_setup()["TENSORFLOWS"] == {version: str(tmp_path)}
    warning = capsys.readouterr().err
    assert warning.count("\n") == (version != "2.21.1")
    assert f"2.21, and is built for {version}, which is newer." in warning or not warning


def test_without_tensorflow_or_a_compiler_a_build_says_so_before_all_else(
    installed_tensorflow, monkeypatch
):
    installed_tensorflow(None)
    with pytest.raises(SystemExit, match=r"^tf_gradcomp needs TensorFlow .*or install a wheel"):
        run_setup()
    with pytest.raises(
        SystemExit, match=r"^tf_gradcomp needs a C\+\+ compiler, .*no/such"
    ) as named:
        run_setup(CXX="/no/such/compiler")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"apt install g\+\+.*or install a wheel") as error:
        run_setup()
    for one in (named, error):
        assert_one_sentence(one)


def test_an_unchanged_environment_is_left_alone(dev, monkeypatch, tmp_path):
    """And one whose op library or build inputs have changed is not."""
    target = dev.dataclasses.replace(dev.NEWEST, folder=tmp_path)
    installed = []
    monkeypatch.setattr(dev, "ROOT", tmp_path / "tree")

    def pip(target, action, what, needs, *_):
        installed.extend(needs)

    monkeypatch.setattr(dev, "pip", pip)
    monkeypatch.setattr(dev, "make_environment", lambda folder: make_fake_environment(folder))
    for name in ("setup.py", "pyproject.toml", LIBRARY):
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
    (tree / LIBRARY).unlink()
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
        (root / LIBRARY).parent.mkdir(parents=True)
        (root / LIBRARY).write_text(content)
    (source / "tests").mkdir()
    (source / "tests" / "test_new.py").touch()
    (copy / "deleted.py").touch()
    monkeypatch.setattr(dev, "ROOT", source)
    dev.copy_tree(copy)
    assert (copy / LIBRARY).read_text() == "oldest"
    assert (copy / "tests" / "test_new.py").exists()
    assert not (copy / "deleted.py").exists()
