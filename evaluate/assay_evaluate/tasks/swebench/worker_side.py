"""The other end of `worker_process`: how a worker reads its spec and tells its parent what happens."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

_print_lock = threading.Lock()


def begin() -> dict[str, Any]:
    """The spec, from the first line of stdin. From now on only `tell` writes to stdout; the process ends with its parent."""
    spec: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout = sys.stderr  # whatever libraries print must not get between our lines
    return spec


def tell(event: str, **more: Any) -> None:
    """One line for the parent."""
    with _print_lock:
        sys.__stdout__.write(json.dumps({"event": event, **more}) + "\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]


def _end_with_parent() -> None:
    """The parent holds our stdin open; when it is killed, nobody must go on writing trajectories."""
    sys.stdin.read()
    os._exit(1)
