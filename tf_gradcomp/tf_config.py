"""TF_CONFIG: the workers of a job, and this process's place among them.

TensorFlow reads the same environment variable, but treats a broken value as "no cluster" or fails
internally with an index error. This module reports each mistake in one sentence. This module
imports only the standard library, so that the launcher starts without TensorFlow.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VARIABLE = "TF_CONFIG"
TASK_TYPES = ("chief", "worker", "ps", "evaluator")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class TFConfig:
    """A checked TF_CONFIG.

    Attributes:
        cluster: The addresses (`host:port`) of each task type.
        task_type: The task type of this process: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.
        task_index: The index of this process among the tasks of its type.
    """

    cluster: Mapping[str, tuple[str, ...]]
    task_type: str
    task_index: int

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """The addresses of all training processes: the chief, if there is one, then the workers."""
        return (*self.cluster.get("chief", ()), *self.cluster.get("worker", ()))

    @property
    def num_workers(self) -> int:
        """The number of training processes."""
        return len(self.worker_addresses)

    @property
    def rank(self) -> int | None:
        """Place of this process in `worker_addresses`; `None` for `ps` and `evaluator`."""
        if self.task_type == "chief":
            return self.task_index
        if self.task_type == "worker":
            return len(self.cluster.get("chief", ())) + self.task_index
        return None

    @property
    def is_chief(self) -> bool:
        """Whether this process saves and logs for all processes: the process of rank 0."""
        return self.rank == 0


def read_tf_config(env: Mapping[str, str] | None = None) -> TFConfig | None:
    """Reads and checks TF_CONFIG.

    Args:
        env: The environment to read it from, by default the environment of this process.

    Returns:
        What it says, or `None` if it is not set.

    Raises:
        ValueError: If TF_CONFIG is invalid; the message is one sentence.
    """
    text = (os.environ if env is None else env).get(VARIABLE)
    if text is None:
        return None
    config = _parse(text)
    cluster = _check_cluster(config)
    task_type, task_index = _check_task(config, cluster)
    return TFConfig(cluster, task_type, task_index)


def make_tf_config(addresses: Sequence[str], index: int) -> str:
    """Returns the TF_CONFIG, as JSON text, of worker `index` of those at `addresses`."""
    text = json.dumps(
        {
            "cluster": {"worker": list(addresses)},
            "task": {"type": "worker", "index": index},
        }
    )
    read_tf_config({VARIABLE: text})
    return text


def host_of(address: str) -> str:
    """Returns the host of an address `host:port`, an IPv6 address without brackets."""
    return address.rpartition(":")[0].strip("[]")


def _parse(text: str) -> dict[str, Any]:
    if not text.strip():
        raise ValueError("TF_CONFIG is set but empty; unset it to train with one worker.")
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"TF_CONFIG is not valid JSON: {error}. Received: {text!r}") from None
    if not isinstance(config, dict):
        raise ValueError(f"TF_CONFIG must be a JSON object. Received: {text!r}")
    return config


def _check_cluster(config: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    cluster = config.get("cluster")
    if not isinstance(cluster, dict) or not cluster:
        raise ValueError(
            'TF_CONFIG needs a "cluster" object such as {"worker": ["host1:2222", "host2:2222"]}. '
            f"Received: {cluster!r}"
        )
    seen: set[str] = set()
    for task_type, addresses in cluster.items():
        _check_task_type(task_type, "cluster")
        if not isinstance(addresses, list) or not addresses:
            raise ValueError(
                f'TF_CONFIG\'s cluster needs a list of addresses for "{task_type}". '
                f"Received: {addresses!r}"
            )
        if task_type == "chief" and len(addresses) > 1:
            raise ValueError(f"TF_CONFIG's cluster may have one chief only. Received: {addresses}")
        for address in addresses:
            _check_address(address)
            if address in seen:
                raise ValueError(
                    f"TF_CONFIG's cluster has the address {address!r} twice; every task needs its "
                    "own address."
                )
            seen.add(address)
    return {task_type: tuple(addresses) for task_type, addresses in cluster.items()}


def _check_address(address: object) -> None:
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(
            f'TF_CONFIG\'s addresses must be "host:port", with a port of 1 to 65535. '
            f"Received: {address!r}"
        )


def _check_task(config: dict[str, Any], cluster: Mapping[str, tuple[str, ...]]) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
        raise ValueError(
            'TF_CONFIG needs a "task" object such as {"type": "worker", "index": 0}. '
            f"Received: {task!r}"
        )
    task_type = task["type"]
    _check_task_type(task_type, "task")
    index = _check_index(task["index"])
    # An evaluator is not part of the cluster that it evaluates.
    size = len(cluster.get(task_type, ())) or (1 if task_type == "evaluator" else 0)
    if size == 0:
        raise ValueError(
            f'TF_CONFIG\'s task is a "{task_type}", but the cluster has none '
            f"(it has: {', '.join(cluster)})."
        )
    if not 0 <= index < size:
        raise ValueError(
            f"TF_CONFIG's task index {index} is out of range: the cluster has {size} "
            f'"{task_type}" task{"s" if size > 1 else ""}, counted from 0.'
        )
    return task_type, index


def _check_task_type(task_type: object, where: str) -> None:
    if task_type not in TASK_TYPES:
        raise ValueError(
            f"TF_CONFIG's {where} has the unknown task type {task_type!r}; "
            f"known are: {', '.join(TASK_TYPES)}."
        )


def _check_index(index: object) -> int:
    # TensorFlow takes "0" as well as 0, and cluster managers do write it so.
    if isinstance(index, str) and index.isdecimal():
        return int(index)
    if isinstance(index, int) and not isinstance(index, bool):
        return index
    raise ValueError(f"TF_CONFIG's task index must be a whole number. Received: {index!r}")
