"""Replaces weights in several files so that a kill leaves a complete save."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

from tf_gradcomp.whole_files import check_room, move, temporary_folder


def replace_shards(path: str, size: int, write: Callable[[str], Any]) -> None:
    """Writes weights by `write(path)` into a temporary folder, and moves the files to a path.

    Raises OSError if the disk has less room than `size` bytes: HDF5 would end the process.

    A JSON file lists the files with weights. New files get unused names, and the new list replaces
    the old list last. Then the files of the old list are removed. Keras opens the first file even
    if the list does not name it, so this file stays, without content.
    """
    listed = Path(path).with_suffix(".json")
    base = listed.stem.replace(".weights", "")
    old = _shards_of(listed, base)
    names = (listed.with_name(f"{base}_{n:05}.weights.h5") for n in itertools.count())
    free = (name for name in names if not os.path.lexists(name))
    with temporary_folder(path) as temporary:
        check_room(temporary, size)
        write(os.path.join(temporary, os.path.basename(path)))
        new = {shard: next(free) for shard in sorted(Path(temporary).glob("*.weights.h5"))}
        content = (new_list := Path(temporary, listed.name)).read_text()
        as_moved = {shard.name: to.name for shard, to in new.items()}
        new_list.write_text(json.dumps(_renamed(json.loads(content), as_moved), indent=4))
        move({os.fspath(source): os.fspath(to) for source, to in {**new, new_list: listed}.items()})
        first = listed.with_name(f"{base}_00000.weights.h5")
        for shard in old - {first}:
            shard.unlink(missing_ok=True)
        if first in old:
            h5py.File(empty := os.path.join(temporary, "empty"), "w").close()
            move({empty: os.fspath(first)})


def _shards_of(listed: Path, base: str) -> set[Path]:
    """Returns the files that a list owns; a copied list also names files of another list."""
    try:
        named = json.loads(listed.read_text())["weight_map"].values()
    except (OSError, ValueError, LookupError):
        return set()
    own = re.compile(rf"{re.escape(base)}_\d{{5,}}\.weights\.h5")
    each = itertools.chain.from_iterable([one] if isinstance(one, str) else one for one in named)
    return {listed.with_name(name) for name in each if own.fullmatch(name)}


def _renamed(shards: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    of_variables = {
        variable: names[files] if isinstance(files, str) else [names[file] for file in files]
        for variable, files in shards["weight_map"].items()
    }
    return {**shards, "weight_map": of_variables}
