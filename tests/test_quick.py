"""The quick tests cover each method, entry point and engine with real workers."""

import os

import pytest

from tf_gradcomp import compressors

COVERED = {
    "CompressedOptimizer",
    "compressor on the strategy",
    "custom training loop",
    "gradcomp run",
    "gradcomp simulate",
    "Horovod",
}
WITH_WORKERS = ("tests/cli", "tests/distributed", "tests/horovod")


class CollectedVectors:
    def pytest_collection_finish(self, session):
        self.items = session.items


@pytest.fixture(scope="module")
def quick_tests(pytestconfig):
    collected = CollectedVectors()
    folders = [str(pytestconfig.rootpath / folder) for folder in WITH_WORKERS]
    options = ["--collect-only", "-qq", "-m", "quick", "-p", "no:xdist"]
    assert pytest.main([*options, *folders], plugins=[collected]) == os.EX_OK
    return collected.items


def test_each_entry_point_and_engine_has_a_quick_test(quick_tests):
    marks = [mark for test in quick_tests for mark in test.iter_markers("quick")]
    assert {name for mark in marks for name in mark.args} == COVERED


def test_each_method_has_a_quick_test(quick_tests):
    here = [test for test in quick_tests if test.nodeid.startswith("tests/distributed")]
    seen = {test.callspec.params.get("method") for test in here if hasattr(test, "callspec")}
    assert {*compressors.names()} <= seen
