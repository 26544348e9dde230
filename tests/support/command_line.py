"""The command line in this process (the type of the fixture `run`) and in one that can be interrupted."""

from __future__ import annotations

from collections.abc import Callable

Run = Callable[..., tuple[int, str, str]]

INTERRUPTIBLE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); import assay_cli as cli; cli.main()"
)
"""A program for `python -c`. A shell that runs tests in the background has SIGINT ignored, and its children inherit that."""
