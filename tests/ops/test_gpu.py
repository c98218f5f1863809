"""The kernels for GPUs: compiled by NVRTC, run on an emulated device, and on a GPU if there is one.

`custom_ops/tests/fake_gpu.cc` is CUDA's driver and a device of TensorFlow's in one. On it, all of
the host's side runs as it does with a GPU: loading, the check, memory, the stream, placement. The
kernels themselves are compared with the CPU's in `custom_ops/tests/gpu_*_test.cc`.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tests.workers import ONE_THREAD, python_path, result, run_workers
from tf_gradcomp.ops import library

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("gpu_program.py")
PHILOX = "custom_ops/kernels/philox.h"  # CPUs' and GPUs'


def has_nvrtc():
    try:
        return importlib.util.find_spec("nvidia.cuda_nvrtc") is not None
    except ModuleNotFoundError:
        return False


def is_on_this_system(name):
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


needs_gpu = pytest.mark.skipif(
    not tf.config.list_physical_devices("GPU"), reason="there is no GPU of TensorFlow's"
)
needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="nvidia-cuda-nvrtc-cu12 is not installed")


@pytest.fixture(scope="module")
def fake_gpu(tmp_path_factory):
    """The path of the library."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is needed to build the emulated GPU")
    path = tmp_path_factory.mktemp("fake_gpu") / "libcuda.so.1"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-pthread"]
    include = tf.sysconfig.get_include()
    source = ROOT / "custom_ops" / "tests" / "fake_gpu.cc"
    # By this name it is found among the libraries of a process that has loaded it.
    command = ["g++", *flags, "-Wl,-soname,libcuda.so.1", "-isystem", include, str(source)]
    command += ["-o", str(path), *tf.sysconfig.get_link_flags()]
    build = subprocess.run(command, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stderr
    return path


def kernel_names():
    names = (ROOT / "custom_ops" / "gpu" / "kernel_names.h").read_text()
    return re.findall(r"KERNEL\((gradcomp_\w+)\)", names)


def run(fake_gpu, *parts, **env):
    (worker,) = run_workers(PROGRAM, 1, [fake_gpu, *parts], env={**ONE_THREAD, **env})
    return worker


@pytest.fixture(scope="module")
def worker(fake_gpu):
    """A process with an emulated GPU: it compiles the kernels once for all parts."""
    # The last part leaves no memory on the host.
    return run(fake_gpu, "exchange:on_gpu", "exchange:copied", "benchmark", "kernels")


def launched(worker, part):
    assert result(worker)["error"] == ""
    return result(worker)["launches"][part].keys()


def printed(worker, part):
    """Returns what was printed in a part."""
    begins = f"part begins: {part}\n"
    each = [stream.partition(begins)[2] for stream in (worker.stdout, worker.stderr)]
    return "".join(text.partition("part begins:")[0] for text in each)


@needs_nvrtc
@pytest.mark.parametrize("capability", [70, 120])  # no kernel depends on it
def test_nvrtc_compiles_the_kernels(capability):
    assert library.compile_for(capability) == ""


@needs_nvrtc
def test_errors_of_nvrtc_are_passed_on():
    assert "sm_1" in library.compile_for(1)


@pytest.mark.skipif(is_on_this_system("libcuda.so.1"), reason="there is a CUDA driver")
def test_without_a_driver_the_kernels_are_not_used():
    assert library.gpu_info(0).name == ""
    assert library.gpu_info(0).error.startswith("there is no CUDA driver")
    assert library.problem("/device:CPU:0") == "it is no GPU"


def test_the_sources_are_in_the_library():
    built = library.PATH.read_bytes()
    folder = ROOT / "custom_ops" / "gpu"
    shared = ["*tables.h", "*device.h", "*vectors.h"]
    shared = [*(path for name in shared for path in folder.glob(name)), ROOT / PHILOX]
    for path in [*folder.glob("*.cu"), *shared]:
        assert path.read_bytes() in built


@needs_nvrtc
def test_on_a_gpu_the_ops_do_what_they_do_on_the_host(worker):
    assert launched(worker, "kernels") == set(kernel_names())


@needs_nvrtc
@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"GRADCOMP_FAKE_GPU": "wrong_sums"}, "the decoder's sums are not the CPU's"),
        ({"GRADCOMP_FAKE_GPU": "no_memory"}, "cuMemAlloc fails: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
    ids=["wrong sums", "no memory"],
)
def test_where_kernels_cannot_be_used_ops_work_on_the_host(fake_gpu, env, why):
    found = result(run(fake_gpu, "host", **env))
    assert why in found["error"]
    assert not found["launches"]["host"]


def test_each_failure_is_reported_with_its_own_reason(fake_gpu):
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", "PYTHONPATH": python_path()}
    command = [sys.executable, str(PROGRAM), str(fake_gpu), "contexts"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    logged = [line for line in ended.stderr.splitlines() if "cuStreamGetCtx fails: " in line]
    reasons = [line.split("cuStreamGetCtx fails: ")[1].split(".")[0] for line in logged]
    assert reasons == ["CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_OUT_OF_MEMORY"]


@pytest.mark.skipif(is_on_this_system("libnvrtc.so.12"), reason="NVRTC is installed")
def test_without_nvrtc_ops_work_on_the_host(fake_gpu):
    found = result(run(fake_gpu, "without_nvrtc"))
    assert "NVRTC was not found" in found["error"]
    assert not found["launches"]["without_nvrtc"]


@needs_nvrtc
def test_an_exchange_leaves_its_state_on_a_gpu_and_is_the_same(worker):
    expected = set(kernel_names()) - {"gradcomp_adacomp_unpack"}
    assert launched(worker, "exchange:on_gpu") == expected
    assert "copied from the GPU" not in printed(worker, "exchange:on_gpu")


@needs_nvrtc
def test_only_second_moments_stay_on_a_gpu_for_methods_without_kernels(worker):
    moment_kernels = {"gradcomp_precondition_check", "gradcomp_precondition_divide"}
    decodes = "gradcomp_top_k_decode"  # which has no state
    assert launched(worker, "exchange:copied") == {*moment_kernels, decodes}
    assert "copied from the GPU to the host for compression." in printed(worker, "exchange:copied")


def test_workers_report_at_the_start_that_one_has_no_gpu(fake_gpu):
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"}  # a real one
    for worker in run_workers(PROGRAM, 2, [fake_gpu, "mixed"], check=False, env=hidden):
        assert "kind of device: worker 0 has 'CPU', worker 1 has 'GPU'" in worker.stderr


def test_an_exchange_without_kernels_gives_equal_bits_and_one_notice(fake_gpu):
    worker = run(fake_gpu, "exchange:one", GRADCOMP_GPU="0")
    assert not result(worker)["launches"]["exchange:one"]
    logged = "from the GPU to the host for compression: they are switched off by GRADCOMP_GPU=0"
    assert (worker.stdout + worker.stderr).count(logged) == 1


@needs_gpu
def test_a_real_gpu_does_what_the_host_does():
    parts = ("kernels", "exchange:on_gpu", "exchange:copied")
    worker = run("real", *parts, TF_FORCE_GPU_ALLOW_GROWTH="true")
    assert result(worker)["error"] == ""


@needs_nvrtc
def test_the_benchmark_checks_and_measures(worker):
    assert launched(worker, "benchmark") == set(kernel_names())
    table = [line for line in worker.stdout.splitlines() if line.startswith("| 5000 ")]
    for name in ("precondition", "AdaComp", "chunks", "TopK", "QSGD", "SignSGD", "PowerSGD"):
        local = [line for line in table if line.startswith(f"| 5000 | {name}")]
        assert len(local) > 1
        assert re.search(r": a copy \| .* \| 100% \|$", local[0])


@pytest.mark.skipif(is_on_this_system("libcuda.so.1"), reason="there is a CUDA driver")
def test_without_a_driver_the_benchmark_names_the_missing_library():
    program = ROOT / "benchmarks" / "gpu_kernels.py"
    done = subprocess.run(
        [sys.executable, program, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("None of libcuda.so.1 can be loaded: ")
    assert len(done.stderr.splitlines()) == 1
