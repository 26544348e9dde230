"""Progress of long work: a bar on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from assay.foreign_text import one_line
from assay.quantities import size
from assay_cli.terminal import console

LOG_INTERVAL_S = 10.0
DONE_BEFORE = "(done before)"
"""End of the name under which a shard is told that an earlier run had finished: it counts as done, not as speed."""


class ByteProgress:
    """Callable for long work over bytes: `progress(what, num_bytes)` after every piece that is done, from any thread.

    On a terminal: bar, GB/s, time left, current tensor. Elsewhere: one line every `LOG_INTERVAL_S` seconds.
    """

    def __init__(self, console: Console, label: str, total_bytes: int) -> None:
        self._console, self._label, self._total_bytes = console, one_line(label), total_bytes
        self._done_bytes = self._before_bytes = 0
        self._next_line_s = LOG_INTERVAL_S
        self._started: float | None = None
        self._bar: Progress | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description:10}", markup=False),
                BarColumn(),
                DownloadColumn(),
                TextColumn("{task.fields[speed]}"),
                TextColumn("{task.fields[tensor]}", markup=False),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task(self._label, total=self._total_bytes, tensor="", speed="")
            self._bar.start()
        return self

    def __call__(self, tensor: str, num_bytes: int) -> None:
        with self._lock:
            if self._started is None:  # the clock starts with the work, not with the imports before it
                self._started = time.monotonic()
            self._done_bytes += num_bytes
            if tensor.endswith(DONE_BEFORE):
                self._before_bytes += num_bytes
            elapsed_s = time.monotonic() - self._started
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done_bytes, tensor=one_line(tensor), speed=self._speed(elapsed_s))
            elif elapsed_s >= self._next_line_s:
                self._next_line_s = elapsed_s + LOG_INTERVAL_S
                self._console.print(
                    f"{self._label:10} {size(self._done_bytes)} of {size(self._total_bytes)}, "
                    f"{self._speed(elapsed_s)}, {one_line(tensor)}",
                    markup=False,
                )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _speed(self, elapsed_s: float) -> str:
        """`1.2 GB/s, 0:12:34 left`; empty until something was worked on."""
        worked_bytes = self._done_bytes - self._before_bytes
        if worked_bytes == 0 or elapsed_s == 0:
            return "checking"
        rate = worked_bytes / elapsed_s
        left_s = int(max(0, self._total_bytes - self._done_bytes) / rate)
        return f"{size(round(rate))}/s, {left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d} left"


def track(label: str, total_bytes: int) -> ByteProgress:
    """On the terminal; of the quantizer, bytes of the source, out of all that the plan reads."""
    return ByteProgress(console, label, total_bytes)
