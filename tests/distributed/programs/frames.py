"""Reports the library's frames from `apply_gradients` to each collective of a traced step.

A merge call runs in the thread of `strategy.run`. That function is older than `apply_gradients`, so
it is left out.
"""

import sys
import threading
import traceback
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tf_gradcomp as gc
from tests.ranks import report

LIBRARY = str(Path(gc.__file__).parent)
found = {}
create = tf.Graph._create_op_internal
method = None


def stacks():
    """Yields the library's frames of all threads that trace the step, outermost first."""
    for thread, frame in sys._current_frames().items():
        frames = [
            (Path(one.filename).relative_to(LIBRARY).as_posix(), one.name)
            for one in traceback.extract_stack(frame)
            if one.filename.startswith(LIBRARY)
        ]
        if frames:
            yield thread != threading.get_ident(), frames


def noting(graph, op_type, *args, **kwargs):
    if method and op_type.startswith("Collective"):
        frames = [frame for _, one in sorted(stacks(), reverse=True) for frame in one]
        frames = [frame for frame in frames if frame != ("strategy/strategy.py", "run")]
        names = [name for _, name in frames]
        if "apply_gradients" in names:  # metrics are averaged elsewhere
            found.setdefault(method, []).append(frames[names.index("apply_gradients") :])
    return create(graph, op_type, *args, **kwargs)


tf.Graph._create_op_internal = noting
strategy = gc.MultiWorkerMirroredStrategy()
x, y = np.ones([16, 4], "float32"), np.ones([16, 1], "float32")
for method in ("adacomp", "power_sgd(rank=1)"):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        optimizer = gc.CompressedOptimizer(keras.optimizers.SGD(0.1), compressor=method)
        model.compile(optimizer, loss="mse")
    model.fit(x, y, batch_size=8, verbose=0)
report(found)
