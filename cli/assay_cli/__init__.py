"""The `assay` command: its commands (`commands/`), and what they share.

In: a command line. Out: the record of one stage, printed or as JSON; progress on stderr; exit code 0, 1 or 2. The only place
that may import everything; nothing imports it. Stages are imported inside functions, so that `assay --help` needs neither
torch nor lm-eval. This module itself imports nothing, so that `command` is reached before a Ctrl-C.
"""

from __future__ import annotations

import os
import signal
from typing import Any


def command() -> None:
    """The installed program `assay`. Until the command line is imported, and once a command has ended, Ctrl-C just ends it."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    if interruptible:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from assay_cli.root import main

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def __getattr__(name: str) -> Any:
    """`app` and `main`, which import every command."""
    if name not in ("app", "main"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from assay_cli import root

    return getattr(root, name)
