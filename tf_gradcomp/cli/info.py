"""`gradcomp info`: shows the installed versions, and checks that they work together."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from dataclasses import dataclass, field
from importlib import metadata

import click

from tf_gradcomp import __version__
from tf_gradcomp.cli.options import json_option, print_json
from tf_gradcomp.tf_config import TFConfig, read_tf_config

WITH_KERAS_2 = (2, 15)  # the only supported version before this range
OLDEST_TENSORFLOW = (2, 17)
NEWEST_TENSORFLOW = (2, 21)


_NAME_WIDTH = 14


@dataclass
class _Report:
    """The rows, which are printed as they are found, and the problems to list below them."""

    shows_rows: bool
    rows: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, value: str) -> None:
        """Keeps a row for `--json` and the checks, and otherwise also prints it at once."""
        self.rows.append((name, value))
        if self.shows_rows:  # in one line, so that users can copy paths
            click.echo(f"{click.style(name.ljust(_NAME_WIDTH), bold=True)}{value}")


@click.command(short_help="Show the installed versions, and check that they work together.")
@json_option
def info(as_json: bool) -> None:
    """Show versions, the op library and this machine, and check that they work together.

    Ends with exit code 1 if something is wrong, and says how to fix it.
    """
    _quiet_tensorflow()
    report = _Report(shows_rows=not as_json)
    _add_versions(report)
    _add_tensorflow(report)
    _add_tf_config(report)
    if as_json:
        rows = {name.strip(): value for name, value in report.rows}
        print_json({**rows, "problems": report.problems})
    else:
        _show_verdict(report)
    sys.exit(1 if report.problems else 0)


def _quiet_tensorflow() -> None:
    # TensorFlow's log would clutter the table. TensorFlow's note on oneDNN ignores the log level.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")


def _add_versions(report: _Report) -> None:
    report.add("tf_gradcomp", __version__)
    packages = metadata.packages_distributions()  # Keras may be of the package keras-nightly
    for name, module in (("Keras", "keras"), ("NumPy", "numpy")):
        if module in packages:
            report.add(name, metadata.version(packages[module][0]))
        else:
            report.add(name, "not installed")
            report.problems.append(f"{name} is not installed: pip install {module}")
    report.add("Python", f"{platform.python_version()} ({sys.executable})")
    report.add("platform", platform.platform())


def _add_tensorflow(report: _Report) -> None:
    try:
        import tensorflow as tf
    except ImportError as error:
        report.add("TensorFlow", f"cannot be imported: {error}")
        report.problems.append(
            "TensorFlow cannot be imported: install tensorflow or tensorflow-cpu "
            f"{_supported()}, then tf_gradcomp again."
        )
        return
    supported = is_supported(tf.__version__)
    verdict = "supported" if supported else f"not supported; it must be {_supported()}"
    report.add("TensorFlow", f"{tf.__version__} ({verdict})")
    if not supported:
        report.problems.append(
            f"TensorFlow {tf.__version__} is not supported: install {_supported()}."
        )
    _add_library(report)
    _add_horovod(report)
    _add_gpus(report, [gpu.name for gpu in tf.config.list_physical_devices("GPU")])


def is_supported(version: str) -> bool:
    """Whether tf_gradcomp supports this version of TensorFlow."""
    major, minor = (int(part) for part in version.split(".")[:2])
    found = (major, minor)
    return found == WITH_KERAS_2 or OLDEST_TENSORFLOW <= found <= NEWEST_TENSORFLOW


def _supported() -> str:
    versions = (OLDEST_TENSORFLOW, NEWEST_TENSORFLOW, WITH_KERAS_2)
    oldest, newest, with_keras_2 = (".".join(map(str, version)) for version in versions)
    return f"{oldest} to {newest}, or {with_keras_2} with Keras 2"


def _add_library(report: _Report) -> None:
    # Imports TensorFlow, so it is here: `gradcomp run` and `--help` must start fast.
    from tf_gradcomp.ops.library import library_info

    library = library_info()
    report.add("op library", str(library.path))
    report.add("  built for", f"TensorFlow {library.built_for or '- (not built)'}")
    kernels = library.simd or "cannot be loaded"
    report.add("  kernels", f"{kernels} (this CPU: {' '.join(library.cpu_features)})")
    if library.error is not None:
        report.problems.append(library.error)


def _add_horovod(report: _Report) -> None:
    # Horovod is optional, so its absence is not a problem.
    if importlib.util.find_spec("horovod") is None:
        report.add("Horovod", "not installed")
        return
    from tf_gradcomp import horovod_here

    try:
        hvd = horovod_here.load()
    except ImportError as error:
        report.add("Horovod", "cannot be imported")
        report.problems.append(str(error))
        return
    transports = ", ".join(horovod_here.transports(hvd))
    report.add("Horovod", f"{metadata.version('horovod')} (by {transports})")


def _add_gpus(report: _Report, gpus: list[str]) -> None:
    if not gpus:
        report.add("GPUs", "none")
    for name in gpus:
        report.add("GPU", f"{name}{_describe_gpu(int(name.rpartition(':')[2]))}")


def _describe_gpu(ordinal: int) -> str:
    # This is not a problem, because everything also works on the host.
    from tf_gradcomp.ops import library
    from tf_gradcomp.ops.library import LibraryError

    try:
        found = library.gpu_info(ordinal)
    except LibraryError:
        return ""
    device = f", {found.name}, sm_{found.capability}" if found.name else ""
    if found.error:
        return f"{device} (gradients are copied to the host for the exchange: {found.error})"
    return (
        f"{device} (runs {', '.join(_methods_on_gpus())} and, for all methods, the division by "
        "second moments; its kernels agree with the CPU's)"
    )


def _methods_on_gpus() -> list[str]:
    from tf_gradcomp import compressors

    # On a GPU, they run TensorFlow's ops or another method.
    without = (compressors.NoCompression, compressors.Cast, compressors.LGreCo)
    methods = [compressors.get(name) for name in compressors.names()]
    ours = [method for method in methods if not isinstance(method, without)]
    return [type(m).__name__ for m in ours if getattr(m, "has_gpu_kernels", False)]


def _add_tf_config(report: _Report) -> None:
    try:
        config = read_tf_config()
    except ValueError as error:
        report.add("TF_CONFIG", "wrong")
        report.problems.append(str(error))
        return
    report.add("TF_CONFIG", "not set: one worker" if config is None else _describe(config))


def _describe(config: TFConfig) -> str:
    addresses = (f"{name}: {', '.join(hosts)}" for name, hosts in config.cluster.items())
    chief = ", the chief" if config.is_chief else ""
    return f"{config.task_type} {config.task_index}{chief} of {'; '.join(addresses)}"


def _show_verdict(report: _Report) -> None:
    for problem in report.problems:
        click.secho(f"gradcomp: {problem}", err=True, fg="red")
    if report.problems:
        click.echo(f"\nNot OK: {len(report.problems)} of these do not work together; see above.")
        return
    found = dict(report.rows)
    gpus = "no GPU" if "GPUs" in found else "with GPUs"
    click.echo(f"\nOK: tf_gradcomp trains with this TensorFlow, {gpus}.")
