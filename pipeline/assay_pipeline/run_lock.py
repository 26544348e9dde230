"""One evaluation at a time in a run's folder. Two would serve the same checkpoints twice and write each other's records.

Gate, report and card take no lock: they read records and write theirs by rename, and an evaluation at work writes them again
at its end.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from assay.atomic_files import naming
from assay.errors import AssayError
from assay.safe_files import open_ours

LOCK = ".lock"


@contextmanager
def locked_run(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir`; AssayError, with the other's process id, while another process does.

    The lock goes with the process, however it ends. Python opens files close-on-exec, so no server that is started inherits it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = open_ours(str(run_dir / LOCK), os.O_RDWR | os.O_CREAT, "lock")
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            raise AssayError(
                f"{run_dir}: another evaluation is at work in it (pid {holder or 'unknown'}); wait for it, "
                "or give this one --name"
            ) from None
        with naming(run_dir / LOCK):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
