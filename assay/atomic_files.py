"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path, *, only_new: bool = False) -> Iterator[Path]:
    """A name beside `path` to write a file under; at the end of the block it is fsynced and renamed to `path`.

    Readers see the old file or the whole new one. A block that fails leaves neither the name nor a changed `path`. The name is
    hidden, no loader's pattern matches it, no other writer has it, and it ends in `.partial`: what a killed process leaves is
    known by that, and goes when the same file is written again. Folders that are missing are made. only_new: FileExistsError if
    there is a `path` at the end (where the file system has hard links). OSError, with a path: the file cannot be written.
    """
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        with _lock_of_writers(path):
            try:
                yield partial
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
                _link(partial, path) if only_new else os.replace(partial, path)
            except BaseException as error:
                with suppress(OSError):  # of a disk that fails, the first error is the one to tell
                    partial.unlink(missing_ok=True)
                if isinstance(error, OSError) and error.filename == str(partial):  # hidden, and nobody knows it
                    error.filename = str(path)
                raise


def remove_leftovers(path: Path) -> None:
    """Remove what killed writers of `path` have left beside it, unless a writer is at work in the folder."""
    with _lock_of_writers(path):
        pass


@contextmanager
def _lock_of_writers(path: Path) -> Iterator[None]:
    """Writers share a lock of the folder, which goes with the process: who can have it alone removes leftovers first."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # others are at work, or the file system (NFS) locks no folders
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.partial")
            for name in filter(leftover.fullmatch, os.listdir(folder)):
                os.unlink(name, dir_fd=folder)
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH)
        yield
    finally:
        os.close(folder)


def _link(partial: Path, path: Path) -> None:
    """Of two processes one comes first, which a rename would not tell."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.replace(partial, path)  # a file system without hard links
    else:
        partial.unlink()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError of the block that names no file, as that of a full disk, name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
