"""Puts files in place when they are complete, so that a kill or a full disk leaves the old ones."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import IO

from tf_gradcomp.chief import this_worker

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_NO_EXCHANGE = (
    "This file system cannot exchange two folders at once, so the old folder stays. The new one is "
    "complete in %r. Save to a path that does not exist yet, or to one .keras file"
)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[IO[bytes]]:
    """Gives an open file beside `path`, which takes its place at the end of the context.

    After an error or a kill, what was at `path` before is still there.
    """
    path = os.path.realpath(path)
    beside = _beside(path)
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            shutil.copymode(path, beside)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(beside)
        raise
    _sync(os.path.dirname(path))


@contextlib.contextmanager
def folder_beside(path: str) -> Iterator[str]:
    """Gives a new folder on the disk of `path`, and removes it at the end of the context."""
    folder = _beside(path)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def replacing_path(path: str) -> Iterator[str]:
    """Gives a path to write a file or folder to, which takes the place of `path` at the end.

    Files in an old folder that the new one lacks stay.

    Raises:
        OSError: If the file system cannot replace a folder; the old one stays then.
    """
    path = os.path.realpath(path)
    with folder_beside(path) as beside:
        new = os.path.join(beside, os.path.basename(path))
        yield new
        for folder, _, names in os.walk(beside):
            for name in names:
                _sync(os.path.join(folder, name))
        if os.path.exists(path):
            shutil.copymode(path, new)
        if os.path.isdir(path):
            _link_missing(path, new)
            _exchange(new, path)
            _link_missing(new, path)  # what came into the old folder meanwhile
        else:
            os.replace(new, path)
        _sync(os.path.dirname(path))


def move(files: Mapping[str, str]) -> None:
    """Moves complete files to their places, one after another in their order."""
    for source, to in files.items():
        _sync(source)
        os.replace(source, to)
        _sync(os.path.dirname(to) or ".")


def _beside(path: str) -> str:
    folder, name = os.path.split(path)
    worker = this_worker()
    return os.path.join(folder, f".{name}.{worker.name if worker else 'new'}")


def _exchange(new: str, path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_HERE, os.fsencode(new), _HERE, os.fsencode(path), _EXCHANGE) == 0:
        return
    error = ctypes.get_errno()
    kept = f"{path}.new"
    shutil.rmtree(kept, ignore_errors=True)
    os.rename(new, kept)
    raise OSError(error, _NO_EXCHANGE % kept, path)


def _link_missing(source: str, to: str) -> None:
    for entry in os.scandir(source):
        target = os.path.join(to, entry.name)
        is_folder = entry.is_dir(follow_symlinks=False)
        if is_folder and os.path.lexists(target):
            _link_missing(entry.path, target)
        elif is_folder:
            shutil.copytree(entry.path, target, symlinks=True, copy_function=os.link)
        elif not os.path.lexists(target):
            os.link(entry.path, target, follow_symlinks=False)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
