"""Sets up all tests: devices, seeds, which run beside each other; and reports on each folder.

TensorFlow is given four logical CPU devices, so that one process can hold several replicas. It can
only be done before TensorFlow starts, hence here, whatever tests are run.

With `-n 2` (pytest-xdist) two processes share the tests. Those of a file go to the same one if they
share what is made once. While a test that is marked `alone` runs, no other does: it measures time.
"""

import collections
import fcntl
import functools
import gc
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# It computes TensorFlow's own layers in another way, on some processors only, and rewrites each
# function for that: a tenth of the time of programs as small as those of the tests.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import keras
import pytest
import tensorflow as tf

REPOSITORY = Path(__file__).parents[1]
TURNS = Path(tempfile.gettempdir(), f"gradcomp-tests-{os.getuid()}.lock")

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)


gc.freeze()  # else each collection would look through all of TensorFlow
gc.set_threshold(100_000)  # as in tests/preloaded.py


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(7)


def file_of(nodeid):
    return nodeid.partition("::")[0]


@functools.cache
def makes_something_once(file):
    """Tells whether tests of this file share something, which each process makes for itself."""
    text = (REPOSITORY / file).read_text()
    return 'scope="module"' in text or "@functools.cache" in text


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Sorts the tests: files with quick ones come first.

    Of these, and of the others, files that stay together come first, so that no process ends long
    before the other.
    """
    quick = {file_of(item.nodeid) for item in items if item.get_closest_marker("quick")}

    def place(item):
        alone = item.get_closest_marker("alone") is not None
        file = file_of(item.nodeid)
        return alone, file not in quick, not makes_something_once(file)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByFileOrTest(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return file_of(nodeid) if makes_something_once(file_of(nodeid)) else nodeid

    config.option.loadscopereorder = False  # the order is that from above
    return ByFileOrTest(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Runs a test beside those of other processes, or alone."""
    alone = item.get_closest_marker("alone")
    with TURNS.open("w") as turns:
        fcntl.flock(turns, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            fcntl.flock(turns, fcntl.LOCK_UN)  # also where a process that was forked has the file


def folder_of(nodeid):
    return str(Path(file_of(nodeid)).parent)


class Progress:
    """Prints a line for each folder when all its tests have run."""

    def __init__(self, config):
        self.config = config
        self.left = collections.Counter()
        self.outcomes = collections.defaultdict(collections.Counter)

    def pytest_collection_finish(self, session):
        self.expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.expect(ids)

    def expect(self, nodeids):
        self.left = collections.Counter(map(folder_of, nodeids))

    def pytest_runtest_logreport(self, report):
        folder = folder_of(report.nodeid)
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[folder][report.outcome] += 1
        if report.when != "teardown" or type(report) is not pytest.TestReport:
            return
        self.left[folder] -= 1
        if not self.left[folder]:
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            outcomes = self.outcomes[folder].items()
            counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes)
            terminal.write(f"\n{folder}: {counts}\n")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # in the process that pytest-xdist has report
        config.pluginmanager.register(Progress(config))


def pytest_terminal_summary(terminalreporter):
    """Lists what each folder took, summed over its tests and the fixtures they needed."""
    seconds, tests = collections.Counter(), collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if type(report) is pytest.TestReport:  # none of a subtest, whose time is in the test's
                folder = folder_of(report.nodeid)
                seconds[folder] += report.duration
                tests[folder] += report.when == "call"
    terminalreporter.section("seconds by folder")
    for folder, spent in seconds.most_common():
        terminalreporter.line(f"{spent:8.1f}  {tests[folder]:5} tests  {folder}")
