"""The header of a GGUF file: its metadata and where each tensor lies. Nothing it says is believed.

`gguf.GGUFReader` makes several arrays of every token of a vocabulary (half a GB of memory), and follows the length of an array
behind the end of the file. Here every length is held against the file, and of an array that is long only its length is kept.
Types and sizes of blocks come from the package `gguf`, an extra. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from assay.errors import CheckpointError
from assay.foreign_text import shown
from assay.safe_files import open_inside

MOST_HEADER_BYTES = 256 << 20
"""Of published files, headers have up to 30 MB: tokens and merges."""
MOST_VALUES = 4096
"""Of an array that is kept: one value for each layer."""
MOST_DIMENSIONS = 4
VERSIONS = (2, 3)

Scalar = int | float | bool | str
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""`GGUFValueType` of a number -> how it is stored."""
_STRING, _ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """kind: its type, `Q4_K`; `type 137` for one that the package does not know, and then num_bytes is 0. shape: as torch has
    it, the reverse of the file's. begin: in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    shard: str
    begin: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes


@dataclass(frozen=True)
class GgufHeader:
    """values: numbers, strings and short arrays of numbers by key. counts: of every array how long it is. num_bytes: of the
    file. data_begin: where the tensors begin."""

    shard: str
    num_bytes: int
    values: Mapping[str, Scalar | tuple[Scalar, ...]]
    counts: Mapping[str, int]
    tensors: tuple[GgufTensor, ...]
    data_begin: int

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def count(self, key: str) -> int | None:
        """A number that counts something; None: there is none, or it is no such number."""
        value = self.values.get(key)
        return value if type(value) is int and value >= 0 else None

    def behind_the_end(self) -> Iterator[GgufTensor]:
        """Tensors that the file is too short for."""
        return (tensor for tensor in self.tensors if tensor.begin >= self.num_bytes or tensor.end > self.num_bytes)


def read_header(path: Path) -> GgufHeader:
    """CheckpointError: the file cannot be read, is no GGUF, or its header is not whole. ModuleNotFoundError: no `gguf`."""
    import gguf  # noqa: F401  the extra is asked for before the file is

    try:
        with open_inside(path.parent, path.name) as file:
            return _Reader(file, path.name).header()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except _NotWhole as problem:
        raise CheckpointError(f"{path}: is not a whole GGUF file ({problem}); download it again") from None


class _NotWhole(Exception):
    """What is wrong with a header."""


class _Reader:
    def __init__(self, file: BinaryIO, shard: str) -> None:
        self._file, self._shard, self._at = file, shard, 0
        self._size = os.fstat(file.fileno()).st_size

    def header(self) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise _NotWhole("GGUF magic invalid")
        version = self._number("<I")
        if version & 0xFFFF == 0:
            raise _NotWhole("it is big-endian")
        if version not in VERSIONS:
            raise _NotWhole(f"version {version}, read are {' and '.join(map(str, VERSIONS))}")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        values: dict[str, Scalar | tuple[Scalar, ...]] = {}
        counts: dict[str, int] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in values or key in counts:
                raise _NotWhole(f"key {shown(key, 80)} is there twice")
            kind = self._number("<I")
            if kind == _ARRAY:
                counts[key], kept = self._array()
                if kept is not None:
                    values[key] = kept
            else:
                values[key] = self._value(kind)
        infos = [self._tensor() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise _NotWhole(f"general.alignment is {shown(alignment, 40)}, which is no power of two")
        begin = -(-self._at // alignment) * alignment
        tensors = tuple(tensor._replace(begin=begin + tensor.begin) for tensor in infos)
        return GgufHeader(self._shard, self._size, values, counts, tensors, begin)

    def _bytes(self, num_bytes: int) -> bytes:
        self._at += num_bytes
        if self._at > min(self._size, MOST_HEADER_BYTES):
            most = "the file ends" if self._at > self._size else f"more than {MOST_HEADER_BYTES} bytes"
            raise _NotWhole(f"{most} inside its header")
        return self._file.read(num_bytes)

    def _number(self, form: str) -> int:
        value: int = struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        return value

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode(errors="replace")

    def _value(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self._string()
        if kind not in _FORMATS:
            raise _NotWhole(f"a value of type {kind}, which is none")
        return self._number(_FORMATS[kind])

    def _array(self) -> tuple[int, tuple[Scalar, ...] | None]:
        """(how long it is, its numbers if they are few)."""
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _STRING:
            for _ in range(count):
                self._bytes(self._number("<Q"))
            return count, None
        if kind not in _FORMATS:
            raise _NotWhole(f"an array of type {kind}, which is none")
        form = _FORMATS[kind]
        raw = self._bytes(count * struct.calcsize(form))
        return count, tuple(value for (value,) in struct.iter_unpack(form, raw)) if count <= MOST_VALUES else None

    def _tensor(self) -> GgufTensor:
        """Its begin still counts from where the tensors begin."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, num_dimensions = self._string(), self._number("<I")
        if num_dimensions > MOST_DIMENSIONS:
            raise _NotWhole(f"tensor {shown(name, 80)} has {num_dimensions} dimensions, allowed are {MOST_DIMENSIONS}")
        shape = tuple(reversed([self._number("<Q") for _ in range(num_dimensions)]))
        kind, begin = self._number("<I"), self._number("<Q")
        if not 0 < math.prod(shape) < 1 << 60:
            raise _NotWhole(f"tensor {shown(name, 80)} has shape {list(shape)}")
        try:
            type_ = GGMLQuantizationType(kind)
        except ValueError:
            return GgufTensor(name, f"type {kind}", shape, self._shard, begin, 0)
        per_block, block_bytes = GGML_QUANT_SIZES[type_]
        if shape and shape[-1] % per_block:
            raise _NotWhole(f"rows of tensor {shown(name, 80)} have {shape[-1]} values, blocks of {type_.name} {per_block}")
        num_bytes = math.prod(shape) // per_block * block_bytes
        return GgufTensor(name, type_.name, shape, self._shard, begin, num_bytes)
