"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write a file under; at the end of the block it is fsynced and renamed to `path`.

    Readers see the old file or the whole new one. A block that fails leaves neither the name nor a changed `path`. The name is
    hidden, no loader's pattern matches it, no other writer has it, and it ends in `.partial`: what a killed process leaves is
    known by that. Folders that are missing are made. OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        # of a full disk the system names no file, of others the hidden one, which nobody knows
        if isinstance(error, OSError) and error.filename in {None, str(partial)}:
            error.filename = str(path)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError of the block that names no file, as that of a full disk, name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
