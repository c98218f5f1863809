"""A library that can't be used is an error that says what to do, and names both versions."""

import re

import pytest
import tensorflow as tf
from packaging.version import Version

from tests.workers import results, run_workers
from tf_gradcomp.ops import library

pytestmark = [pytest.mark.oldest, pytest.mark.quick]
REBUILD = "pip install --force-reinstall --no-deps ."
OR_THE_WHEEL = "or install the wheel of tf_gradcomp"


@pytest.fixture
def load(monkeypatch):
    """Loads the library again, from another path or into another TensorFlow."""

    def load_again(**replaced):
        library.load.cache_clear()
        for name, value in replaced.items():
            target = tf if name == "__version__" else library
            monkeypatch.setattr(target, name, value)
        return library.load()

    yield load_again
    library.load.cache_clear()


def same_version(first, second):
    """Whether versions are equal: packages write 2.22.0rc0, and TensorFlow 2.22.0-rc0."""
    return Version(first) == Version(second)


def test_the_library_was_built_for_this_tensorflow():
    assert same_version(library.built_for(library.PATH), tf.__version__)


def test_info_names_path_version_and_instruction_set():
    info = library.library_info()
    assert info.path == library.PATH
    assert same_version(info.built_for, tf.__version__)
    assert info.simd in {"portable", "AVX2", "AVX-512"}
    assert info.error is None


@pytest.fixture
def load_with_libraries(load, tmp_path):
    """Loads with a TensorFlow of one version, beside libraries for others."""

    def load_for(found, *built):
        for version in built:
            (tmp_path / library.path_for(version).name).touch()
        return load(__version__=found, PATH=tmp_path / library.path_for(found).name)

    return load_for


def test_a_library_for_another_tensorflow_is_named_with_what_to_do(load_with_libraries):
    with pytest.raises(ImportError, match=re.escape(REBUILD)) as caught:
        load_with_libraries("2.20.1", "2.21.0")
    assert "built for TensorFlow 2.21, and TensorFlow 2.20.1 was found" in str(caught.value)
    assert OR_THE_WHEEL in str(caught.value)


@pytest.mark.parametrize("found", ["2.16.2", "2.99.0-rc1", "3.0.0"])
def test_a_wheel_refuses_an_unsupported_tensorflow_with_the_supported_ones(
    load_with_libraries, found
):
    with pytest.raises(ImportError) as caught:
        load_with_libraries(found, "2.17.1", "2.9.0", "2.21.0")
    message = str(caught.value)
    assert f"built for TensorFlow 2.9, 2.17, 2.21, and TensorFlow {found} was found" in message
    assert 'Install one of these: pip install "tensorflow-cpu==2.21.*" (or tensorflow).' in message
    assert REBUILD not in message


def test_the_library_of_the_minor_version_is_taken():
    names = [library.path_for(version).name for version in ("2.17.1", "2.21.0", "2.22.0-rc1")]
    assert names == [f"_tf_gradcomp_ops_2_{minor}.so" for minor in (17, 21, 22)]


def test_another_patch_release_is_accepted(load):
    found = ".".join([*tf.__version__.split(".")[:2], "99"])
    load(__version__=found, PATH=library.path_for(found))


def test_a_missing_library_is_reported(load, tmp_path):
    with pytest.raises(ImportError, match="are not built") as caught:
        load(PATH=tmp_path / library.PATH.name)
    assert REBUILD in str(caught.value)
    assert OR_THE_WHEEL in str(caught.value)


def test_a_damaged_library_is_refused_with_the_command(load, tmp_path):
    damaged = tmp_path / library.PATH.name
    damaged.write_bytes(library.PATH.read_bytes().replace(b"\x7fELF", b"\x7fELX", 1))
    with pytest.raises(ImportError, match="can't be loaded into TensorFlow") as caught:
        load(PATH=damaged)
    assert REBUILD in str(caught.value)


def test_info_of_an_unusable_library_has_the_reason(load, tmp_path, monkeypatch):
    library.load.cache_clear()
    monkeypatch.setattr(library, "PATH", tmp_path / library.PATH.name)
    info = library.library_info()
    assert info.simd is None
    assert info.built_for is None
    assert "are not built" in info.error


def test_a_wrong_limit_of_the_vectors_is_refused_with_the_right_ones(load, monkeypatch):
    monkeypatch.setenv("GRADCOMP_SIMD", "AVX")
    with pytest.raises(ImportError, match=r"GRADCOMP_SIMD is 'AVX'.*'avx2' or 'portable'"):
        load()


STEPS = """
    import hashlib, json, os
    import numpy as np
    import tensorflow as tf
    from tests.compressors.lockstep import Lockstep, specs_of
    from tests.ops.adacomp_cases import DTYPES, encode, normal
    from tf_gradcomp import compressors, ops
    from tf_gradcomp.ops import library

    METHODS = "adacomp scalecom top_k random_k qsgd sign_sgd power_sgd count_sketch".split()

    def digest(*arrays):
        total = hashlib.sha256()
        for array in arrays:
            total.update(np.ascontiguousarray(array).tobytes())
        return total.hexdigest()

    def by_bins():
        for bin_size in (4, 50, 500):
            for dtype in DTYPES:
                encoded = encode([normal(9001, 1, 1)], [normal(9001, 0.3, 2, dtype)], [bin_size])
                yield from (encoded.payload, encoded.residuals[0])

    def by_steps(name):
        gradients = [
            [normal((70, 65), 1, seed), normal(1001, 1, seed + 2, DTYPES[1])] for seed in (1, 2)
        ]
        replicas = Lockstep(compressors.get(name), specs_of(gradients[0]), len(gradients))
        for _ in range(2):
            done = replicas.step(gradients)
            for arrays in (done.payloads, *done.reduced, *done.residuals):
                yield from arrays

    def divided():
        moments = [tf.Variable(abs(normal(5001, 1, 3)))]
        adam = ops.SecondMoments(moments, 7, beta_2=0.999, epsilon=1e-7)
        yield from ops.precondition(adam, [normal(5001, 1, 4)])
        yield moments[0].numpy()

    def planned():
        values = normal(4001, 1, 5)
        yield ops.qsgd_errors(values, [2, 5, 8], bucket_size=512)

    digests = {name: digest(*by_steps(name)) for name in METHODS}
    digests |= {one.__name__: digest(*one()) for one in (by_bins, divided, planned)}
    with open(os.environ["RESULT_PATH"] + ".json", "w") as file:
        json.dump([library.library_info().simd, digests], file)
"""


def test_the_loader_picks_no_kernel():
    """It does not know GRADCOMP_SIMD; compilers call its functions for this `.resolver`."""
    assert b".resolver\0" not in library.PATH.read_bytes()


def test_no_result_depends_on_the_limit_of_the_vectors():
    limits = [{"GRADCOMP_SIMD": limit} for limit in library.SIMD_LIMITS]
    workers = run_workers(STEPS, len(limits), per_worker_env=limits)
    simds, (widest, *others) = zip(*results(workers), strict=True)
    has_avx2 = {"avx2", "f16c"} <= {*library.library_info().cpu_features}
    assert simds == (library.library_info().simd, "AVX2" if has_avx2 else "portable", "portable")
    assert others == [widest, widest]
