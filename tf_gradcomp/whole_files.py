"""Moves complete files into place, so that a kill or a full disk leaves the old files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import IO

from tf_gradcomp.chief import this_worker

_RANDOM = re.compile("[a-z0-9_]{8}")  # the end of a name of `tempfile`


@contextlib.contextmanager
def replacing(path: str) -> Iterator[IO[bytes]]:
    """Yields an open temporary file, which replaces `path` at the end of the context.

    After an error or a kill, `path` still has its old content.
    """
    with replacing_path(path) as new, open(new, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing_path(path: str) -> Iterator[str]:
    """Yields a path for a new file or folder, which is moved to `path` at the end of the context.

    A folder's files replace those of the same names, one by one, and files of its subfolders first.
    Other files stay.
    """
    path = os.path.realpath(path)
    with temporary_folder(path) as temporary:
        new = os.path.join(temporary, os.path.basename(path))
        yield new
        move(new, path)


@contextlib.contextmanager
def temporary_folder(path: str) -> Iterator[str]:
    """Yields a new folder on the disk of `path`, and removes it at the end of the context.

    No other user can know its name before, or change its content. It also removes the folders of
    saves to `path` that were killed.
    """
    to, name = os.path.split(path)
    worker = this_worker()
    prefix = f".{name}.{worker.name if worker else 'new'}."
    for leftover in os.scandir(to or "."):
        if leftover.name.startswith(prefix) and _RANDOM.fullmatch(leftover.name, len(prefix)):
            shutil.rmtree(leftover.path, ignore_errors=True)  # does not follow links
    folder = tempfile.mkdtemp(prefix=prefix, dir=to or ".")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def move(source: str, to: str) -> None:
    """Moves a complete file, or each file of a folder, to a path; keeps the permissions there."""
    if os.path.isdir(source):
        os.makedirs(to, exist_ok=True)
        for entry in sorted(os.scandir(source), key=lambda entry: (entry.is_file(), entry.name)):
            move(entry.path, os.path.join(to, entry.name))
        return
    _sync(source)
    if os.path.exists(to):
        shutil.copymode(to, source)
    os.replace(source, to)
    _sync(os.path.dirname(to) or ".")


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
