"""Builds the op library against the TensorFlow that is installed. Metadata: pyproject.toml.

`dev.py` sets variables: a folder that keeps objects for all environments; and for a wheel, the
library that is built already, and the local version, which names the TensorFlow that it is for.
"""

import fcntl
import functools
import hashlib
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

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
    "-Wno-sign-compare",
    "-Wno-subobject-linkage",  # meant for headers, but joined sources look like these
]
KEPT_OBJECTS = os.environ.get("TF_GRADCOMP_KEPT_OBJECTS")
BUILT_LIBRARY = os.environ.get("TF_GRADCOMP_BUILT_LIBRARY")
LOCAL_VERSION = os.environ.get("TF_GRADCOMP_LOCAL_VERSION")


def import_tensorflow():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise SystemExit(
            "tf_gradcomp is built against the TensorFlow that is installed, and none can be "
            f"imported here ({error}): install tensorflow or tensorflow-cpu first, then run "
            "pip install --no-build-isolation."
        ) from error
    version = tuple(int(part) for part in tf.__version__.split(".")[:2])
    versions = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    if version > max(SUPPORTED):
        print(
            f"warning: tf_gradcomp is tested with TensorFlow {versions}, and is built for "
            f"{tf.__version__}, which is newer.",
            file=sys.stderr,
        )
    elif version not in SUPPORTED:
        raise SystemExit(
            f"tf_gradcomp supports TensorFlow {versions}; found {tf.__version__}: install a "
            "supported one, then build again."
        )
    return tf


class BuildOps(build_ext):
    """Compiles the sources side by side, and names the library as tf_gradcomp.ops expects it."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        if BUILT_LIBRARY:
            target = self.get_ext_fullpath(ext.name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(BUILT_LIBRARY, target)
            return
        tf = import_tensorflow()
        flags = [re.sub("^-I", "-isystem", flag) for flag in tf.sysconfig.get_compile_flags()]
        flags.append(f'-DTF_GRADCOMP_TENSORFLOW_VERSION="{tf.__version__}"')
        ops, *other_sources = map(self.joined, JOINED)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            versioned = pool.submit(self.compile_one, ops, flags)
            independent = pool.map(self.compile_once, [*other_sources, *ext.sources])
            objects = [versioned.result(), *independent]
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=tf.sysconfig.get_link_flags(),
            build_temp=self.build_temp,
            target_lang="c++",
        )

    def compile_one(self, source, flags=()):
        (built,) = self.compiler.compile(
            [source],
            self.build_temp,
            include_dirs=[os.getcwd()],
            extra_postargs=[*FLAGS, *flags],
            depends=DEPENDS,
        )
        return built

    def compile_once(self, source):
        """Compiles what includes nothing of TensorFlow's, so that its object fits any version."""
        if not KEPT_OBJECTS:
            return self.compile_one(source)
        name, _ = os.path.splitext(os.path.basename(source))
        cached = os.path.join(KEPT_OBJECTS, f"{name}-{self.build_key}.o")
        os.makedirs(KEPT_OBJECTS, exist_ok=True)
        with open(os.path.join(KEPT_OBJECTS, f"{name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(cached):
                for earlier in glob(os.path.join(KEPT_OBJECTS, f"{name}-*")):
                    os.unlink(earlier)
                shutil.copy(self.compile_one(source), f"{cached}.part")
                os.replace(f"{cached}.part", cached)
            # Another build may replace what is kept before this one has linked it.
            return shutil.copy(cached, os.path.join(self.build_temp, f"{name}.o"))

    @functools.cached_property
    def build_key(self):
        """Changes with what kept objects are compiled by and from."""
        digest = hashlib.sha256(repr([self.compiler.compiler_so_cxx, FLAGS]).encode())
        for path in DEPENDS:
            with open(path, "rb") as file:
                digest.update(file.read())
        return digest.hexdigest()

    def joined(self, folder):
        """Makes one source of a folder's: most of their time is that of the headers they share."""
        os.makedirs(self.build_temp, exist_ok=True)
        path = os.path.join(self.build_temp, f"{folder}.cc")
        with open(path, "w") as file:
            file.writelines(f'#include "{source}"\n' for source in JOINED[folder])
        return path


class Wheel(bdist_wheel):
    """A wheel for every Python: the op library knows TensorFlow and no Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    options={"egg_info": {"tag_build": f"+{LOCAL_VERSION}"}} if LOCAL_VERSION else {},
    ext_modules=[Extension("tf_gradcomp.ops._tf_gradcomp_ops", SEPARATE, depends=DEPENDS)],
    cmdclass={"build_ext": BuildOps, "bdist_wheel": Wheel},
)
