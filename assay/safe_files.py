"""Files that nobody vouches for: what of a checkpoint folder may be opened, and how its JSON is read.

A folder from the internet may hold links to files that are none of its business, pipes that block whoever opens them, holes of
a terabyte, and JSON that is legal and impossible. All of it ends in a CheckpointError of one line that names the file.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from assay.errors import AssayError, CheckpointError

MAX_JSON_BYTES = 200_000_000
"""Longest config or index that is read; GLM-5's index has 6 MB."""

MAX_DEPTH = 100
"""Most objects and lists inside each other in JSON; config.json has 6. Python's own limit is met only later, where a value is
compared, copied or written."""

MAX_INTEGER = 2**63 - 1
"""Of whole numbers, without their sign: arrays, random generators and file formats have 64 bits."""

UNBOUNDED_KEYS = frozenset({"model_max_length"})
"""Of a tokenizer: transformers writes 10^30 there for "no limit"."""

MAX_RECORD_BYTES = 2_000_000_000
"""Longest record that is read; GLM-5's plan has 60 MB."""


def stays_inside(path: Path, folder: Path) -> bool:
    """Whether `path`, links followed, lies in `folder`, or in the blobs of the same Hugging Face cache entry.

    RuntimeError: its links lead in a circle.
    """
    root, target = folder.resolve(), path.resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    return target.is_relative_to(root) or (blobs is not None and target.is_relative_to(blobs))


def open_inside(folder: Path, name: str) -> io.BufferedReader:
    """`folder/name` for reading, if it is a regular file that stays in the folder.

    Raises CheckpointError for a link that leads out of it or to itself, a pipe, a device or a folder; OSError like `open`.
    """
    path = folder / name
    try:
        is_inside = stays_inside(path, folder)
    except RuntimeError:  # pathlib's word for links in a circle
        raise CheckpointError(f"{path}: is a link that leads back to itself; put the file itself there") from None
    if not is_inside:
        raise CheckpointError(f"{path}: is a link that leads out of its folder; put the file itself there")
    # O_NONBLOCK: opening a pipe that nobody writes to must not wait
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is no regular file (a pipe, a device or a folder); put the file itself there")
    return open(descriptor, "rb")


def read_record(path: Path) -> bytes:
    """The bytes of one of our records, in a folder that others may write to.

    AssayError: a pipe, a device or a folder lies there, or far more than a record has. OSError like `open`.
    """
    # O_NONBLOCK: opening a pipe that nobody writes to must not wait
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise AssayError(f"{path}: is no regular file (a pipe, a device or a folder), so no record; move it away")
        if status.st_size > MAX_RECORD_BYTES:
            raise AssayError(f"{path}: {status.st_size:,} bytes, a record has at most {MAX_RECORD_BYTES:,}; move it away")
        return file.read(MAX_RECORD_BYTES)


def open_own_file(path: str, flags: int, what: str) -> int:
    """Descriptor of a file of our own in a folder that others may write to; never what a link or a pipe in its place leads to.

    what: `journal`, `lock`: for the AssayError that says what lies there instead.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as problem:
        if problem.errno != errno.ELOOP:
            raise
        raise AssayError(f"{path}: is a link, not a {what} that assay wrote; give another folder, or delete this one") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AssayError(f"{path}: is not a regular file, so not a {what} of assay; give another folder, or delete this one")
    return descriptor


def read_fully(descriptor: int, buffer: memoryview, begin: int, *, block_bytes: int = 1) -> int:
    """Fill `buffer` with the bytes of an open file from `begin` on; how many there were: fewer only where the file ends.

    One read of the system may give less than was asked for. block_bytes: of a file opened past the page cache, which can be
    read in whole blocks only, so that a part of one is its end. Safe to use from many threads. Raises OSError.
    """
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [buffer[done:]], begin + done)
        done += got
        if got == 0 or got % block_bytes:
            break
    return done


def read_json_object(folder: Path, name: str, *, unique_names: bool = False) -> dict[str, Any]:
    """The JSON object in `folder/name`; see `parse_json_object`. CheckpointError when it cannot be read or is too long."""
    path = folder / name
    try:
        with open_inside(folder, name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_JSON_BYTES:
                raise CheckpointError(f"{path}: {size} bytes of JSON, allowed are {MAX_JSON_BYTES}; download the file again")
            data = file.read(MAX_JSON_BYTES)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: has no {name}; a checkpoint folder holds config.json and *.safetensors"
        ) from None  # fmt: skip
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_json_object(str(path), data, unique_names=unique_names)


def parse_json_object(where: str, data: bytes, *, unique_names: bool = False) -> dict[str, Any]:
    """A JSON object, or a CheckpointError that says where.

    unique_names: refuse a name that stands twice in one object, of which `json` would keep the last without a word. NaN and
    infinity, which Python's `json` reads and JSON does not have, are refused: NaN is not even equal to itself. So are whole
    numbers beyond MAX_INTEGER and more than MAX_DEPTH values inside each other, which would fail far from here.
    """
    try:
        parsed = json.loads(data, object_pairs_hook=_unique if unique_names else None)
    except RecursionError:
        raise CheckpointError(f"{where}: not JSON: nested too deeply; download the file again") from None
    except ValueError as error:  # also UnicodeDecodeError, and numbers of more than 4300 digits
        raise CheckpointError(f"{where}: not JSON: {error}; download the file again") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where}: holds a JSON {type(parsed).__name__}, an object was expected; download it again")
    if problem := _out_of_bounds(parsed):
        raise CheckpointError(f"{where}: {problem}")
    return parsed


class _Place(NamedTuple):
    """A value of JSON, its name or number there, and what it is in; None: it is the whole."""

    above: Any
    name: Any
    value: Any

    def __str__(self) -> str:
        """`a.b.0`"""
        names, place = [], self
        while place.above is not None:
            names.append(str(place.name))
            place = place.above
        return ".".join(reversed(names))


class _TooDeep(Exception):
    """More values inside each other than were to be looked at."""


def _find_number(parsed: Any, is_wrong: Callable[[Any, int | float], bool], most_depth: float) -> _Place | None:
    """The first number of which is_wrong(its name, the number), from the outside inwards. Raises _TooDeep."""
    level, depth = [_Place(None, None, parsed)], 0
    while level:
        if depth > most_depth:
            raise _TooDeep
        inside: list[_Place] = []
        for place in level:
            pairs = place.value.items() if isinstance(place.value, dict) else enumerate(place.value)
            for name, value in pairs:
                if isinstance(value, dict | list):
                    inside.append(_Place(place, name, value))
                elif isinstance(value, int | float) and is_wrong(name, value):
                    return _Place(place, name, value)
        level, depth = inside, depth + 1
    return None


def _is_beyond(name: Any, value: float) -> bool:
    return isinstance(value, int) and abs(value) > MAX_INTEGER and name not in UNBOUNDED_KEYS


def _out_of_bounds(parsed: dict[str, Any]) -> str | None:
    """The first number that no file of a checkpoint holds, or that it is too deep, and what to do. None: it is neither."""
    try:
        place = _find_number(parsed, lambda name, value: _is_beyond(name, value) or not math.isfinite(value), MAX_DEPTH)
    except _TooDeep:
        return f"more than {MAX_DEPTH} lists and objects inside each other; download the file again"
    if place is None:
        return None
    if isinstance(place.value, int):
        return f"{str(place)!a} is {_shortened(place.value)}, beyond 64 bits; write a smaller number there"
    return f"{str(place)!a} is {place.value}, which is no number of JSON; write a number or null there"


def is_too_deep(parsed: Any) -> bool:
    """More than MAX_DEPTH lists and objects inside each other: what walks through them would meet Python's limit."""
    try:
        _find_number([parsed], lambda name, value: False, MAX_DEPTH + 1)
    except _TooDeep:
        return True
    return False


def _shortened(value: int) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}... of {len(text.removeprefix('-'))} digits"


_MANY_DIGITS = re.compile(rb"[0-9]{19}")


def integer_beyond(data: bytes) -> str | None:
    """A whole number beyond MAX_INTEGER in JSON text, and its place: `a.b.0 is 10000...`. None: there is none, or no JSON."""
    if _MANY_DIGITS.search(data) is None:  # of most records there is no more to look at
        return None
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return None
    place = _find_number([parsed], _is_beyond, math.inf)
    return None if place is None else f"{str(place).removeprefix('0.')} is {_shortened(place.value)}"


def _unique(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{twice!r} is named twice")
    return made
