"""The data of a checkpoint against those of its base: kept tensors byte for byte, quantized ones by their error."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from assay.callbacks import Track
from assay.errors import CheckpointError
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.declaration import MODELOPT_CONFIG
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.inspection.files import Files
from assay_quantize.inspection.subject import Subject
from assay_quantize.inspection.values import PIECE_BYTES, hollow_shards, pieces

if TYPE_CHECKING:
    from assay_quantize.decoding.open_stored import StoredCheckpoint

SLAB_BYTES, REMOTE_SLAB_BYTES = 32 << 20, 256 << 20
"""Of FP32 that is decoded at a time; more where each slab is a request to a server."""
BITS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8, "int2": 2, "int3": 3, "int5": 5, "int6": 6, "fp4_e2m1": 4, "fp8_e4m3": 8}
"""`StoredWeight.number` -> bits of a code."""


def compare_with_base(subject: Subject, base: Subject, *, decode: bool, track: Track) -> None:
    """Fill `subject.values.differing` and, with `decode`, `errors`."""
    kept = [
        (header, other)
        for name, header in subject.tensors.items()
        if (other := base.tensors.get(name)) is not None and _is_comparable(subject, base, header, other)
    ]
    is_local = subject.files.is_local and base.files.is_local
    if not is_local and not decode:
        subject.values.not_looked_at.append("kept tensors byte for byte: not both are folders (--deep reads them all the same)")
        return
    with track("comparing kept tensors", sum(header.num_bytes for header, _ in kept)) as progress:
        for header, other in kept:
            if differing := _differing_bytes(subject, base, header, other):
                what = f"{differing:,} of {header.num_bytes:,} bytes differ from the base's"
                subject.values.differing[header.name] = what
            progress(header.name, header.num_bytes)
    if not decode:
        subject.values.not_looked_at.append("errors of quantized weights against the base: not decoded (--deep)")
    else:
        _measure_errors(subject, base, track)


def _is_comparable(subject: Subject, base: Subject, header: TensorHeader, other: TensorHeader) -> bool:
    """Stored alike in both, and not as codes: what belongs to a weight that is quantized in only one is no kept tensor."""
    own, of_base = (side.stored.weights.get(header.name.rpartition(".")[0]) for side in (subject, base))
    if (header.dtype, header.shape) != (other.dtype, other.shape) or (own is None) != (of_base is None):
        return False
    if own is not None and of_base is not None and own.form != of_base.form:
        return False
    return header.shard not in hollow_shards(subject) and other.shard not in hollow_shards(base)


def _differing_bytes(subject: Subject, base: Subject, header: TensorHeader, other: TensorHeader) -> int:
    count = 0
    for own, of_base in zip(pieces(subject, header), pieces(base, other), strict=True):
        if own != of_base:
            count += int(np.count_nonzero(np.frombuffer(own, np.uint8) != np.frombuffer(of_base, np.uint8)))
    return count


def _measure_errors(subject: Subject, base: Subject, track: Track) -> None:
    """Decode every quantized weight and its base's, some rows at a time."""
    from assay_quantize.decoding.open_stored import open_stored  # torch takes seconds to import

    try:
        stored, original = (
            open_stored(_as_checkpoint(side), side.json.get(MODELOPT_CONFIG), FilesReader(side.files))
            for side in (subject, base)
        )
    except CheckpointError as problem:
        subject.values.not_looked_at.append(f"errors of quantized weights against the base: {problem}")
        return
    num_bytes = SLAB_BYTES if subject.files.is_local and base.files.is_local else REMOTE_SLAB_BYTES
    with stored, original, track("comparing weights", sum(weight.num_bytes for weight in stored.weights)) as progress:
        in_base = {weight.name: weight for weight in original.weights}
        for unread in stored.problems:
            subject.values.not_looked_at.append(f"error of {unread.subject} against the base: it {unread.what}")
        for weight in stored.weights:
            of_base = in_base.get(weight.name)
            if not weight.is_plain and of_base is not None and of_base.shape == weight.shape:
                _measure(subject, stored, original, weight.name, num_bytes)
            progress(weight.name, weight.num_bytes)


def _as_checkpoint(subject: Subject) -> Checkpoint:
    """What was read of its headers."""
    return Checkpoint(
        location=subject.files.location, folder=None, config=subject.config, tensors=dict(subject.tensors), shards={},
        files=tuple(sorted(subject.files.names)),
    )  # fmt: skip


class NotSent(CheckpointError):
    """A server did not send what was asked for: of the weight that says nothing."""


class FilesReader:
    """Data of shards in a folder, on the hub or below a URL, in ranges of a few MiB."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def read_into(self, view: memoryview, name: str, begin: int, if_shorter: str, /) -> None:
        """Fill `view` from byte `begin` of a shard on. CheckpointError: the file ends before. NotSent: a server fails."""
        for at in range(0, len(view), PIECE_BYTES):
            end = min(at + PIECE_BYTES, len(view))
            try:
                piece = self._files.read(name, begin + at, begin + end)
            except CheckpointError as problem:
                raise problem if self._files.is_local else NotSent(str(problem)) from None
            if len(piece) != end - at:
                raise CheckpointError(f"{self._files.location}/{name}: {if_shorter}")
            view[at:end] = piece

    def prefetch(self, name: str, begin: int, num_bytes: int, /) -> None:
        """Ranges come when they are read."""

    def release(self, shards: Collection[str], /) -> None:
        """Nothing of them is held."""

    def close(self) -> None:
        """The files stay open: they belong to the inspection."""


def _measure(
    subject: Subject, stored: StoredCheckpoint, original: StoredCheckpoint, name: str, num_bytes: int
) -> None:  # fmt: skip
    from assay_quantize.inspection.errors import Distance

    weight = stored.weight(name)
    is_float = weight.number.startswith("fp")
    group = weight.shares[1] if weight.shares is not None else weight.shape[1]
    distance = Distance(BITS.get(weight.number, 4), is_float, min(group, weight.shape[1]))
    try:
        for begin, end, own_RI in stored.slabs(name, num_bytes):
            distance.add(own_RI, original.read_weight(name, (begin, end)))
    except NotSent:
        raise
    except CheckpointError as problem:
        subject.values.errors[name] = f"cannot be decoded: {str(problem).partition(': ')[2] or problem}"
        return
    if math.prod(weight.shape) and (what := distance.problem()) is not None:
        subject.values.errors[name] = what
