"""Gradient compression for data-parallel training with TensorFlow and Keras.

```python
import keras
import tf_gradcomp as gc

strategy = gc.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = build_model()
    model.compile(optimizer=gc.CompressedOptimizer(keras.optimizers.Adam()), loss="mse")
model.fit(dataset, epochs=10, callbacks=[gc.callbacks.CompressionMonitor()])
```
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tf_gradcomp import keras_backend

if TYPE_CHECKING:
    from tf_gradcomp import callbacks, compressors, ops, simulation
    from tf_gradcomp.advice.cost_model import Advice
    from tf_gradcomp.chief import is_chief, worker_path
    from tf_gradcomp.groups.agreement import WorkersDisagreeError
    from tf_gradcomp.groups.horovod_group import HorovodGroup
    from tf_gradcomp.keras.common.advice import advise
    from tf_gradcomp.keras.common.autoencoder_model import Autoencoder
    from tf_gradcomp.keras.common.initial_state import broadcast_initial_state
    from tf_gradcomp.keras.common.model_policy import Policy
    from tf_gradcomp.keras.keras3.optimizer import CompressedOptimizer
    from tf_gradcomp.keras.local.gossip import Gossip
    from tf_gradcomp.keras.local.local_steps import LocalSteps
    from tf_gradcomp.strategy.compressed_all_reduce import CompressedAllReduce
    from tf_gradcomp.strategy.strategy import MultiWorkerMirroredStrategy

__version__ = metadata.version("tf-gradcomp")

# Loaded on first use, so that the `gradcomp` command starts without loading TensorFlow.
_HOME = {
    "Advice": "tf_gradcomp.advice.cost_model",
    "Autoencoder": "tf_gradcomp.keras.common.autoencoder_model",
    "CompressedAllReduce": "tf_gradcomp.strategy.compressed_all_reduce",
    "Gossip": "tf_gradcomp.keras.local.gossip",
    "HorovodGroup": "tf_gradcomp.groups.horovod_group",
    "LocalSteps": "tf_gradcomp.keras.local.local_steps",
    "MultiWorkerMirroredStrategy": "tf_gradcomp.strategy.strategy",
    "Policy": "tf_gradcomp.keras.common.model_policy",
    "WorkersDisagreeError": "tf_gradcomp.groups.agreement",
    "advise": "tf_gradcomp.keras.common.advice",
    "broadcast_initial_state": "tf_gradcomp.keras.common.initial_state",
    "is_chief": "tf_gradcomp.chief",
    "worker_path": "tf_gradcomp.chief",
}
_MODULES = ("callbacks", "compressors", "ops", "simulation")

__all__ = [
    "Advice",
    "Autoencoder",
    "CompressedAllReduce",
    "CompressedOptimizer",
    "Gossip",
    "HorovodGroup",
    "LocalSteps",
    "MultiWorkerMirroredStrategy",
    "Policy",
    "WorkersDisagreeError",
    "__version__",
    "advise",
    "broadcast_initial_state",
    "callbacks",
    "compressors",
    "is_chief",
    "ops",
    "simulation",
    "worker_path",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name == "CompressedOptimizer":
        version = importlib.import_module("tf_gradcomp.keras_version")
        return version.keras_module("optimizer").CompressedOptimizer
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    hint = ""
    if name in vars(sys.modules.get(f"{__name__}.compressors", sys)).get("__all__", []):
        hint = f"; did you mean gc.compressors.{name}?"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return __all__


keras_backend.check()
if {"keras", "tf_keras"} & sys.modules.keys():  # so that load_model finds the saved classes
    with contextlib.suppress(ImportError):  # which is raised again when a class is used
        __getattr__("CompressedOptimizer")
        __getattr__("Autoencoder")
