"""Results that come in any order, written in one: the file grows from front to back while its SHA-256 is computed.

Whichever worker delivers the result whose turn it is hashes it and hands it to the file, and all that were waiting behind it;
threads of the file (direct_file.py) only wait for the disk. So one worker is one core, and the order on disk does not depend on
how many there are.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from assay.records.plan import OutputTensor
from assay_quantize.storage.direct_file import BytesLike, DirectFile

PIECE_BYTES = 256 << 10
"""Hashed, then copied, piece by piece: the copy finds it in the second cache."""


class WritingStopped(Exception):
    """Another worker failed, or the run was interrupted: there is nothing more to do."""


class Result(NamedTuple):
    """What one unit of work made: bytes to append to each named output, in order of the units.

    borrowed: the bytes lie in a buffer that goes back when they are written. written: called after they were.
    """

    parts: Mapping[str, BytesLike]
    borrowed: bool
    written: Callable[[], None]


class OrderedWriter:
    """A file of `layout` outputs behind `prefix`, fed with numbered results; thread-safe.

    A result's bytes go straight to the file when the output they belong to is the one that is due; otherwise they wait in
    memory until it is (the small outputs of a tensor, while its large one is written).
    """

    def __init__(self, path: Path, prefix: bytes, layout: Sequence[OutputTensor], *, window: int) -> None:
        self._file = DirectFile(path, len(prefix) + sum(output.num_bytes for output in layout))
        self._digest = hashlib.sha256()
        self._layout = deque(layout)
        self._held: defaultdict[str, list[BytesLike]] = defaultdict(list)
        self._received: defaultdict[str, int] = defaultdict(int)
        self._ready: dict[int, Result] = {}
        self._changed = threading.Condition()
        self._window = window
        self._next = 0
        self._is_writing = False
        self.error: BaseException | None = None
        self._written_bytes = 0
        self._write(prefix)

    def wait_for_room(self, index: int) -> None:
        """Wait until the result `index` is within the window of what may be in flight; `WritingStopped` after a failure."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or index < self._next + self._window)
            self._check()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()`, which some other result makes true (`announce`); `WritingStopped` after a failure."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or condition())
            self._check()

    def announce(self, change: Callable[[], None]) -> None:
        """Make a `change` that someone may be waiting for."""
        with self._changed:
            change()
            self._changed.notify_all()

    def deliver(self, index: int, result: Result) -> None:
        """Hand in the result of unit `index`; writes it, and those behind it, if it is its turn."""
        with self._changed:
            self._check()
            self._ready[index] = result
            if self._is_writing or index != self._next:
                return
            self._is_writing = True
        while True:
            with self._changed:
                self._check()
                due = self._ready.pop(self._next, None)
                if due is None:
                    self._is_writing = False
                    return
            self._append(due)
            due.written()
            with self._changed:
                self._next += 1
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop everyone; the first error is the one that counts."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()

    def finish(self) -> tuple[str, int]:
        """After the last result: fsync; SHA-256 (hex) and bytes of the file."""
        assert not self._layout and not self._held, f"missing: {list(self._layout)[:1]}, {list(self._held)[:1]}"
        self._file.sync()
        return self._digest.hexdigest(), self._written_bytes

    def close(self) -> None:
        self._file.close()

    def _check(self) -> None:
        if self.error is not None:
            raise WritingStopped

    def _append(self, result: Result) -> None:
        for name, data in result.parts.items():
            if not data:
                continue
            self._received[name] += len(data)
            if self._layout and self._layout[0].name == name:
                self._write(data)
            else:
                self._held[name].append(bytes(data) if result.borrowed else data)
        while self._layout:  # what has become due: everything held of the first output that is not whole, and of all before it
            due = self._layout[0]
            for data in self._held.pop(due.name, ()):
                self._write(data)
            if self._received[due.name] < due.num_bytes:
                return
            assert self._received[due.name] == due.num_bytes, f"{due.name}: more than the {due.num_bytes} bytes planned"
            self._layout.popleft()

    def _write(self, data: BytesLike) -> None:
        view = memoryview(data)
        for begin in range(0, len(view), PIECE_BYTES):
            piece = view[begin : begin + PIECE_BYTES]
            self._digest.update(piece)
            self._file.append(piece)
        self._written_bytes += len(view)
