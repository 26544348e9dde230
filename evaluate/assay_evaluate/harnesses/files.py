"""Reading files that nobody vouches for: regular files only, bounded, UTF-8, and of a zip no more than it may hold."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.foreign_text import one_line, shown
from assay.safe_files import MAX_JSON_BYTES, is_too_deep
from assay_evaluate.harnesses.scores import wrong
from assay_evaluate.transport.foreign_json import NotJson, read_json

MOST_BYTES = 2_000_000_000
"""Of a file."""
MOST_UNPACKED_BYTES = 20_000_000_000
"""Of all members of a zip, of which one at a time is in memory."""
MOST_LINE_BYTES = MAX_JSON_BYTES
"""Of one line, and of one member of a zip."""
MOST_MEMBERS = 1_000_000
MOST_FILES = 20_000
"""Of a folder that are looked at."""
ZSTANDARD = 93
"""Of a zip: APPNOTE 4.4.5. The zipfile of Python before 3.14 does not know it."""
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


def open_results(path: Path) -> io.BufferedReader:
    """AssayError: it cannot be opened, is no regular file, or larger than is read."""
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to must not wait
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise wrong(path, f"cannot be read: {error.strerror}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
        os.close(descriptor)
        if stat.S_ISREG(status.st_mode):
            raise wrong(path, f"{status.st_size:,} bytes, at most {MOST_BYTES:,} are read; import a part of it")
        raise wrong(path, "is no regular file (a pipe, a device or a folder); give a file or a folder of results")
    return open(descriptor, "rb")


def sha256_of_results(path: Path) -> str:
    with open_results(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_whole(path: Path) -> bytes:
    with open_results(path) as file:
        return file.read(MOST_BYTES)


def parsed(data: bytes, where: object) -> Any:
    """JSON. MeasureError: it is none, or nested without end."""
    try:
        value = read_json(data)
    except NotJson as error:
        raise wrong(where, f"{one_line(str(error))}; export it again") from None
    if isinstance(value, dict | list) and is_too_deep(value):
        raise wrong(where, "is nested too deeply; export it again")
    return value


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`FILE line 3`, its object); empty lines are passed over."""
    with open_results(path) as file:
        number = 0
        while line := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            where = f"{path} line {number}"
            if len(line) > MOST_LINE_BYTES:
                raise wrong(where, f"longer than {MOST_LINE_BYTES:,} bytes; export it again")
            if not line.strip():
                continue
            value = parsed(line, where)
            if not isinstance(value, dict):
                raise wrong(where, f"holds a JSON {type(value).__name__}, an object was expected")
            yield where, value


def text_lines(path: Path) -> Iterator[str]:
    """Of a table; a byte-order mark does not count."""
    try:
        return io.StringIO(read_whole(path).decode("utf-8-sig"), newline="")
    except UnicodeDecodeError as error:
        raise wrong(path, f"is not UTF-8 (byte {error.start:,}); save it as UTF-8") from None


def files_under(path: Path, suffixes: frozenset[str]) -> list[Path]:
    """The file that was named, or the files of a folder that end so, sorted; links are not followed. AssayError: there is
    nothing, or too much."""
    if not path.is_dir():
        if not path.exists():
            raise AssayError(f"{shown(path)}: no such file or folder; give results of a harness")
        return [path]
    found: list[Path] = []
    for folder, folders, names in os.walk(path, followlinks=False):
        folders.sort()
        found += [Path(folder, name) for name in names if Path(name).suffix in suffixes]
        if len(found) > MOST_FILES:
            raise wrong(path, f"has more than {MOST_FILES:,} files that may be results; name a folder inside it")
    return sorted(file for file in found if not file.is_symlink())


# ------------------------------------------------------------------------------------------------ zip
class Archive:
    """A zip whose members are read one by one, no more of each than `MOST_LINE_BYTES`, of all than `MOST_UNPACKED_BYTES`."""

    def __init__(self, path: Path, file: io.BufferedReader) -> None:
        self.path, self._file, self._read_bytes = path, file, 0
        try:
            self._zip = zipfile.ZipFile(file)
            self._members = {info.filename: info for info in self._zip.infolist()}
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise wrong(path, f"is no whole zip file ({one_line(str(error))}); export the log again") from None
        if len(self._members) > MOST_MEMBERS:
            raise wrong(path, f"has more than {MOST_MEMBERS:,} members; export the log again")

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def read(self, name: str) -> Any:
        """The JSON of a member. MeasureError: it is missing, damaged, or longer than is read."""
        where = f"{self.path}/{name}"
        if (info := self._members.get(name)) is None:
            raise wrong(self.path, f"has no {name}; export the log again")
        try:
            data = self._of_zstandard(info) if info.compress_type == ZSTANDARD else self._unpacked(info)
        except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError, zlib.error) as error:
            if isinstance(error, AssayError):
                raise
            raise wrong(where, f"cannot be unpacked ({one_line(str(error))}); export the log again") from None
        self._read_bytes += len(data)
        if len(data) > MOST_LINE_BYTES or self._read_bytes > MOST_UNPACKED_BYTES:
            raise wrong(
                where, f"unpacks to more than is read ({MOST_LINE_BYTES:,} bytes of one member, {MOST_UNPACKED_BYTES:,} of all)"
            )
        return parsed(data, where)

    def _unpacked(self, info: zipfile.ZipInfo) -> bytes:
        with self._zip.open(info) as member:
            return member.read(MOST_LINE_BYTES + 1)

    def _of_zstandard(self, info: zipfile.ZipInfo) -> bytes:
        try:
            import zstandard
        except ImportError:
            raise wrong(
                self.path,
                "is compressed with Zstandard, which needs a package: `pip install zstandard`, or convert the log: "
                "`inspect log convert --to json`",
            ) from None
        self._file.seek(info.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
            raise zipfile.BadZipFile("a member does not begin where the directory says")
        *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        self._file.seek(name_bytes + extra_bytes, os.SEEK_CUR)
        try:
            packed = io.BytesIO(self._file.read(min(info.compress_size, MOST_BYTES)))
            with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(packed, read_across_frames=True) as reader:
                data: bytes = reader.read(MOST_LINE_BYTES + 1)
        except zstandard.ZstdError as error:
            raise zipfile.BadZipFile(str(error)) from None
        if len(data) <= MOST_LINE_BYTES and zlib.crc32(data) != info.CRC:
            raise zipfile.BadZipFile("a member's checksum is another")
        return data
