"""Sets up all tests: devices, seeds and the order of tests. Reports on each folder and file.

TensorFlow gets four logical CPU devices, so that one process can hold several replicas. Environment
variables must be set before TensorFlow starts, so this file sets them for every test run.

With `-n 2` (pytest-xdist), two processes share the tests. If the tests of a file share a module
fixture or a cache, they all run in the same process. While a test with the mark `alone` runs, no
other test runs, because it measures time.
"""

import collections
import fcntl
import functools
import gc
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# oneDNN computes TensorFlow's layers in another way, on some processors only. oneDNN rewrites every
# function, which takes a tenth of the time of such small programs.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import pytest

from tests import preloaded, workers

REPOSITORY = Path(__file__).parents[1]
CLOCK = {"start": 0.0}  # in CPU seconds, at the last report of a test
TURNS = Path(tempfile.gettempdir(), f"gradcomp-tests-{os.getuid()}.lock")


def load_tensorflow():
    import keras  # noqa: F401
    import tensorflow as tf

    from tests import tracing

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )
    # Threads that wait for parts of such small ops spin, which takes a quarter of the time. Tests
    # of the number of threads start processes of their own.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    preloaded.run_graphs_as_traced()
    tracing.trace_faster()
    gc.freeze()  # otherwise each collection would scan all of TensorFlow
    gc.set_threshold(100_000)  # as in tests/preloaded.py


@pytest.fixture(autouse=True)
def _seeded():
    import keras

    keras.utils.set_random_seed(7)


def file_of(nodeid):
    return nodeid.partition("::")[0]


@functools.cache
def makes_something_once(file):
    """Returns whether the tests of a file share objects that each process creates once."""
    text = (REPOSITORY / file).read_text()
    return 'scope="module"' in text or "@functools.cache" in text


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Sorts the tests: files with quick tests come first.

    Within both groups, files whose tests stay together come first, so that both processes end at
    about the same time.
    """
    quick = {file_of(item.nodeid) for item in items if item.get_closest_marker("quick")}

    def place(item):
        single = item.get_closest_marker("alone") is not None
        file = file_of(item.nodeid)
        return single, file not in quick, not makes_something_once(file)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByFileOrTest(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return file_of(nodeid) if makes_something_once(file_of(nodeid)) else nodeid

    config.option.loadscopereorder = False  # keep the order from above
    return ByFileOrTest(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Runs a test in parallel with other processes' tests, or alone."""
    single = item.get_closest_marker("alone")
    with TURNS.open("w") as turns:
        fcntl.flock(turns, fcntl.LOCK_EX if single else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            fcntl.flock(turns, fcntl.LOCK_UN)  # even if a forked process still has the file open


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
    if preloaded.CPU_LOG not in os.environ:  # not in a run within a run
        descriptor, path = tempfile.mkstemp(prefix="gradcomp-tests-cpu-")
        os.environ[preloaded.CPU_LOG] = config.cpu_log = path
        os.close(descriptor)
    runs_tests = hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"
    if runs_tests:
        load_tensorflow()
    else:  # the processes of pytest-xdist that run tests share the servers of this one
        workers.start_servers()
    if not hasattr(config, "workerinput"):  # in the process that reports
        config.pluginmanager.register(Progress(config))


def cpu_seconds():
    """Returns the CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    CLOCK["start"] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Adds to a report the CPU time since the report before."""
    report = yield
    now = cpu_seconds()
    report.cpu_seconds, CLOCK["start"] = now - CLOCK["start"], now
    return report


def pytest_terminal_summary(terminalreporter):
    """Lists the CPU seconds of each file: of its tests, fixtures and workers."""
    if not hasattr(terminalreporter.config, "cpu_log"):
        return
    seconds, tests = collections.Counter(), collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if type(report) is pytest.TestReport:  # not a subtest, whose time is part of its test's
                file = file_of(report.nodeid)
                seconds[file] += getattr(report, "cpu_seconds", 0.0)
                tests[file] += report.when == "call"
    log = Path(terminalreporter.config.cpu_log)
    for line in log.read_text().splitlines():
        spent, _, file = line.partition(" ")
        seconds[file or "(workers of no test)"] += float(spent)
    log.unlink()
    terminalreporter.section("CPU seconds by file")
    for file, spent in seconds.most_common():
        terminalreporter.line(f"{spent:8.1f}  {tests[file]:5} tests  {file}")
