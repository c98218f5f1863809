"""The processes of a Horovod job as a group of replicas, and its operations as a communicator."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp import horovod_here
from tf_gradcomp.groups.agreement import Processes
from tf_gradcomp.groups.communicator import Communicator
from tf_gradcomp.groups.group import Group

_NOT_BY_HOROVOD = (tf.bfloat16,)  # summed as float32

# Number of exchanges of each process set; all processes of a set build the same exchanges.
_exchanges: collections.Counter[int] = collections.Counter()


class HorovodCommunicator(Communicator):
    """Horovod's operations, in a graph or eagerly.

    Horovod matches the ranks' operations by name, not by order. Names therefore follow from the
    variables of an exchange and the order of its collectives.
    """

    def __init__(self, hvd: Any, process_set: Any, label: str = "") -> None:
        super().__init__(process_set.size(), process_set.rank())
        self.label = label
        self._hvd = hvd
        self._process_set = process_set
        self._collectives = 0

    def all_gather(self, row: tf.Tensor) -> tf.Tensor:
        """Gathers int32 rows of one length, in the order of the replicas."""
        return tf.ensure_shape(self._gather(row), [self.size, *row.shape[1:]])

    def all_gather_padded(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers vectors of any lengths by Horovod, which concatenates them, and pads them."""
        flat = self._gather(tf.concat([tf.size(payload)[tf.newaxis], payload], 0))
        starts, lengths, start = [], [], tf.constant(0)
        for _ in range(self.size):
            starts.append(start + 1)
            lengths.append(flat[start])
            start += 1 + flat[start]
        longest = tf.reduce_max(lengths)
        rows = [
            tf.pad(flat[start : start + length], [[0, longest - length]])
            for start, length in zip(starts, lengths, strict=True)
        ]
        return tf.stack(rows), tf.size(flat) // self.size

    def all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sum of vectors of one length and dtype."""
        dtype = values.dtype
        if dtype in _NOT_BY_HOROVOD:
            values = tf.cast(values, tf.float32)
        return tf.cast(self._sum(values), dtype)

    def broadcast(self, payload: tf.Tensor, root: tf.Tensor) -> tf.Tensor:
        """Returns the int32 vector of the replica whose rank is `root`."""
        local_size = tf.where(tf.equal(root, self.rank), tf.size(payload), 0)
        return tf.ensure_shape(self._gather(payload[:local_size]), payload.shape)

    def element_bytes(self, dtype: tf.DType) -> int:
        """Returns the bytes of each element of a sum in transit."""
        return 4 if dtype in _NOT_BY_HOROVOD else dtype.size

    def _sum(self, values: tf.Tensor) -> tf.Tensor:
        return self._hvd.allreduce(values, op=self._hvd.Sum, **self._named(self._process_set))

    def _gather(self, values: tf.Tensor) -> tf.Tensor:
        return self._hvd.allgather(values, **self._named(self._process_set))

    def _named(self, process_set: Any) -> dict[str, Any]:
        self._collectives += 1
        return {
            "name": f"gradcomp_{self.label}_{self._collectives}",
            "ignore_name_scope": True,  # so that names do not depend on where a step is traced
            "process_set": process_set,
        }


class HorovodGroup(Group):
    """The processes of a Horovod job, or some of them; each is one replica.

    Args:
        process_set: The ranks that train together, as given to `hvd.init` or
            `hvd.add_process_set`; by default all.

    Raises:
        ImportError: If Horovod is not there; says how to build it.
        ValueError: If Horovod is not initialized, is elastic, or this process is not in the set.
    """

    local_size = 1

    def __init__(self, process_set: Any = None) -> None:
        hvd = horovod_here.load()
        if not hvd.is_initialized():
            raise ValueError(
                "Horovod is not initialized: call hvd.init() before any training, after `import "
                "horovod.tensorflow as hvd`."
            )
        if horovod_here.is_elastic():
            raise ValueError(
                "Elastic Horovod is not supported: a lost process would take its residual, which "
                "is part of the gradients, out of the job, and an added process would have no "
                "residual. Start the job without --min-np, --max-np and --host-discovery-script; "
                "after a failure, restart it from a checkpoint, with any number of processes."
            )
        self._hvd = hvd
        self._process_set = hvd.global_process_set if process_set is None else process_set
        if self._process_set.process_set_id is None or not self._process_set.included():
            raise ValueError(
                f"Process {hvd.rank()} is not in {self._process_set}: build the optimizer only on "
                "the ranks of this set, after passing the set to hvd.init or hvd.add_process_set."
            )
        self.size = self._process_set.size()
        is_first, first_rank = self._process_set.rank() == 0, self._process_set.ranks[0]
        self.processes = Processes(self.size, is_first, self._host_function(), first_rank)

    @property
    def by_strategy(self) -> bool:  # type: ignore[override]
        """Whether there is only one process, which saves as under a strategy."""
        return self.size == 1

    def check_current(self) -> None:
        """Raises under a strategy, or after Horovod has been shut down."""
        if tf.distribute.has_strategy():
            raise ValueError(
                'CompressedOptimizer(group="horovod") was called under '
                f"{type(tf.distribute.get_strategy()).__name__}: gradients are exchanged either by "
                "Horovod or by a strategy; use only one of the two."
            )
        if not self._hvd.is_initialized():
            raise ValueError("Horovod was shut down, so its processes cannot reach each other.")

    def label(self, paths: Sequence[str]) -> str:
        set_id = self._process_set.process_set_id
        _exchanges[set_id] += 1
        first = re.sub("[^A-Za-z0-9]", "_", paths[0]) if paths else "nothing"
        return f"{set_id}_{_exchanges[set_id]}_{first}"

    def communicator(self, label: str = "") -> Communicator:
        return HorovodCommunicator(self._hvd, self._process_set, label)

    def communicators(self) -> list[Communicator]:
        return [HorovodCommunicator(self._hvd, self._process_set)]

    def local(self, variable: tf.Variable, local_replica: int | None = None) -> tf.Variable:
        return variable

    def _host_function(self) -> Callable[[tf.Tensor], tf.Tensor]:
        """Gathers in a graph, because all eager operations of Horovod have the same name."""
        name = f"gradcomp_{self._process_set.process_set_id}_host"

        def gather(value: tf.Tensor) -> tf.Tensor:
            return self._hvd.allgather(
                value, name=name, ignore_name_scope=True, process_set=self._process_set
            )

        return tf.function(gather, autograph=False, reduce_retracing=True)

    @property
    def is_collective(self) -> bool:
        return True

    @property
    def devices(self) -> Sequence[str]:
        gpus = tf.config.list_logical_devices("GPU")
        return [device.name for device in gpus[:1]] or ["CPU:0"]
