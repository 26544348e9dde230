"""Progress of long work: a bar on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from assay.records import Plan

LOG_INTERVAL_S = 10.0


class ShardProgress:
    """Callable for the quantizer: `progress(tensor_name, bytes_in)` after every tensor that is done.

    On a terminal: bar, GB/s, time left, current tensor. Elsewhere: one line every `LOG_INTERVAL_S` seconds.
    """

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console, self._label, self._total_bytes = console, plan.precision, plan.bytes_in
        self._done_bytes, self._next_line = 0, LOG_INTERVAL_S
        self._started: float | None = None
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            first, last = TextColumn("{task.description:10}"), TextColumn("{task.fields[tensor]}")
            self._bar = Progress(first, *columns, last, console=self._console, transient=True)
            self._task = self._bar.add_task(self._label, total=self._total_bytes, tensor="")
            self._bar.start()
        return self

    def __call__(self, tensor: str, num_bytes: int) -> None:
        if self._started is None:  # the clock starts with the work, not with the imports before it
            self._started = time.monotonic()
        self._done_bytes += num_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done_bytes, tensor=tensor)
            return
        elapsed_s = time.monotonic() - self._started
        if elapsed_s >= self._next_line:
            self._next_line = elapsed_s + LOG_INTERVAL_S
            rate = self._done_bytes / elapsed_s
            left_s = (self._total_bytes - self._done_bytes) / rate
            self._console.print(
                f"{self._label:10} {self._done_bytes / 1e9:.2f} of {self._total_bytes / 1e9:.2f} GB, "
                f"{rate / 1e9:.2f} GB/s, {left_s:.0f} s left, {tensor}"
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
