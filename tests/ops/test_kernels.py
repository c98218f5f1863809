"""Builds and runs custom_ops/tests: the kernels under sanitizers, and the fuzz target."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2] / "custom_ops" / "tests"
PROGRAMS = sorted(path.stem for path in [*TESTS.glob("*_test.cc"), *TESTS.glob("fuzz_*.cc")])
# These have a variant for AVX2, which the processor picks, and a portable one. AdaComp's test runs
# all of its variants by itself.
VECTORIZED = [
    f"{name}_test"
    for name in ("chunks", "count_sketch", "power_sgd", "precondition", "quantized", "sidco")
]
KERNELS = TESTS.parent / "kernels"
KEPT_OBJECTS = TESTS.parents[1] / "build" / "objects"
SANITIZE = ["-fsanitize=address,undefined"]


def compiles(tmp_path, flags):
    source = tmp_path / "empty.cc"
    source.write_text("int main() {}\n")
    command = ["g++", *flags, str(source), "-o", str(tmp_path / "empty")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def kept_objects():
    """Tells make of the present kernels' objects if dev.py has compiled them."""
    wanted = {"kernels", *(path.stem for path in KERNELS.glob("scan_bins_*.cc"))}
    kept = {path.name.partition("-")[0]: path for path in KEPT_OBJECTS.glob("*.o")}
    changed = max(path.stat().st_mtime for path in KERNELS.iterdir())
    if not wanted <= kept.keys() or min(kept[n].stat().st_mtime for n in wanted) <= changed:
        return []
    return [f"PLAIN={' '.join(str(kept[name]) for name in wanted)}"]


@pytest.fixture(scope="module")
def binaries(tmp_path_factory):
    if shutil.which("g++") is None or shutil.which("make") is None:
        pytest.skip("g++ and make are needed to build the kernels")
    directory = tmp_path_factory.mktemp("kernels")
    if not compiles(directory, SANITIZE):
        pytest.skip("g++ has no runtime for address and undefined-behaviour sanitizers")
    build = subprocess.run(
        ["make", "-j2", "all", f"BUILD={directory}", *kept_objects()],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    return directory


@pytest.mark.parametrize("program", PROGRAMS)
def test_native_test_passes(binaries, program):
    run(binaries / program, ["1"] if program.startswith("fuzz_") else [])


@pytest.mark.parametrize("program", VECTORIZED)
def test_native_test_passes_with_portable_kernels(binaries, program):
    run(binaries / program, [], {"GRADCOMP_SIMD": "portable"})


def run(program, args, env=None):
    result = subprocess.run(
        [str(program), *args],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
