"""A large file in pieces, in an order that begins all over it: whatever is taken of them is of all its parts.

A file of at most LARGE_BYTES is read from its beginning. Of a larger one pieces of PIECE_BYTES come in the order of van der
Corput: first the one at the beginning, then that at 1/2, at 1/4 and 3/4, at 1/8, 5/8, ... The order has no seed: the same file
gives the same text. A line, or a paragraph, belongs to the piece in which it begins, so that all pieces together are the file.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from assay.errors import QuantizeError
from assay.quantities import size

LARGE_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
"""Of a row. The longest conversations have some MB."""
AROUND = 8192
"""Letters before and behind a part in which items of evaluations are looked for; and how far its end may be moved."""
PART_LETTERS = 1 << 18
"""A longer text is handed to the tokenizer in parts: it takes 200 bytes for each letter."""
SAMPLES, SAMPLE_BYTES = 1024, 4096
"""Of a large file, by which it is told from others."""

See = Callable[[bytes], None]


class Part(NamedTuple):
    """Of a text. around: the same with some of the text before and behind it; "": there is none."""

    text: str
    around: str = ""


def spread_order(count: int) -> Iterator[int]:
    """The numbers below `count`, each once, so that the first n of them lie evenly among all."""
    bits = max(0, count - 1).bit_length()
    for number in range(1 << bits):
        place = int(f"{number:0{bits}b}"[::-1], 2) if bits else 0
        if place < count:
            yield place


def opened(path: Path) -> io.BufferedReader:
    """For reading. QuantizeError: no regular file; OSError."""
    # O_NONBLOCK: opening a pipe that nobody writes to must not wait
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise QuantizeError(f"{path}: is no regular file (a pipe, a device or a folder), and text is read twice; give a file")
    return open(descriptor, "rb")


def content_sha256(path: Path) -> str:
    """What tells the content of a file from others: its SHA-256; of a large one that of its size and of samples all over it,
    behind `spread:`. QuantizeError: no regular file; OSError."""
    num_bytes = path.stat().st_size
    with opened(path) as file:
        if num_bytes <= LARGE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(num_bytes).encode())
        for number in range(SAMPLES):
            file.seek(number * (num_bytes - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return f"spread:{digest.hexdigest()}"


# ------------------------------------------------------------------------------------------------ rows
def lines_of(path: Path, where: str, see: See) -> Iterator[tuple[str, bytes]]:
    """(place for messages, line) of a file of rows. see: told all lines. QuantizeError: a line is too long; OSError."""
    num_bytes = path.stat().st_size
    with opened(path) as file:  # by bytes: a string in JSON may hold other ends of lines
        if num_bytes <= LARGE_BYTES:
            for number, line in enumerate(_lines(file, where, num_bytes), 1):
                see(line)
                yield f"{where}, line {number}", line
            return
        for piece in spread_order(-(-num_bytes // PIECE_BYTES)):
            begin, end = piece * PIECE_BYTES, min(num_bytes, (piece + 1) * PIECE_BYTES)
            file.seek(max(0, begin - 1))
            if begin and not file.readline(end - begin + 1).endswith(b"\n"):
                continue  # a line that began before goes on beyond this piece
            for line in _lines(file, where, end):
                see(line)
                yield f"{where}, the line before byte {file.tell():,}", line


def _lines(file: io.BufferedReader, where: str, end: int) -> Iterator[bytes]:
    """Lines that begin before `end`."""
    while (begin := file.tell()) < end and (line := file.readline(MAX_LINE_BYTES + 1)):
        if len(line) > MAX_LINE_BYTES:
            raise QuantizeError(
                f"{where}: the line from byte {begin:,} on is longer than {size(MAX_LINE_BYTES)}; write one text a line"
            )
        yield line


# ------------------------------------------------------------------------------------------------ plain text
def texts_of(path: Path, see: See) -> Iterator[Part]:
    """A file of plain text: whole, or in pieces where it is large. see: told all bytes. UnicodeDecodeError; OSError."""
    num_bytes = path.stat().st_size
    with opened(path) as file:
        if num_bytes <= LARGE_BYTES:
            data = file.read()
            see(data)
            yield Part(data.decode("utf-8"))
            return
        for piece in spread_order(-(-num_bytes // PIECE_BYTES)):
            begin, end = (_end_near(file, min(num_bytes, at * PIECE_BYTES), num_bytes) for at in (piece, piece + 1))
            file.seek(max(0, begin - AROUND))
            before, data, behind = file.read(min(begin, AROUND)), file.read(end - begin), file.read(AROUND)
            see(data)
            text = data.decode("utf-8")
            yield Part(text, before.decode("utf-8", "ignore") + text + behind.decode("utf-8", "ignore"))


def _end_near(file: io.BufferedReader, position: int, num_bytes: int) -> int:
    """The first end of a paragraph at `position` or soon after it; there being none, of a line, a word, a letter."""
    if position in (0, num_bytes):
        return position
    file.seek(position)
    data = file.read(AROUND)
    for mark in (b"\n\n", b"\n", b" "):
        if (at := data.find(mark)) >= 0:
            return position + at + len(mark)
    return position + next((at for at, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)


def parts_of(text: str) -> Iterator[Part]:
    """A text, a part at a time."""
    begin = 0
    while begin < len(text):
        end = position = begin + PART_LETTERS  # or the first end of a paragraph, line or word soon after it
        for mark in ("\n\n", "\n", " "):
            if (at := text.find(mark, position, position + AROUND)) >= 0:
                end = at + len(mark)
                break
        yield Part(text[begin:end], text[max(0, begin - AROUND) : end + AROUND])
        begin = end
