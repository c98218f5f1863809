"""Replaces the files of a `tf.train.Checkpoint` so that a kill leaves a complete checkpoint."""

from __future__ import annotations

import copy
import glob
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.whole_files import move, temporary_folder

Write = Callable[[str, tf.train.CheckpointOptions], Any]

_NUMBER = "[0-9]" * 5


def replace_checkpoint(prefix: str, options: tf.train.CheckpointOptions, write: Write) -> None:
    """Writes a checkpoint into a temporary folder, and moves its files to a prefix.

    An index identifies its data files only by their number. The new data files therefore get a
    number that no old files have, and the new index replaces the old index last. TensorFlow 2.15
    does not let callers choose the number, so with that version the checkpoint is written in place.
    """
    if not hasattr(tf.train.experimental, "ShardingCallback"):
        write(prefix, options)
        return
    old = set(glob.glob(f"{glob.escape(prefix)}.data-{_NUMBER}-of-{_NUMBER}"))
    options = copy.copy(options)
    options.experimental_sharding_callback = _other_number(
        options.experimental_sharding_callback or tf.train.experimental.ShardByTaskPolicy(),
        {int(path[-5:]) for path in old},
    )
    folder, name = os.path.split(prefix)
    os.makedirs(folder or ".", exist_ok=True)
    with temporary_folder(prefix) as temporary:
        write(os.path.join(temporary, name), options)
        index = f"{name}.index"
        names = sorted(os.listdir(temporary), key=lambda one: one == index)
        move({os.path.join(temporary, one): os.path.join(folder, one) for one in names})
    for path in old:
        if os.path.basename(path) not in names:
            os.remove(path)


def _other_number(policy: Any, not_into: set[int]) -> Any:
    """Returns a policy that splits like `policy`, but avoids some numbers of files.

    After as many kills as there are tensors, each number may have old data files. The new data
    files then replace old files just before the index.
    """

    class OtherNumber(tf.train.experimental.ShardingCallback):
        number = 0

        @property
        def description(self) -> str:
            return policy.description

        def __call__(self, shardable_tensors: Sequence[Any]) -> list[Any]:
            shards = list(policy(shardable_tensors))
            most = sum(map(len, shards))
            numbers = [*range(len(shards), most + 1), *range(len(shards) - 1, 0, -1)]
            free = (number for number in numbers if self.number + number not in not_into)
            _split_into(next(free, len(shards)), shards)
            self.number += len(shards)
            return shards

    return OtherNumber()


def _split_into(number: int, shards: list[Any]) -> None:
    while len(shards) < number:
        several = next(shard for shard in shards if len(shard) > 1)
        shards.append(dict([several.popitem()]))
    while len(shards) > number:
        for key, slices in shards.pop().items():
            shards[-1].setdefault(key, {}).update(slices)
