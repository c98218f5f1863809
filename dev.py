#!/usr/bin/env python3
"""Creates the environment, builds the ops, and runs the demonstration, tests, checks or linters.

    python3 dev.py demo
    python3 dev.py test                    # the quick tests: whether this checkout is sound
    python3 dev.py test --all              # every test
    python3 dev.py test -- -k strategy     # what follows -- goes to pytest, and chooses the tests
    python3 dev.py test --oldest           # some tests with the oldest TensorFlow supported
    python3 dev.py test --keras2           # those of Keras 2, with TensorFlow 2.15
    python3 dev.py test --tf-keras         # some of those, with the newest TensorFlow and tf_keras
    python3 dev.py test --next             # an example and some tests, with the next releases
    python3 dev.py kernels                 # whether a kernel is far slower than recorded
    python3 dev.py lint
    python3 dev.py docs                    # the documentation as a site, in build/site
    python3 dev.py docs --serve            # and opens it in a browser
    python3 dev.py wheel                   # a wheel for all supported TensorFlows, in dist/
    python3 dev.py wheel --check           # and installs it into fresh environments, and trains

Needs only Python and a C++ compiler, because this program uses only the standard library. The
environment is a folder next to this file (`.venv`), which is rebuilt only after a change.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent
BUILD_NEEDS = ("setuptools>=77", "wheel")
BUILD_INPUTS = ("pyproject.toml", "setup.py", "custom_ops")
PYTEST = ["-m", "pytest", "-n", "2"]  # in two processes, see tests/conftest.py
KEPT_OBJECTS = ROOT / "build" / "objects"  # for all environments and the wheel: see setup.py
LIBRARIES = "tf_gradcomp/ops/_tf_gradcomp_ops_*.so"
HOROVOD = "horovod==0.28.1"
HOROVOD_NEEDS = ("cloudpickle", "packaging", "psutil", "pyyaml")
# Horovod uses gloo, which it contains. Building takes two minutes of CPU time with HOROVOD_DEBUG,
# and seven without. Tests send little data, so the debug build is fast enough.
HOROVOD_BUILD = {
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_DEBUG": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # newer versions of cmake need it
}
# Horovod includes these headers, but needs them for GPUs only. They take a minute to compile, and
# some have moved since. Empty headers take their place.
XLA_HEADERS = (
    "tensorflow/compiler/tf2xla/xla_op_kernel.h",
    "tensorflow/compiler/tf2xla/xla_op_registry.h",
    "tensorflow/compiler/xla/client/xla_builder.h",
    "tensorflow/compiler/xla/service/custom_call_target_registry.h",
    "tensorflow/compiler/xla/service/hlo.pb.h",
    "tensorflow/compiler/xla/shape.h",
    "tensorflow/compiler/xla/xla_data.pb.h",
)
# Leaves out debug information, and the one of two builds of gloo that Horovod does not link.
HOROVOD_CMAKE = """
set(CMAKE_CXX_FLAGS_DEBUG "" CACHE STRING "")
set(CMAKE_PROJECT_gloo_INCLUDE "${CMAKE_CURRENT_LIST_FILE}")
if(PROJECT_NAME STREQUAL gloo)
  set_property(DIRECTORY PROPERTY EXCLUDE_FROM_ALL TRUE)
endif()
"""
# Of TensorFlow's package: its name and version, the library to link with, and headers.
NEEDED = re.compile(r".*\.dist-info/|tensorflow/(libtensorflow_framework|include/(?!external/))")
KERAS_NIGHTLY = "keras-nightly"
TESTED_KERAS = "3.15"
EXAMPLE = ["-m", "tf_gradcomp.cli", "run", "-n", "2", "keras_examples/minimal.py"]
NOTHING = {"python": None, "digest": None, "extras": []}
NOT_COPIED = (".git", ".venv*", "build", "dist", "results", "*.egg-info", "*.so", "__pycache__")


@dataclasses.dataclass(frozen=True)
class Target:
    """A version of TensorFlow, in its own environment.

    Attributes:
        tensorflow: Its version, for pip.
        pythons: The oldest and the newest Python that it is there for.
        folder: Of the environment.
        in_place: Whether it uses this source tree. The op library lies in the tree and fits one
            TensorFlow only, so all other environments have copies of the tree.
        packages: What else it has, for pip.
        mark: The mark of the tests that are run with it, unless all are wanted.
        tests: More arguments for pytest, such as the folder that all its tests are in.
        variables: Of the processes' environment, for TensorFlow.
    """

    tensorflow: str
    pythons: tuple[tuple[int, int], tuple[int, int]]
    folder: Path
    in_place: bool
    packages: tuple[str, ...] = ()
    mark: str = "oldest"
    tests: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def python(self) -> str:
        """The environment's Python."""
        return str(self.folder / "bin" / "python")

    @property
    def tree(self) -> Path:
        """The source tree that it uses."""
        return ROOT if self.in_place else self.folder / "source"


NEWEST = Target("2.21.*", ((3, 11), (3, 13)), ROOT / ".venv", in_place=True, mark="quick")
OLDEST, *BETWEEN = (
    Target(f"{minor}.*", ((3, 11), (3, 12)), ROOT / f".venv-tf{minor}", in_place=False)
    for minor in ("2.17", "2.18", "2.19", "2.20")
)
TARGETS = {target.tensorflow.removesuffix(".*"): target for target in (OLDEST, *BETWEEN, NEWEST)}
KERAS2 = Target(
    "2.15.1",
    ((3, 11), (3, 11)),
    ROOT / ".venv-keras2",
    in_place=False,
    packages=("tensorflow-addons==0.23.0",),
    mark="",
    tests=("-n0", "tests/keras2"),
)
# `find_next` fills in the versions.
NEXT = dataclasses.replace(
    OLDEST, tensorflow="(next)", pythons=NEWEST.pythons, folder=ROOT / ".venv-next"
)
TF_KERAS = dataclasses.replace(
    NEWEST,
    mark="tf_keras",
    tests=("-n0", "tests/keras2"),
    variables=(("TF_USE_LEGACY_KERAS", "1"),),
)


def main() -> int:
    """Runs the command line's command; returns its exit code."""
    arguments = parse_arguments()
    # uv does not compile bytecode, so the first import does and must keep it for later imports.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if arguments.commands is None:
        return make_wheel(arguments.check)
    target = getattr(arguments, "target", NEWEST)
    check_python(target)
    compiler = find_compiler()
    tests = PYTEST in arguments.commands
    extras = arguments.extras
    if tests and target is NEWEST:
        extras = (*extras, "ray")
    if target is NEXT:
        with locked(NEWEST.folder):
            prepare(NEWEST, extras, compiler)
        target = find_next()
        if target is None:
            return 0
    with locked(target.folder):
        prepare(target, extras, compiler)
        if target.folder == NEXT.folder:
            prepare_keras_nightly(target)
        if tests and target in (NEWEST, TF_KERAS):
            prepare_tf_keras(target)
        if arguments.horovod and target.mark != OLDEST.mark:
            prepare_horovod(target, compiler)
    if tests:
        is_next = target.folder == NEXT.folder
        codes = [run([target.python, *EXAMPLE], target.tree)] if is_next else []
        codes += [run_tests(*test_arguments) for test_arguments in tests_to_run(target, arguments)]
    else:
        commands = [[*command, *arguments.extra] for command in arguments.commands]
        codes = [run([target.python, *command], target.tree) for command in commands]
    return next(filter(None, codes), 0)


def tests_to_run(
    target: Target, arguments: argparse.Namespace
) -> Iterator[tuple[Target, list[str]]]:
    """Yields the targets for pytest, and its arguments: the user's, or the target's tests.

    With the newest TensorFlow, tests run with Keras 3, and then with tf_keras.
    """
    if arguments.extra:
        yield target, arguments.extra
        return
    marked = ["-m", target.mark] if target.mark and not arguments.all else []
    yield target, [*marked, *target.tests]
    if target is NEWEST:
        yield TF_KERAS, ["-m", TF_KERAS.mark if arguments.all else NEWEST.mark, *TF_KERAS.tests]


def find_next() -> Target | None:
    """Returns the pre-releases in the index that are newer than what is tested, if any.

    Only this repository may fail the tests, so pre-releases that cannot be installed are left out.
    """
    tensorflow, keras = map(newest_in_index, (tensorflow_package(), KERAS_NIGHTLY))
    target = dataclasses.replace(NEXT, tensorflow=NEWEST.tensorflow)
    if minor_of(tensorflow) > minor_of(NEWEST.tensorflow):
        target = dataclasses.replace(target, tensorflow=tensorflow)
    if minor_of(keras) > minor_of(TESTED_KERAS):
        target = dataclasses.replace(target, packages=(f"{KERAS_NIGHTLY}=={keras}",))
    packages = packages_of(target)
    if packages == packages_of(NEWEST):
        print("The index has no TensorFlow or Keras that is newer than the tested ones.")
        return None
    command = [NEWEST.python, "-m", "uv", "pip", "install", "--dry-run", *packages]
    if run([*command, "--python", NEWEST.python], ROOT):
        print(f"The next releases cannot be installed here: {', '.join(packages)}.")
        return None
    print(f"The next releases: {', '.join(packages)}", flush=True)
    return target


def newest_in_index(package: str) -> str:
    """Returns the newest version in the index, with pre-releases; empty if there is none."""
    command = [NEWEST.python, "-m", "pip", "index", "versions", "--pre", package]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    versions = re.match(rf"{package} \((\S+)\)", found)
    return versions[1] if versions else ""


def minor_of(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def run_tests(target: Target, arguments: list[str]) -> int:
    """Runs pytest; returns its exit code."""
    variables = {**os.environ, **dict(target.variables)}
    return run([target.python, *PYTEST, *arguments], target.tree, variables)


def parse_arguments() -> argparse.Namespace:
    """The command line, with the extras to install and the commands to run."""
    parser = argparse.ArgumentParser(
        description="Make the environment, build the ops, and run something."
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, description, extras, commands in (
        (
            "demo",
            "train on two workers, dense and compressed, and compare",
            ("examples",),
            [["benchmarks/programs/demo.py"]],
        ),
        (
            "test",
            "run the quick tests, all tests, or those that pytest is told of",
            ("examples", "test"),
            [PYTEST],
        ),
        (
            "kernels",
            "check that no kernel is far slower than recorded",
            (),
            [["benchmarks/kernels.py", "--check"]],
        ),
        (
            "docs",
            "build the documentation as a site",
            ("docs",),
            [["docs/site.py"], ["-m", "zensical", "build", "--strict", "--clean"]],
        ),
        (
            "lint",
            "run ruff, mypy and tests/prose.py",
            ("lint",),
            [
                ["-m", "ruff", "check"],
                ["-m", "ruff", "format", "--check"],
                ["-m", "mypy", "tf_gradcomp"],
                ["tests/prose.py"],
            ],
        ),
    ):
        subparser = subparsers.add_parser(name, help=description, description=description)
        subparser.set_defaults(extras=extras, commands=commands, extra=[], horovod=False)
        if name == "docs":
            subparser.add_argument(
                "--serve",
                dest="commands",
                action="store_const",
                const=[["docs/site.py"], ["-m", "zensical", "serve", "--open"]],
                default=commands,
                help="open it in a browser, until Ctrl-C",
            )
        if len(commands) == 1:
            subparser.add_argument("extra", nargs="*", help="more arguments for it, after --")
        if name == "test":
            for option, target, keras in (
                ("--oldest", OLDEST, "Keras 3"),
                ("--keras2", KERAS2, "Keras 2"),
                ("--tf-keras", TF_KERAS, "tf_keras, which is Keras 2"),
                ("--next", NEXT, "Keras, the newest pre-releases of the index"),
            ):
                subparser.add_argument(
                    option,
                    dest="target",
                    action="store_const",
                    const=target,
                    default=NEWEST,
                    help=f"with TensorFlow {target.tensorflow}, {keras}, in {target.folder.name}",
                )
            subparser.add_argument("--all", action="store_true", help="every test")
            subparser.set_defaults(horovod=True)
            subparser.add_argument(
                "--without-horovod",
                dest="horovod",
                action="store_false",
                help="build no Horovod, and so skip the tests that need it",
            )
    description = "build one wheel for all supported versions of TensorFlow"
    subparser = subparsers.add_parser("wheel", help=description, description=description)
    subparser.set_defaults(commands=None)
    subparser.add_argument(
        "--check",
        action="store_true",
        help="install it into fresh environments without a compiler, and train there",
    )
    return parser.parse_args()


def make_wheel(check: bool) -> int:
    """Builds a wheel that holds an op library for each supported version of TensorFlow."""
    check_python(NEWEST)
    compiler = find_compiler()
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    with locked(NEWEST.folder):
        prepare(NEWEST, ("wheel",), compiler)
        unpacked = unpack_tensorflows()
        with tempfile.TemporaryDirectory() as folder:
            tree, made = Path(folder, "source"), Path(folder, "made")
            copy_tree(tree)
            variables = {
                **build_environment(compiler),
                "TF_GRADCOMP_KEPT_OBJECTS": str(KEPT_OBJECTS),
                "TF_GRADCOMP_UNPACKED_TENSORFLOWS": os.pathsep.join(map(str, unpacked)),
            }
            options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(made), str(tree)]
            pip(NEWEST, "wheel", "the wheel", options, variables)
            (wheel,) = made.glob("*.whl")
            for earlier in dist.glob("tf_gradcomp-*.whl"):
                earlier.unlink()
            make_portable(wheel, dist)
    (wheel,) = dist.glob("tf_gradcomp-*.whl")
    print(f"Built {wheel.relative_to(ROOT)}", flush=True)
    return check_wheel(wheel) if check else 0


def unpack_tensorflows() -> list[Path]:
    """Returns a folder for each supported TensorFlow, shared by all checkouts of a user."""
    folder = wheel_cache().with_name("tensorflows")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        minors = [target.tensorflow.split(".")[:2] for target in (KERAS2, *TARGETS.values())]
        return [unpack_tensorflow(".".join(minor), folder) for minor in minors]


def unpack_tensorflow(minor: str, folder: Path) -> Path:
    """Downloads a version, unless it was before, and keeps what the ops are built with."""
    unpacked = folder / minor
    if unpacked.exists():
        return unpacked
    with tempfile.TemporaryDirectory(dir=folder) as making:
        # Each version is there for this Python; any other has the same headers.
        python = ["--only-binary", ":all:", "--python-version", "3.11"]
        package = f"{tensorflow_package()}=={minor}.*"
        options = ["--no-deps", "--no-cache-dir", *python, "--dest", making, package]
        pip(NEWEST, "download", package, options)
        (wheel,) = Path(making).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(f"{making}/unpacked", filter(NEEDED.match, archive.namelist()))
        return Path(making, "unpacked").replace(unpacked)


def make_portable(wheel: Path, dist: Path) -> None:
    """Writes the wheel to `dist`, for the oldest Linux systems that auditwheel finds it fit for."""
    path = os.pathsep.join([str(NEWEST.folder / "bin"), os.environ.get("PATH", os.defpath)])
    options = ["--wheel-dir", str(dist), "--exclude", "libtensorflow*"]
    repaired = subprocess.run(
        [NEWEST.python, "-m", "auditwheel", "repair", *options, str(wheel)],
        env={**os.environ, "PATH": path},  # auditwheel calls patchelf
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if repaired.returncode:
        print(f"The wheel is for systems like this one only:\n{repaired.stdout}", flush=True)
        shutil.copy(wheel, dist)


def check_wheel(wheel: Path) -> int:
    """Trains on two workers with the newest and the oldest TensorFlow; returns the exit code.

    Each has a new environment without a compiler, with this Python if TensorFlow supports it.
    """
    where = (
        "import sys, tf_gradcomp as gc; print(gc.__version__, gc.__file__); "
        "sys.exit(not gc.__file__.startswith(sys.prefix))"
    )
    for target in (NEWEST, OLDEST):
        oldest, newest = target.pythons
        if not oldest <= sys.version_info[:2] <= newest:
            print(f"TensorFlow {target.tensorflow} is not checked: this Python is too new.")
            continue
        with tempfile.TemporaryDirectory() as folder:
            fresh = dataclasses.replace(target, folder=Path(folder, "venv"))
            make_environment(fresh.folder)
            variables = {**os.environ, "PATH": str(fresh.folder / "bin"), "CXX": "false"}
            pip(fresh, "install", "uv, which installs the rest", ["uv"])
            packages = [*packages_of(target), str(wheel)]
            pip(fresh, "install", f"{packages[0]} and {wheel.name}", packages, variables)
            example = shutil.copy(ROOT / "keras_examples" / "minimal.py", folder)
            gradcomp = shutil.which("gradcomp", path=variables["PATH"]) or "gradcomp"
            for command in (
                [fresh.python, "-c", where],
                [gradcomp, "info"],
                [gradcomp, "run", "-n", "2", example],
            ):
                if code := run(command, Path(folder), variables):
                    return code
    return 0


def check_python(target: Target) -> None:
    """Ends the program if TensorFlow does not support this Python."""
    oldest, newest = target.pythons
    if not oldest <= sys.version_info[:2] <= newest:
        sys.exit(
            f"TensorFlow {target.tensorflow} needs Python {oldest[0]}.{oldest[1]} to "
            f"{newest[0]}.{newest[1]}, and this is Python {platform.python_version()}: run dev.py "
            f"with another one, such as python{newest[0]}.{newest[1]} dev.py."
        )


def find_compiler() -> str:
    """The C++ compiler; ends the program if there is none."""
    named = os.environ.get("CXX")
    candidates = [named] if named else [sysconfig.get_config_var("CXX"), "g++", "c++", "clang++"]
    for candidate in filter(None, candidates):
        if shutil.which(shlex.split(candidate)[0]):
            return candidate
    if named:
        sys.exit(f"The C++ compiler {named!r}, which the variable CXX names, is not there.")
    sys.exit(
        "The native ops need a C++ compiler, and none was found: install g++ (on Debian and "
        "Ubuntu: apt install g++), or name yours in the variable CXX."
    )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes other programs that need the environment wait until it is prepared."""
    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def prepare(target: Target, extras: tuple[str, ...], compiler: str) -> None:
    """Prepares the environment; does nothing if it is up to date."""
    stamp = target.folder / "gradcomp-stamp.json"
    installed = read_stamp(stamp)
    if installed["python"] != sys.version or not (target.folder / "bin" / "pip").exists():
        print(f"Making the environment {target.folder.name} ...", flush=True)
        installed = NOTHING
        make_environment(target.folder)
        pip(target, "install", "uv, which installs the rest", ["uv"])
    if not target.in_place:
        copy_tree(target.tree)
    digest = inputs_digest(target)
    fits = installed["digest"] == digest and any(target.tree.glob(LIBRARIES))
    missing = sorted({*extras} - {*installed["extras"]})
    if fits and not missing:
        return
    all_extras = sorted({*extras, *installed["extras"]})
    stamp.unlink(missing_ok=True)
    if fits:
        needs = [*requirements_of(missing), *packages_of(target)]
        pip(target, "install", f"what is needed for: {', '.join(missing)}", needs)
    else:
        pip(target, "install", "TensorFlow", [*packages_of(target), *BUILD_NEEDS])
        package = f"{target.tree}[{','.join(all_extras)}]"
        pip(
            target,
            "install",
            "tf_gradcomp, which builds its ops",
            ["--no-build-isolation", "--editable", package, *packages_of(target)],
            {**build_environment(compiler), "TF_GRADCOMP_KEPT_OBJECTS": str(KEPT_OBJECTS)},
        )
    environment_facts = {"python": sys.version, "digest": digest, "extras": all_extras}
    stamp.write_text(json.dumps(environment_facts))


def requirements_of(extras: list[str]) -> list[str]:
    """Returns the packages that pyproject.toml lists for the extras."""
    import tomllib  # absent in the older Pythons that check_python refuses

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [package for extra in extras for package in project["optional-dependencies"][extra]]


def prepare_tf_keras(target: Target) -> None:
    """Installs only Keras 2: its dependency `tensorflow` would overwrite `tensorflow-cpu`."""
    installed = f"lib/python*/site-packages/tf_keras-{target.tensorflow}.dist-info"
    if not any(target.folder.glob(installed)):
        package = f"tf-keras=={target.tensorflow}"
        pip(target, "install", "Keras 2 as tf_keras", ["--no-deps", package])


def prepare_keras_nightly(target: Target) -> None:
    """Installs a nightly build of Keras in place of the release, which has the same folder."""
    if target.packages and any(target.folder.glob("lib/python*/site-packages/keras-*.dist-info")):
        run([target.python, "-m", "pip", "uninstall", "--quiet", "--yes", "keras"], ROOT)
        options = ["--no-deps", "--force-reinstall", *target.packages]
        pip(target, "install", "the nightly build of Keras", options)


def prepare_horovod(target: Target, compiler: str) -> None:
    """Installs Horovod, built for this TensorFlow and Python, or an earlier build's wheel."""
    tensorflow = next(target.folder.glob("lib/python*/site-packages/tensorflow*.dist-info")).stem
    built_for = f"{tensorflow}-{sys.implementation.cache_tag}"
    stamp = target.folder / "horovod-stamp"
    if stamp.exists() and stamp.read_text() == built_for:
        return
    folder = wheel_cache() / built_for / digest_of(HOROVOD, HOROVOD_BUILD, compiler)
    is_built = any(folder.glob("horovod-*.whl"))
    needs = [*HOROVOD_NEEDS, *([] if is_built else cmake_package())]
    pip(target, "install", "what Horovod needs", needs)
    if not is_built:
        build_horovod(target, compiler, folder)
    wheels = [str(wheel) for wheel in folder.glob("horovod-*.whl")]
    pip(target, "install", "Horovod", ["--no-deps", "--force-reinstall", *wheels])
    stamp.write_text(built_for)


def build_horovod(target: Target, compiler: str, folder: Path) -> None:
    """Builds Horovod's wheel and moves it into the folder, which other programs may read."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as making:
        options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", making]
        variables = horovod_variables(target, Path(making), compiler)
        pip(target, "wheel", "Horovod, which takes minutes", [*options, HOROVOD], variables)
        for wheel in Path(making).glob("horovod-*.whl"):
            wheel.replace(folder / wheel.name)


def wheel_cache() -> Path:
    """The folder of wheels that take minutes to build, shared by all checkouts of a user."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "tf_gradcomp" / "wheels"


def digest_of(*facts: object) -> str:
    """A short digest of the inputs of a build."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def cmake_package() -> list[str]:
    """Returns the packages that pip must install to provide cmake."""
    return [] if shutil.which("cmake") else ["cmake"]


def horovod_variables(target: Target, folder: Path, compiler: str) -> dict[str, str]:
    """The environment variables by which Horovod finds the headers that it includes."""
    command = "import tensorflow as tf; print(tf.sysconfig.get_include())"
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    printed = subprocess.run(
        [target.python, "-c", command], env=quiet, stdout=subprocess.PIPE, text=True, check=True
    )
    include = Path(printed.stdout.strip())
    empty = folder / "empty"
    for header in XLA_HEADERS:
        (empty / header).parent.mkdir(parents=True, exist_ok=True)
        (empty / header).touch()
    external = include / "external"
    folders = [external / "highwayhash", external / "farmhash_archive" / "src"]
    settings = folder / "settings.cmake"
    settings.write_text(HOROVOD_CMAKE)
    variables = {**build_environment(compiler), "CMAKE_TOOLCHAIN_FILE": str(settings)}
    flags = [
        variables.get("CXXFLAGS", ""),
        f"-iquote{empty}",
        *(f"-I{folder}" for folder in folders),
    ]
    path = os.pathsep.join([str(target.folder / "bin"), variables.get("PATH", os.defpath)])
    jobs = {"MAKEFLAGS": f"-j{min(8, os.cpu_count() or 1)}"}  # each takes 1.5 GB
    return {**variables, **HOROVOD_BUILD, **jobs, "CXXFLAGS": " ".join(flags), "PATH": path}


def make_environment(folder: Path) -> None:
    """A virtual environment with pip."""
    try:
        venv.create(folder, with_pip=True, clear=True)
    except subprocess.CalledProcessError:
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(
            "This Python cannot make virtual environments with pip: install its venv package (on "
            "Debian and Ubuntu: apt install python3-venv)."
        )


def packages_of(target: Target) -> list[str]:
    """Returns TensorFlow and its companions, for pip."""
    return [f"{tensorflow_package()}=={target.tensorflow}", *target.packages]


def tensorflow_package() -> str:
    """Returns the name of TensorFlow's package; on x86-64, of the one without GPU support."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return "tensorflow-cpu" if x86 else "tensorflow"


def build_environment(compiler: str) -> dict[str, str]:
    """The variables that name the compiler, if setuptools would not find it by itself."""
    variables = {**os.environ, "CXX": compiler}
    c_compiler = variables.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if not shutil.which(shlex.split(c_compiler)[0]):
        variables["CC"] = compiler
    return variables


def pip(
    target: Target,
    action: str,
    what: str,
    arguments: list[str],
    variables: dict[str, str] | None = None,
) -> None:
    """Installs, downloads or builds a package; prints pip's output only if it fails.

    uv installs in a tenth of pip's time. What it cannot install, as where pip alone is told of an
    index of packages, pip does.
    """
    doing = {"download": "Downloading", "install": "Installing", "wheel": "Building"}[action]
    print(f"{doing} {what}, in {target.folder.name} ...", flush=True)
    by_pip = [target.python, "-m", "pip", action, "--disable-pip-version-check", *arguments]
    by_uv = [target.python, "-m", "uv", "pip", "install", "--python", target.python, *arguments]
    for command in [by_uv, by_pip] if action == "install" else [by_pip]:
        result = subprocess.run(
            command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if result.returncode == 0:
            return
    print(result.stdout)
    sys.exit(f"pip could not {action} {what}; see above. The command was: {shlex.join(command)}")


def read_stamp(stamp: Path) -> dict:
    """Returns the record of the environment's inputs."""
    try:
        return json.loads(stamp.read_text())
    except (OSError, ValueError):
        return NOTHING


def inputs_digest(target: Target) -> str:
    """A digest of all inputs of an environment and of the op library."""
    versions = [target.tensorflow, *target.packages, str(target.tree)]
    digest = hashlib.sha256(" ".join(versions).encode())
    for name in BUILD_INPUTS:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file():
                digest.update(str(file.relative_to(ROOT)).encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def copy_tree(tree: Path) -> None:
    """Copies the current source tree, and keeps the op library that was built in the copy."""
    built = {library: library.read_bytes() for library in tree.glob(LIBRARIES)}
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
    for library, content in built.items():
        library.write_bytes(content)


def run(command: list[str], folder: Path, variables: dict[str, str] | None = None) -> int:
    """Runs a command to its end, even if Ctrl-C has interrupted it and this program."""
    process = subprocess.Popen(command, cwd=folder, env=variables)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


if __name__ == "__main__":
    sys.exit(main())
