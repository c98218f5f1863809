"""Replaces the files of a `tf.train.Checkpoint` so that a kill leaves the last complete one."""

from __future__ import annotations

import copy
import glob
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.whole_files import folder_beside, move

Write = Callable[[str, tf.train.CheckpointOptions], Any]


def replace_checkpoint(prefix: str, options: tf.train.CheckpointOptions, write: Write) -> None:
    """Writes a checkpoint by `write(prefix, options)` elsewhere, and moves its files to a prefix.

    The index names the data files by their number alone. So the data files are as many as the old
    ones never were, and the new index takes the place of the old one last. TensorFlow 2.15 does not
    let anybody choose the number, and writes in place.
    """
    if not hasattr(tf.train.experimental, "ShardingCallback"):
        write(prefix, options)
        return
    old = set(glob.glob(f"{glob.escape(prefix)}.data-?????-of-?????"))
    options = copy.copy(options)
    options.experimental_sharding_callback = _other_number(
        options.experimental_sharding_callback or tf.train.experimental.ShardByTaskPolicy(),
        {int(path[-5:]) for path in old},
    )
    folder, name = os.path.split(prefix)
    os.makedirs(folder or ".", exist_ok=True)
    with folder_beside(prefix) as beside:
        write(os.path.join(beside, name), options)
        index = f"{name}.index"
        names = sorted(os.listdir(beside), key=lambda one: one == index)
        move({os.path.join(beside, one): os.path.join(folder, one) for one in names})
    for path in old:
        if os.path.basename(path) not in names:
            os.remove(path)


def _other_number(policy: Any, not_into: set[int]) -> Any:
    """Returns what splits as a policy does, but never into one of some numbers of files."""

    class OtherNumber(tf.train.experimental.ShardingCallback):
        number = 0

        @property
        def description(self) -> str:
            return policy.description

        def __call__(self, shardable_tensors: Sequence[Any]) -> list[Any]:
            shards = list(policy(shardable_tensors))
            while self.number + len(shards) in not_into:
                several = next((shard for shard in shards if len(shard) > 1), None)
                if several is None:
                    break
                shards.append(dict([several.popitem()]))
            self.number += len(shards)
            return shards

    return OtherNumber()
