"""Replaces weights in several files so that a kill leaves the last complete save."""

from __future__ import annotations

import glob
import io
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

from tf_gradcomp.whole_files import folder_beside, move, replacing


def replace_shards(path: str, write: Callable[[str], Any]) -> None:
    """Writes weights by `write(path)` elsewhere, and moves their files to a path.

    A JSON file lists the others. New files get names that no old file has, and the new list takes
    the place of the old one last. Keras opens the first file even where the list does not name it,
    so that one stays, without content.
    """
    listed = Path(path).with_suffix(".json")
    base = listed.stem.replace(".weights", "")
    old: set[Path] = set()
    if listed.exists():
        old.update(listed.parent.glob(f"{glob.escape(base)}_?????.weights.h5"))
    names = (listed.with_name(f"{base}_{n:05}.weights.h5") for n in itertools.count())
    free = (name for name in names if name not in old)
    with folder_beside(path) as beside:
        write(os.path.join(beside, os.path.basename(path)))
        new = {shard: next(free) for shard in sorted(Path(beside).glob("*.weights.h5"))}
        content = (new_list := Path(beside, listed.name)).read_text()
        as_moved = {shard.name: to.name for shard, to in new.items()}
        new_list.write_text(json.dumps(_renamed(json.loads(content), as_moved), indent=4))
        move({os.fspath(source): os.fspath(to) for source, to in {**new, new_list: listed}.items()})
    for shard in old:
        if shard.name == f"{base}_00000.weights.h5":
            empty = io.BytesIO()
            h5py.File(empty, "w").close()
            with replacing(os.fspath(shard)) as file:
                file.write(empty.getbuffer())
        else:
            shard.unlink()


def _renamed(shards: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    of_variables = {
        variable: names[files] if isinstance(files, str) else [names[file] for file in files]
        for variable, files in shards["weight_map"].items()
    }
    return {**shards, "weight_map": of_variables}
