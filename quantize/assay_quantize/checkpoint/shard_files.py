"""Shards as files, without torch: how they are read, their headers from the plan, the order of their data, names, fsync."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from assay.atomic_files import naming
from assay.errors import CheckpointError
from assay.records.plan import OutputTensor, Plan, TensorPlan
from assay.safe_files import open_inside, read_fully
from assay.safetensors_index import name_in_file
from assay_quantize.formats.schemes import DTYPE_BYTES
from assay_quantize.storage.past_cache import ReadAhead, Residency, has_direct

ALIGNMENT_BYTES = 8
"""Sizes that are multiples of it keep every later tensor aligned to its element size, whatever that is."""


LARGE_BYTES = 1 << 20
"""From which on a range that is read ahead has memory of its own, of whole huge pages."""


class OpenShard(NamedTuple):
    """has_direct: it can be read past the page cache."""

    descriptor: int
    has_direct: bool
    residency: Residency


class OpenShards:
    """Shards of a folder, opened when first read and never mapped into memory; safe to use from many threads at once."""

    def __init__(self, folder: Path, *, sizes: Mapping[str, int] | None = None, advice: int = os.POSIX_FADV_NORMAL) -> None:
        """sizes: shard -> its bytes when its header was read; another size is refused. advice: how they will be read."""
        self._folder, self._sizes, self._advice = folder, sizes or {}, advice
        self._shards: dict[str, OpenShard] = {}
        self._ahead: ReadAhead | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close all files. No read may be under way."""
        if self._ahead is not None:
            self._ahead.close()
        with self._lock:
            for shard in self._shards.values():
                shard.residency.close()
                os.close(shard.descriptor)
            self._shards.clear()

    def release(self, shards: Collection[str]) -> None:
        """They are the user's, and stay."""

    def open(self, name: str) -> OpenShard:
        with self._lock:
            if name not in self._shards:
                path = self._folder / name
                try:
                    with open_inside(self._folder, name) as file:
                        descriptor = os.dup(file.fileno())
                except OSError as error:
                    raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
                size = os.fstat(descriptor).st_size
                if (expected := self._sizes.get(name, size)) != size:
                    os.close(descriptor)
                    raise CheckpointError(
                        f"{path}: {expected} bytes expected, {size} there: it changed since its header was read; download it "
                        "again"
                    )
                os.posix_fadvise(descriptor, 0, 0, self._advice)
                self._shards[name] = OpenShard(descriptor, has_direct(descriptor), Residency(descriptor, size))
            return self._shards[name]

    def prefetch(self, name: str, begin: int, num_bytes: int) -> None:
        """Have bytes of a shard read ahead that `read_into` is asked for soon, and in one go; returns at once.

        What lies in the page cache stays there. Other ranges, if they are large, are read past it, which costs the processor
        nothing, into memory of their own.
        """
        shard = self.open(name)
        if num_bytes == 0 or (shard.residency.is_known and shard.residency.seems_cached(begin, num_bytes)):
            return
        if num_bytes < LARGE_BYTES or not shard.has_direct or not shard.residency.is_known:
            os.posix_fadvise(shard.descriptor, begin, num_bytes, os.POSIX_FADV_WILLNEED)
            return
        with self._lock:
            if self._ahead is None:
                self._ahead = ReadAhead()
        self._ahead.begin(shard.descriptor, begin, num_bytes)

    def read_into(self, view: memoryview, name: str, begin: int, if_shorter: str) -> None:
        """Fill `view` from byte `begin` of a shard on. if_shorter: what it means, in words, that the file ends before."""
        path, descriptor = self._folder / name, self.open(name).descriptor
        if self._ahead is not None and self._ahead.take(descriptor, begin, view):
            return
        try:
            done = read_fully(descriptor, view, begin)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        if done < len(view):
            raise CheckpointError(f"{path}: {if_shorter}")


def partial_path(path: Path) -> Path:
    """Where a file is written before it is renamed to `path`: hidden, and no loader's pattern matches it."""
    return path.with_name(f".{path.name}.partial")


def planned_shards(plan: Plan) -> dict[str, list[TensorPlan]]:
    """Output shard -> the tensors that go into it, in the plan's order."""
    shards: dict[str, list[TensorPlan]] = {}
    for tensor in plan.tensors:
        if tensor.shard_out is not None and tensor.outputs:
            shards.setdefault(tensor.shard_out, []).append(tensor)
    return shards


def big_output(tensor: TensorPlan) -> OutputTensor:
    """The largest output of a tensor: the one that is streamed."""
    return max(tensor.outputs, key=lambda output: (output.num_bytes, output.name))


def layout(tensors: Sequence[TensorPlan]) -> tuple[list[TensorPlan], list[OutputTensor]]:
    """The order in which a shard is worked on, and the order of its outputs in the file.

    Tensor after tensor, the large output first and the small ones right behind it, so that the file can be written from
    front to back. Outputs whose size would shift what follows off its alignment come last, wide dtypes first; so do all
    outputs of a tensor whose large one is such.
    """
    head: list[OutputTensor] = []
    tail: list[OutputTensor] = []
    late: list[TensorPlan] = []
    early: list[TensorPlan] = []
    for tensor in tensors:
        outputs = sorted(tensor.outputs, key=lambda output: (-output.num_bytes, output.name))
        is_late = big_output(tensor).num_bytes % ALIGNMENT_BYTES != 0
        (late if is_late else early).append(tensor)
        for output in outputs:
            (tail if is_late or output.num_bytes % ALIGNMENT_BYTES else head).append(output)
    tail.sort(key=lambda output: (-DTYPE_BYTES[output.dtype], output.name))
    place = {output.name: number for number, output in enumerate(tail)}
    late.sort(key=lambda tensor: place[big_output(tensor).name])
    return early + late, head + tail


def held_bytes(tensors: Sequence[TensorPlan]) -> int:
    """The most that waits in memory, while a shard is written, for its place in the file to be reached: scales, mostly."""
    order, outputs = layout(tensors)
    sizes = {output.name: output.num_bytes for output in outputs}
    waiting: set[str] = set()
    due = held = most = 0
    for tensor in order:
        streams = due < len(outputs) and outputs[due].name == big_output(tensor).name
        names = {output.name for output in tensor.outputs}
        held += sum(sizes[name] for name in names if not (streams and name == outputs[due].name))
        most = max(most, held)
        waiting |= names
        first = due
        while due < len(outputs) and outputs[due].name in waiting:
            held -= 0 if streams and due == first else sizes[outputs[due].name]
            due += 1
    return most


def header_bytes(tensors: Sequence[TensorPlan], *, packed_as_vllm: bool = False) -> tuple[bytes, dict[str, int]]:
    """The safetensors header of a planned shard, and for every output where its data starts (from the file's start).

    packed_as_vllm: as the plan's family has it.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, offset = {}, 0
    for output in layout(tensors)[1]:
        end = offset + output.num_bytes
        stored = name_in_file(output.name, packed_as_vllm=packed_as_vllm)
        entries[stored] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": [offset, end]}
        begins[output.name], offset = offset, end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    prefix = struct.pack("<Q", len(text)) + text
    return prefix, {name: len(prefix) + begin for name, begin in begins.items()}


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut. OSError, with its path: the system refuses."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(handle)
    finally:
        os.close(handle)
