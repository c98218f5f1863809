"""The processes of a job: how they agree between steps, and on the gradients of a step."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import importlib
import json
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import tensorflow as tf

# Of 64-bit words; their sums fit into a core's cache. The number is prime, because a table whose
# rows are in another order has equal sums if the length of a row is a multiple of it.
_COLUMNS = 1021


class WorkersDisagreeError(RuntimeError):
    """The workers of a job were started with different programs, settings or versions."""


def package_versions() -> dict[str, str]:
    """The versions that all workers must share."""
    return {
        "tf_gradcomp": metadata.version("tf-gradcomp"),
        "tensorflow": tf.__version__,
        "keras": keras_version(),
        "byte order and machine": platform.machine(),
    }


def keras_version() -> str:
    """Returns the version of `tf.keras`, whose package may be keras, keras-nightly or tf_keras."""
    package, _, _ = tf.keras.__name__.partition(".")
    return importlib.import_module(package).__version__


def compare(
    facts: Mapping[str, Any], all_gather: Callable[[tf.Tensor], tf.Tensor], value: str = ""
) -> bool:
    """Compares `facts` over all processes of a job; see `Processes.agree`.

    Returns:
        Whether `value` is equal on all processes, too.
    """
    processes, is_equal = _compared(facts, value, all_gather)
    if processes is not None:
        raise WorkersDisagreeError(describe(processes))
    return is_equal


def facts_if_different(
    facts: Mapping[str, Any], all_gather: Callable[[tf.Tensor], tf.Tensor]
) -> list[dict[str, Any]] | None:
    """Returns the facts of all processes; None if they are equal, after one small collective.

    `all_gather` gathers a small tensor of each process along axis 0.
    """
    return _compared(facts, "", all_gather)[0]


def _compared(
    facts: Mapping[str, Any], value: str, all_gather: Callable[[tf.Tensor], tf.Tensor]
) -> tuple[list[dict[str, Any]] | None, bool]:
    """Returns what `facts_if_different` and `compare` return.

    Their collectives have one shape, because processes that differ may compare different things.
    """
    text = json.dumps(facts, sort_keys=True).encode()
    with tf.device("CPU:0"):
        rows = all_gather(tf.constant([[_number(text), _number(value.encode())]], tf.int64))
        facts_equal, is_equal = np.all(rows.numpy() == rows.numpy()[0], 0)
        if facts_equal:
            return None, bool(is_equal)
        return [json.loads(row) for row in gather_bytes(text, all_gather)], bool(is_equal)


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)


def digest(values: np.ndarray) -> str:
    """Returns 16 hexadecimal digits that depend on the bits of values, at the speed of memory.

    Sums of columns are hashed, because the hashes of the standard library are ten times slower.
    """
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    end = data.size // (8 * _COLUMNS) * 8 * _COLUMNS
    sums = data[:end].view(np.uint64).reshape(-1, _COLUMNS).sum(0, dtype=np.uint64)
    found = hashlib.blake2b(sums.tobytes(), digest_size=8)
    found.update(data[end:].tobytes())
    return found.hexdigest()


def gather_bytes(local_data: bytes, all_gather: Callable[[tf.Tensor], tf.Tensor]) -> list[bytes]:
    """Returns the bytes of each process."""
    data = np.frombuffer(local_data, np.uint8).astype(np.int32)
    lengths = all_gather(tf.constant([data.size], tf.int32)).numpy()
    padded = np.zeros([1, lengths.max()], np.int32)
    padded[0, : data.size] = data
    rows = all_gather(tf.constant(padded)).numpy().astype(np.uint8)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def describe(facts: Sequence[Mapping[str, Any]], *, only_differences: bool = False) -> str:
    """Returns a message that names the facts that differ between processes."""
    names = sorted({name for worker in facts for name in worker})
    differences = [
        f"{name}: "
        + ", ".join(f"worker {i} has {_shown(worker, name)}" for i, worker in enumerate(facts))
        for name in names
        if any(_shown(worker, name) != _shown(facts[0], name) for worker in facts)
    ]
    if only_differences:
        return "; ".join(differences)
    return (
        "The workers of this job were started with different programs, settings or versions. "
        + "; ".join(differences)
        + ". Start all workers with the same program and the same arguments."
    )


def _shown(facts: Mapping[str, Any], name: str) -> str:
    return repr(facts[name]) if name in facts else "nothing"


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a job, as seen from one process.

    Attributes:
        size: The number of processes.
        is_first: Whether the job's first replica is in this process.
        gather: Gathers one small tensor of each process along axis 0, eagerly and not in a graph.
        first_rank: The number, in the whole job, of the process with the first replica.
    """

    size: int
    is_first: bool
    gather: Callable[[tf.Tensor], tf.Tensor]
    first_rank: int = 0

    @tf.autograph.experimental.do_not_convert  # the reader warns of values that it cannot parse
    def agree(self, facts: Mapping[str, Any], seconds: float | None = None) -> None:
        """Compares `facts` over all processes; returns if all are equal.

        If they are equal, this takes one small collective. All processes must call it in the same
        order.

        Args:
            facts: JSON-serializable values by name.
            seconds: How long to wait for the other processes; by default forever.

        Raises:
            WorkersDisagreeError: On every process, naming the differing facts and processes; or
                only on this process, if the other processes do not come to compare.
        """
        if self.size == 1:
            return
        if not _ends_within(seconds, lambda: compare(facts, self.gather)):
            raise WorkersDisagreeError(
                f"This worker has waited {seconds} seconds for the other workers to compare "
                f"{dict(facts)}, but they took another path through the program. All workers must "
                "run the same program, and their own data must not determine which variables they "
                "train."
            )

    def agree_and_share(self, facts: Mapping[str, Any], value: np.ndarray) -> bool:
        """Compares `facts` as `agree` does; returns whether all have the same value, too."""
        return self.size == 1 or compare(facts, self.gather, digest(value))

    def facts_if_different(self, facts: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Returns the facts of all processes, which wait for each other; None if all are equal."""
        return None if self.size == 1 else facts_if_different(facts, self.gather)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The maximum of each number over all processes, which wait for each other here."""
        if self.size == 1:
            return list(values)
        with tf.device("CPU:0"):
            rows = self.gather(tf.constant([list(values)], tf.float64))
            return np.max(rows.numpy(), 0).tolist()

    def broadcast_values(self, values: np.ndarray) -> np.ndarray:
        """Returns, on all processes, the numbers of the process that has the first replica."""
        if self.size == 1:
            return values
        contribution = values if self.is_first else np.zeros_like(values)
        with tf.device("CPU:0"):
            return np.sum(self.gather(tf.constant(contribution[np.newaxis])).numpy(), 0)

    def broadcast_bytes(self, local_data: bytes) -> bytes:
        """The first process's bytes, on all processes, which wait for each other here."""
        if self.size == 1:
            return local_data
        with tf.device("CPU:0"):
            return gather_bytes(local_data, self.gather)[0]


def _ends_within(seconds: float | None, exchange: Callable[[], Any]) -> bool:
    """Returns whether `exchange` ends in time; `seconds=None` sets no limit.

    An error of `exchange` is raised. Horovod itself has no time limit. TensorFlow's limit aborts
    all collectives of the process, which sometimes crashes the process.
    """
    if seconds is None:
        exchange()
        return True
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def settle() -> None:
        try:
            exchange()
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)

    # A daemon thread does not keep the process from ending.
    threading.Thread(target=settle, daemon=True).start()
    if not concurrent.futures.wait([done], seconds).done:
        return False
    done.result()  # raises the error of `exchange`, which may itself be a TimeoutError
    return True


LATER_LIST_SECONDS = 600.0  # how long one worker may trace a new step alone


class GradientAgreement:
    """Compares with other workers, while a step is traced, which variables have gradients.

    Workers compare once for each set of variables, and not at each trace, because some workers
    trace more often than others. A worker with a smaller last batch, for example, traces again.

    Args:
        agree: `Processes.agree` of the workers.
    """

    def __init__(self, agree: Callable[..., None]) -> None:
        self._agree = agree
        self._agreed: set[tuple[tuple[str, str], ...]] = set()

    def check(
        self,
        paths: Sequence[str],
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        progress: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Compares which variables have gradients.

        Args:
            paths: The paths of the variables.
            gradients: One gradient for each path.
            progress: Returns facts by name, such as the number of exchanges so far; if given, the
                first call compares them.

        Raises:
            WorkersDisagreeError: On every worker, naming the variables that differ.
        """
        forms = ["sparse" if isinstance(g, tf.IndexedSlices) else "dense" for g in gradients]
        gradient_forms = tuple(zip(paths, forms, strict=True))
        if gradient_forms in self._agreed:
            return
        with tf.init_scope():
            facts: dict[str, Any] = {f"gradient of {path!r}": form for path, form in gradient_forms}
            facts["next action"] = "exchanging gradients"
            if progress is not None and not self._agreed:
                facts.update(progress())
            # Other workers may know this list and be in a step with another list: then they never
            # come.
            self._agree(facts, LATER_LIST_SECONDS if self._agreed else None)
        self._agreed.add(gradient_forms)
