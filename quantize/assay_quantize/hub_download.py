"""Files of a model on the hub, onto the disk: in pieces, several at a time, resumable, checked against the hub's own hashes.

A file arrives as `.NAME.incomplete`, with one byte per finished piece in `.NAME.pieces`, and gets its name when it is whole and
its SHA-256 is the one the hub states. A connection that breaks costs what was not yet received of its piece; a killed
process costs the pieces it was at.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from assay.errors import CheckpointError
from assay_quantize.checkpoint import MAX_HEADER_BYTES
from assay_quantize.hub import FIRST_BYTES, MayPass, Repository, hub_client

PIECE_BYTES = 32 << 20
NUM_CONNECTIONS = 8
TRIES = 8
"""Failures in a row, without one new byte, until a piece is given up: about two minutes."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
HASH_BYTES = 4 << 20


class Stopped(Exception):
    """Another piece failed, or the download was called off."""


class HubFiles:
    """The files of one commit of a model. A context manager; its threads end with it."""

    def __init__(self, hub_id: str, commit: str) -> None:
        self.hub_id = hub_id
        self.commit = commit
        self._repository = Repository(hub_client(hub_id), hub_id, commit)
        self._pool = ThreadPoolExecutor(NUM_CONNECTIONS, thread_name_prefix="download")
        self._stop = threading.Event()
        self.files = self._repository.list_files()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def stop(self) -> None:
        """Have all transfers end soon; they raise `Stopped`. What is finished of a file stays for the next run."""
        self._stop.set()

    def close(self) -> None:
        """After all transfers have returned."""
        self._stop.set()
        self._pool.shutdown()
        self._repository.client.close()

    def download(self, name: str, path: Path, num_bytes: int) -> None:
        """The file `name`, of `num_bytes` as its header was read, to `path`; goes on with what an earlier run left of it.

        Raises CheckpointError: another size than stated, a wrong SHA-256 twice, a hub that does not answer; OSError: the
        disk is full.
        """
        for attempt in (1, 2):
            incomplete = self._fill(name, path, num_bytes)
            if self._is_right(name, incomplete):
                os.replace(incomplete, path)
                _marks_path(path).unlink()
                return
            _marks_path(path).unlink()
            incomplete.unlink()
            if attempt == 2:
                raise CheckpointError(
                    f"{self.hub_id}/{name}: its SHA-256 is not the one {self._repository.endpoint} states, downloaded twice; "
                    "something on the way changes it; try another network, or give a local folder"
                )

    def download_ranges(self, name: str, ranges: Sequence[tuple[int, int]], path: Path, num_bytes: int) -> None:
        """Only `ranges` [begin, end) of a file of `num_bytes`, written to their places in `path`, which must exist."""
        with _opened(path, os.O_WRONLY) as descriptor:
            self._receive_all(name, list(ranges), num_bytes, descriptor, None)

    def read_small(self, name: str) -> bytes:
        """A small file (config, tokenizer...)."""
        return self._repository.get(name, sorted(self.files))

    def read_headers(self, names: Sequence[str]) -> list[tuple[bytes, int]]:
        """(safetensors header as it is stored, its length in front; size of the whole file) of each file."""
        return list(self._pool.map(self._read_header, names))

    def _read_header(self, name: str) -> tuple[bytes, int]:
        url = self._repository.url(name)
        first, num_bytes = self._repository.fetch(url, (0, FIRST_BYTES))
        length = 8 + int.from_bytes(first[:8], "little")
        if len(first) < length <= min(num_bytes, 8 + MAX_HEADER_BYTES):
            first += self._repository.fetch(url, (len(first), length))[0]
        return first[:length], num_bytes

    # -------------------------------------------------------------------------------------------- listing
    # -------------------------------------------------------------------------------------------- one file
    def _fill(self, name: str, path: Path, num_bytes: int) -> Path:
        """All pieces of `name` that are missing, into the incomplete file; returns its path."""
        incomplete, marks = _incomplete_path(path), _marks_path(path)
        pieces = [(begin, min(num_bytes, begin + PIECE_BYTES)) for begin in range(0, num_bytes, PIECE_BYTES)]
        head = f"{self.files[name].content} {PIECE_BYTES}\n".encode()
        state = marks.read_bytes() if marks.is_file() and incomplete.is_file() else b""
        if not state.startswith(head) or len(state) > len(head) + len(pieces):
            state = head
            marks.write_bytes(head)
            incomplete.write_bytes(b"")
        done = state[len(head) :].ljust(len(pieces), b"\0")
        with _opened(incomplete, os.O_RDWR) as descriptor, _opened(marks, os.O_RDWR) as marks_descriptor:
            os.ftruncate(descriptor, num_bytes)
            missing = [piece for piece, is_done in zip(pieces, done, strict=True) if not is_done]
            self._receive_all(name, missing, num_bytes, descriptor, (marks_descriptor, len(head)))
        return incomplete

    def _receive_all(
        self, name: str, pieces: list[tuple[int, int]], num_bytes: int, descriptor: int, marks: tuple[int, int] | None
    ) -> None:
        """Fetch `pieces` side by side. The first failure stops the others; it is the one that is raised."""
        failed = threading.Event()

        def receive(begin: int, end: int) -> None:
            try:
                self._receive(name, num_bytes, begin, end, descriptor, failed)
            except BaseException:
                failed.set()
                raise
            if marks is not None:
                os.pwrite(marks[0], b"\1", marks[1] + begin // PIECE_BYTES)

        futures: list[Future[None]] = [self._pool.submit(receive, *piece) for piece in pieces]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # an interrupted wait, too, must not leave threads that write to a closed descriptor
            if not all(future.done() for future in futures):
                failed.set()
            wait(futures)
        errors = [future.exception() for future in futures]
        for error in sorted((e for e in errors if e is not None), key=lambda e: isinstance(e, Stopped)):
            raise error

    def _receive(self, name: str, num_bytes: int, begin: int, end: int, descriptor: int, failed: threading.Event) -> None:
        position, failures = begin, 0
        while position < end:
            if failed.is_set() or self._stop.is_set():
                raise Stopped
            before = position
            try:
                for data in self._stream(name, num_bytes, position, end):
                    if failed.is_set() or self._stop.is_set():
                        raise Stopped
                    position += _write_at(descriptor, data, position)
                problem = "it ended early"
            except MayPass as failure:
                problem = str(failure)
            if position >= end:
                return
            failures = 1 if position > before else failures + 1
            if failures == TRIES:
                raise CheckpointError(
                    f"{self.hub_id}/{name}: {self._repository.endpoint} does not send it: {problem}; what is there is kept, "
                    "run again when the hub answers"
                )
            self._stop.wait(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (failures - 1)))

    def _stream(self, name: str, num_bytes: int, begin: int, end: int) -> Iterator[bytes]:
        """Bytes [begin, end) as they come. Raises MayPass for what another try may not meet."""
        headers = {"accept-encoding": "identity", "range": f"bytes={begin}-{end - 1}"}
        try:
            with self._repository.client.stream("GET", self._repository.url(name), headers=headers) as response:
                total = self._repository.check(response, ranged=True)
                first = re.match(r"bytes (\d+)-", response.headers["content-range"])
                if total != num_bytes or first is None or int(first[1]) != begin:
                    raise CheckpointError(
                        f"{self.hub_id}/{name}: {num_bytes} bytes when its header was read, {total} now; "
                        "the repository changed: make a new plan in another folder"
                    )
                left = end - begin
                for data in response.iter_raw():
                    if len(data) > left:
                        raise CheckpointError(f"{self.hub_id}/{name}: more bytes were sent than asked for; try again")
                    left -= len(data)
                    yield data
        except httpx.HTTPError as error:
            raise MayPass(str(error) or type(error).__name__) from None

    def _is_right(self, name: str, path: Path) -> bool:
        """Whether the file has the SHA-256 the hub states; true where it states none."""
        expected = self.files[name].sha256
        if expected is None:
            return True
        digest, buffer = hashlib.sha256(), bytearray(HASH_BYTES)
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(buffer):
                digest.update(memoryview(buffer)[:got])
                if self._stop.is_set():
                    raise Stopped
        return digest.hexdigest() == expected


def _incomplete_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.incomplete")


def _marks_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.pieces")


def _write_at(descriptor: int, data: bytes, position: int) -> int:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], position + done)
    return done


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
