"""Moves complete files into place, so that a kill or a full disk leaves the old files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO

from tf_gradcomp.chief import this_worker

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_RANDOM = re.compile("[a-z0-9_]{8}")  # the end of a name of `tempfile`
_NEW_KEPT = "The old folder stays. The new folder is complete in %r."
_OLD_KEPT = "The new folder is complete. Other files of the old folder are in %r."


@contextlib.contextmanager
def replacing(path: str) -> Iterator[IO[bytes]]:
    """Yields an open temporary file, which replaces `path` at the end of the context.

    After an error or a kill, `path` still has its old content.
    """
    path = os.path.realpath(path)
    os.stat(os.path.dirname(path))  # raises the same error as `open`
    with temporary_folder(path) as temporary:
        new = os.path.join(temporary, os.path.basename(path))
        with open(new, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _replace(new, path)
    _sync(os.path.dirname(path))


@contextlib.contextmanager
def temporary_folder(path: str) -> Iterator[str]:
    """Yields a new folder on the disk of `path`, and removes it at the end of the context.

    No other user can know its name before, or change its content. It also removes the folders of
    saves to `path` that were killed.
    """
    to, name = os.path.split(path)
    worker = this_worker()
    prefix = f".{name}.{worker.name if worker else 'new'}."
    os.makedirs(to or ".", exist_ok=True)
    for left in os.scandir(to or "."):
        if left.name.startswith(prefix) and _RANDOM.fullmatch(left.name, len(prefix)):
            shutil.rmtree(left.path, ignore_errors=True)  # does not follow links
    folder = tempfile.mkdtemp(prefix=prefix, dir=to or ".")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def replacing_path(path: str) -> Iterator[str]:
    """Yields a path for a new file or folder, which replaces `path` at the end of the context.

    Files that only the old folder has survive. After an error, the old folder stays, and the new
    folder gets a similar name.
    """
    path = os.path.realpath(path)
    with temporary_folder(path) as temporary:
        new = os.path.join(temporary, os.path.basename(path))
        yield new
        for folder, _, names in os.walk(temporary):
            for name in names:
                _sync(os.path.join(folder, name))
            _sync(folder)
        with _keeping_on_error(new, f"{path}.new", _NEW_KEPT):
            if not (replaces_folder := os.path.isdir(path) and os.path.isdir(new)):
                _replace(new, path)
            else:
                copied = _add_missing(path, new)
                shutil.copymode(path, new)
                _exchange(new, path)
        _sync(os.path.dirname(path))
        if replaces_folder:
            with _keeping_on_error(new, f"{path}.old", _OLD_KEPT):
                for name in [*copied, *_add_missing(new, path)]:  # a program may write to it
                    os.replace(os.path.join(new, name), os.path.join(path, name))


def check_room(folder: str, size: int) -> None:
    """Raises OSError if the disk of a folder has less room than `size` bytes."""
    if shutil.disk_usage(folder).free < size:
        reason = f"{os.strerror(errno.ENOSPC)}, where {size:,} bytes are needed"
        raise OSError(errno.ENOSPC, reason, folder)


def move(files: Mapping[str, str]) -> None:
    """Moves complete files to their paths, one after another in order."""
    for source, to in files.items():
        _sync(source)
        os.replace(source, to)
        _sync(os.path.dirname(to) or ".")


def _replace(new: str, path: str) -> None:
    """Moves a new file or folder to a path, with the permissions of the old one."""
    if os.path.exists(path):
        shutil.copymode(path, new)
    os.replace(new, path)


def _free_name(path: str) -> str:
    others = (f"{path}.{n}" for n in itertools.count(2))
    return next(one for one in itertools.chain([path], others) if not os.path.lexists(one))


@contextlib.contextmanager
def _keeping_on_error(path: str, to: str, note: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kept = _free_name(to)
        os.rename(path, kept)
        error.add_note(note % kept)
        raise


def _exchange(new: str, path: str) -> None:
    """Swaps two folders; renames them one by one if the file system cannot swap, as on NFS."""
    at_once = getattr(ctypes.CDLL(None), "renameat2", None)
    if at_once and at_once(_HERE, os.fsencode(new), _HERE, os.fsencode(path), _EXCHANGE) == 0:
        return
    old = _free_name(f"{path}.old")
    os.rename(path, old)
    try:
        os.rename(new, path)
    except OSError:
        os.rename(old, path)
        raise
    os.rename(old, new)


def _add_missing(source: str, to: str) -> list[str]:
    """Links files that only a source has to another folder; returns the names of copied files."""
    copied = []
    for entry in os.scandir(source):
        target = os.path.join(to, entry.name)
        missing = not os.path.lexists(target)
        if entry.is_dir(follow_symlinks=False) and (missing or os.path.isdir(target)):
            if missing:
                os.mkdir(target)
            within = _add_missing(entry.path, target)
            copied += [os.path.join(entry.name, name) for name in within]
            if missing:
                shutil.copystat(entry.path, target)
        elif missing and not _link(entry.path, target):
            copied.append(entry.name)
    _sync(to)
    return copied


def _link(source: str, to: str) -> bool:
    """Links a file; copies it and returns False if the system refuses, as on exFAT."""
    try:
        os.link(source, to, follow_symlinks=False)
        return True
    except OSError:
        shutil.copyfile(source, to, follow_symlinks=False)
        with contextlib.suppress(OSError):
            shutil.copystat(source, to, follow_symlinks=False)
        if not os.path.islink(to):
            _sync(to)
        return False


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
