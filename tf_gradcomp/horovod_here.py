"""Horovod in this process: imported on request, or already in use by the program."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

_HOROVOD_SIZE = "HOROVOD_SIZE"  # set by Horovod's launcher, which starts nothing else
_LAUNCHERS_SIZES = (_HOROVOD_SIZE, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_ELASTIC = "HOROVOD_ELASTIC"
HOW_TO_BUILD = (
    "Horovod cannot be imported here: %s. Build Horovod for the installed TensorFlow: "
    "HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 pip install --no-build-isolation "
    "horovod==0.28.1 (it needs cmake and a C++ compiler; docs/horovod.md has the flags that "
    "newer versions of TensorFlow need)."
)


def load() -> Any:
    """Returns the module `horovod.tensorflow`.

    Raises an ImportError that says how to build it, if it is not there or for another TensorFlow.
    """
    try:
        import horovod.tensorflow as hvd
    except Exception as error:  # an unsuitable library may raise any error
        raise ImportError(HOW_TO_BUILD % error) from error
    return hvd


def transports(hvd: Any) -> list[str]:
    """Returns the transports that Horovod was built with."""
    built = {"gloo": hvd.gloo_built, "MPI": hvd.mpi_built, "NCCL": hvd.nccl_built}
    return [name for name, is_built in built.items() if is_built()]


def in_use() -> Any | None:
    """The interface of Horovod, such as `horovod.tensorflow`, that the program has initialized."""
    if "horovod" not in sys.modules:
        return None
    modules = [module for name, module in sys.modules.items() if name.startswith("horovod.")]
    return next(filter(_is_initialized, modules), None)


def size() -> tuple[str, int]:
    """Returns the number of Horovod's processes and its source; 1 without Horovod.

    This queries Horovod, and MPI's environment, only if the program has imported Horovod, because
    `mpirun` also starts programs of other kinds.
    """
    hvd = in_use()
    if hvd is not None:
        return hvd.__name__, hvd.size()
    return _launchers_size(_LAUNCHERS_SIZES if "horovod" in sys.modules else (_HOROVOD_SIZE,))


def mpirun_world_size_mismatch() -> tuple[str, int]:
    """Returns the number of processes that `mpirun` started unknown to Horovod, and its source.

    Without MPI built in, it takes each of them for the only one.
    """
    hvd = in_use()
    if hvd is None or hvd.size() > 1 or getattr(hvd, "mpi_built", lambda: True)():
        return "", 1
    return _launchers_size(_LAUNCHERS_SIZES)


def _launchers_size(names: Sequence[str]) -> tuple[str, int]:
    sizes = [(name, _number(os.environ.get(name, ""))) for name in names]
    return max(sizes, key=lambda named: named[1])


def is_elastic() -> bool:
    """Whether Horovod's launcher may add and remove processes while the job runs."""
    return os.environ.get(_ELASTIC, "0") not in ("", "0")


def _is_initialized(module: Any) -> bool:
    asks = [getattr(module, name, None) for name in ("is_initialized", "size")]
    return all(callable(ask) for ask in asks) and module.is_initialized()


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 1
