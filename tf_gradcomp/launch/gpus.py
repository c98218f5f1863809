"""Divides this machine's GPUs among its workers, by the variable that CUDA reads."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

VARIABLE = "CUDA_VISIBLE_DEVICES"
_LIST = ("nvidia-smi", "--list-gpus")


def gpus_of_workers(
    workers: int, each: int, env: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """Returns the variables that give workers their own GPUs: neighbours, in workers' order.

    If `env` lists the visible GPUs, only these are divided; otherwise all GPUs are.
    """
    gpus, who = _seen(env)
    if len(gpus) < workers * each:
        count = f"{each} GPU{'s' if each > 1 else ''}"
        raise ValueError(
            f"{workers} workers with {count} each need {workers * each}, but this machine has "
            f"{len(gpus)}: {who}."
        )
    return [
        {VARIABLE: ",".join(gpus[worker * each : (worker + 1) * each])} for worker in range(workers)
    ]


def _seen(env: Mapping[str, str]) -> tuple[list[str], str]:
    """The usable GPUs, in the names of CUDA's variable, and the source of the list."""
    given = env.get(VARIABLE)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        # As in CUDA: all names after an unknown GPU are ignored.
        end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        return names[:end], f"{VARIABLE} is {given!r}"
    try:
        listed = subprocess.run(
            _LIST, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError as error:
        return [], f"{_LIST[0]}, which lists them, cannot be started ({error.strerror})"
    # The parts of a split GPU (MIG) are on separate, indented lines.
    found = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    if listed.returncode:
        return [], f"{_LIST[0]} says {(listed.stdout + listed.stderr).strip()!r}"
    return [str(number) for number in range(len(found))], f"{_LIST[0]} lists them"
