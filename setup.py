"""Builds the op library against the TensorFlow that is installed. Metadata: pyproject.toml.

`dev.py` sets variables: a folder that keeps objects for all builds; and for a wheel, the folders
that several versions of TensorFlow are unpacked in, so that it has an op library for each.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import site
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from importlib import metadata

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SUPPORTED = [(2, 15), *((2, minor) for minor in range(17, 22))]
# The same loops for three kinds of processors, each by a pragma for its whole source.
SEPARATE = sorted(glob("custom_ops/kernels/scan_bins_*.cc"))
JOINED = {
    folder: sorted({*glob(f"custom_ops/{folder}/*.cc")} - {*SEPARATE})
    for folder in ("tensorflow", "kernels", "gpu")
}
DEPENDS = sorted(
    source
    for folder in JOINED
    for ending in ("cc", "h", "cu")
    for source in glob(f"custom_ops/{folder}/*.{ending}")
)
FLAGS = [
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-g0",
    "-falign-functions=64",  # otherwise any change may move a loop across a cache line
    "-Wno-sign-compare",
    "-Wno-subobject-linkage",  # meant for headers, but joined sources look like these
    *("-include", "custom_ops/kernels/older_systems.h"),
    # As TensorFlow's packages are compiled.
    "-D_GLIBCXX_USE_CXX11_ABI=1",
    "-DEIGEN_MAX_ALIGN_BYTES=64",
]
KEPT_OBJECTS = os.environ.get("TF_GRADCOMP_KEPT_OBJECTS")
UNPACKED = os.environ.get("TF_GRADCOMP_UNPACKED_TENSORFLOWS")
OR_A_WHEEL = "or install a wheel of tf_gradcomp, which needs no build"


def find_tensorflows():
    """The version of each TensorFlow that an op library is built for, and its folder.

    It is not imported, because pip's isolated build hides the environment that it installs into.
    """
    if UNPACKED:
        return {version_in(folder): folder for folder in UNPACKED.split(os.pathsep)}
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    for folder in (*installed, site.getusersitepackages(), *sys.path):
        version = version_in(folder)
        if version:
            check_version(version)
            return {version: folder}
    raise SystemExit(
        "tf_gradcomp needs TensorFlow installed first, because its ops are built for one version, "
        f"and there is none in {installed[0]}: pip install tensorflow-cpu (or tensorflow), then "
        f"build again, with --no-build-isolation if the tool is not pip, {OR_A_WHEEL}."
    )


def version_in(folder):
    """The version of the TensorFlow in a folder like site-packages, whatever its package's name."""
    if not os.path.isdir(os.path.join(folder, "tensorflow", "include")):
        return None
    for package in metadata.distributions(path=[folder]):
        if "tensorflow" in (package.read_text("top_level.txt") or "").split():
            return package.version
    return None


def check_version(found):
    """Refuses a TensorFlow that is too old, and warns of one that is too new."""
    version = tuple(int(part) for part in found.split(".")[:2])
    versions = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    if version > max(SUPPORTED):
        print(
            f"warning: tf_gradcomp is tested with TensorFlow {versions}, and is built for "
            f"{found}, which is newer.",
            file=sys.stderr,
        )
    elif version not in SUPPORTED:
        raise SystemExit(
            f"tf_gradcomp supports TensorFlow {versions}; found {found}: install a supported one, "
            "then build again."
        )


def choose_compiler():
    """Names the C++ compiler to setuptools, which looks for no other than Python's own."""
    named = os.environ.get("CXX")
    candidates = [named] if named else [sysconfig.get_config_var("CXX"), "g++", "c++", "clang++"]
    for candidate in filter(None, candidates):
        if shutil.which(shlex.split(candidate)[0]):
            os.environ["CXX"] = candidate
            return
    found = f"{named!r}, which the variable CXX names, is not there" if named else "none was found"
    raise SystemExit(
        f"tf_gradcomp needs a C++ compiler, and {found}: install g++ (on Debian and Ubuntu: apt "
        f"install g++), or name yours in the variable CXX, {OR_A_WHEEL}."
    )


def library_name(version):
    """The op library's name, as tf_gradcomp/ops/library.py expects it."""
    return "_tf_gradcomp_ops_{}_{}".format(*version.split("."))


class BuildOps(build_ext):
    """Compiles the sources side by side, and links one library for each TensorFlow."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self):
        # Those of earlier builds would be installed, too.
        for folder in (self.build_lib, *(["."] if self.inplace else [])):
            for earlier in glob(f"{folder}/tf_gradcomp/ops/_tf_gradcomp_ops_*.so"):
                os.unlink(earlier)
        super().run()

    def build_extensions(self):
        os.makedirs(self.build_temp, exist_ok=True)
        ops, *others = map(self.joined, JOINED)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            own = [pool.submit(self.compile_once, ops, *one) for one in TENSORFLOWS.items()]
            shared = [*pool.map(self.compile_once, [*others, *SEPARATE])]
        for folder, extension, ops in zip(TENSORFLOWS.values(), self.extensions, own, strict=True):
            self.compiler.link_shared_object(
                [ops.result(), *shared],
                self.get_ext_fullpath(extension.name),
                extra_postargs=[f"-L{folder}/tensorflow", "-l:libtensorflow_framework.so.2"],
                build_temp=self.build_temp,
                target_lang="c++",
            )

    def compile_once(self, source, version="", folder=""):
        """Compiles a source, or takes what an earlier build has kept, for any Python."""
        name, _ = os.path.splitext(os.path.basename(source))
        flags = []
        if version:  # the others include nothing of TensorFlow's
            name = library_name(version)
            flags = [f'-DTF_GRADCOMP_TENSORFLOW_VERSION="{version}"']
        key = self.key_of(flags)
        flags += ["-isystem", f"{folder}/tensorflow/include"] if version else []
        if not KEPT_OBJECTS:
            return self.compile_one(source, name, flags)
        cached = os.path.join(KEPT_OBJECTS, f"{name}-{key}.o")
        os.makedirs(KEPT_OBJECTS, exist_ok=True)
        with open(os.path.join(KEPT_OBJECTS, f"{name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(cached):
                for earlier in glob(os.path.join(KEPT_OBJECTS, f"{name}-*")):
                    os.unlink(earlier)
                shutil.copy(self.compile_one(source, name, flags), f"{cached}.part")
                os.replace(f"{cached}.part", cached)
            # Another build may replace what is kept before this one has linked it.
            return shutil.copy(cached, os.path.join(self.build_temp, f"{name}.o"))

    def compile_one(self, source, name, flags):
        (built,) = self.compiler.compile(
            [source],
            os.path.join(self.build_temp, name),
            include_dirs=[os.getcwd()],
            extra_postargs=[*FLAGS, *flags],
        )
        return built

    def key_of(self, flags):
        """Changes with what kept objects are compiled by and from."""
        digest = hashlib.sha256(repr([self.compiler.compiler_so_cxx, FLAGS, flags]).encode())
        for path in DEPENDS:
            with open(path, "rb") as file:
                digest.update(file.read())
        return digest.hexdigest()

    def joined(self, folder):
        """Makes one source of a folder's: most of their time is that of the headers they share."""
        path = os.path.join(self.build_temp, f"{folder}.cc")
        with open(path, "w") as file:
            file.writelines(f'#include "{source}"\n' for source in JOINED[folder])
        return path


class Wheel(bdist_wheel):
    """A wheel for every Python: the op libraries know TensorFlow and no Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


# Before pip shows what is copied, so that a problem is all that it shows.
choose_compiler()
TENSORFLOWS = find_tensorflows()
setup(
    ext_modules=[
        Extension(f"tf_gradcomp.ops.{library_name(version)}", SEPARATE, depends=DEPENDS)
        for version in TENSORFLOWS
    ],
    cmdclass={"build_ext": BuildOps, "bdist_wheel": Wheel},
)
