"""Weights that are judged while the engine still holds their rows of the source, so that nobody reads the source twice.

The kernels of `codes.py` say whether the bytes that were made are what the rows give. Of those that are, digests are kept: of
every part, and of three pieces of the rows. When the shard is finished, the parts are read back from the disk, at the offsets
of the safetensors library, and the pieces from the source, and all must have these digests. The engine does not import this:
it calls what it was given (`quantize(on_slab=...)`).

So the engine's slab of the source is believed but for its pieces (and tiles, `definition.py`): a misread between them would be
judged to be right. A wrong place, a wrong tensor, an old buffer, another order of rows or bytes show in the pieces of every
slab. The engine's rounding, packing, ordering and writing are not believed, nor is its plan: what is judged is looked up by
name in verification's own.

The parts of a batch of weights lie one behind the other in the file, so they are read in a few long ranges, past the page cache
(they were written past it), and looked at where the disk put them: a digest for every part of every slab, no copy.

Digests are XXH3 of 128 bits: against mistakes and failing hardware, not against an attacker who chooses the bytes.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_intdigest

from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.source_reader import STORAGE
from assay_quantize.formats.schemes import INPUT_LEAVES, module_of
from assay_quantize.storage.buffers import BufferPool, raw_bytes
from assay_quantize.storage.direct_file import BLOCK_BYTES
from assay_quantize.storage.past_cache import buffer_bytes
from assay_quantize.verify.codes import is_what_rounding_gives
from assay_quantize.verify.files import StoredReader, has_rows, rows_of_part
from assay_quantize.verify.findings import ScaleCounts, SlabFindings
from assay_quantize.verify.original import Original, bf16_value
from assay_quantize.verify.slabs import SCALES, static_problem

Array = NDArray[Any]

PIECE_BYTES = 1024


class Piece(NamedTuple):
    """Bytes [begin, end) of a tensor of the source, as the engine had them."""

    begin: int
    end: int
    digest: int


class JudgedSlab(NamedTuple):
    """Rows [begin, end) of a weight whose parts are what their rows of the source give.

    digests: local name of a part -> digest of these rows of it; of all of it where it has no rows. largest: |w| of the rows,
    where the scheme needs it.
    """

    begin: int
    end: int
    digests: Mapping[str, int]
    pieces: tuple[Piece, ...]
    largest: float | None


class JudgedSlabs:
    """Collects what the engine's threads hand in; safe to use from all of them. Raises nothing for bytes that are wrong: a
    weight of which a slab is missing is to be compared with the source."""

    def __init__(self, plan: Plan, original: Original) -> None:
        self._tensors: dict[str, TensorPlan] = {}
        if original.recomputes and original.observer == "minmax":
            quantized = (tensor for tensor in plan.tensors if tensor.action == "quantize" and tensor.dtype == "BF16")
            self._tensors = {tensor.name: tensor for tensor in quantized if original.is_plain(tensor)}
        self._amax = original.amax
        self._slabs: defaultdict[str, list[JudgedSlab]] = defaultdict(list)
        self._lock = threading.Lock()

    def judge(self, name: str, begin: int, end: int, rows: Array, parts: Mapping[str, Array]) -> None:
        """Rows [begin, end) of a weight, as they were read, and what was made of them (`QuantizedRows.parts`); not kept."""
        tensor = self._tensors.get(name)
        if tensor is None or rows.shape != (end - begin, *tensor.shape[1:]) or not _fits(tensor, begin, end, parts):
            return  # the kernels index without bounds
        assert tensor.scheme is not None
        stored_scale = parts.get("weight_global_scale")
        global_scale = None if stored_scale is None else float(stored_scale[0])
        most_1 = np.zeros(1, np.uint16)
        if not is_what_rounding_gives(
            parts, rows, tensor.dtype, tensor.scheme, global_scale=global_scale, most_1=most_1
        ):  # fmt: skip
            return
        per_row = tensor.num_bytes // tensor.shape[0]
        slab = JudgedSlab(
            begin,
            end,
            {part: digest(value) for part, value in parts.items()},
            tuple(pieces_of(name, begin * per_row, rows)),
            None if global_scale is None else bf16_value(most_1[0]),
        )
        with self._lock:
            self._slabs[name].append(slab)

    def take(self, tensor: TensorPlan) -> Sequence[JudgedSlab] | None:
        """The slabs of a weight in order, each row in one of them, and forget them; None: not all of it was judged to be right.

        The largest weight is told to those who ask for that of the group.
        """
        with self._lock:
            slabs = sorted(self._slabs.pop(tensor.name, ()), key=lambda slab: slab.begin)
        if self._tensors.get(tensor.name) != tensor or not slabs:
            return None
        ends = [0, *(slab.end for slab in slabs)]
        global_scales = {slab.digests.get("weight_global_scale") for slab in slabs}
        if [slab.begin for slab in slabs] != ends[:-1] or ends[-1] != tensor.shape[0] or len(global_scales) > 1:
            return None
        magnitudes = [slab.largest for slab in slabs if slab.largest is not None]
        if magnitudes:
            self._amax.know(tensor, max(magnitudes))
        return slabs


def _fits(tensor: TensorPlan, begin: int, end: int, parts: Mapping[str, Array]) -> bool:
    """Whether there are the planned parts, in as many rows and columns as are planned."""
    assert tensor.scheme is not None
    planned = {output.name.removeprefix(f"{module_of(tensor.name)}."): output for output in tensor.outputs}
    if parts.keys() != planned.keys() - {"weight_shape", *INPUT_LEAVES}:
        return False
    for part, value in parts.items():
        output = planned[part]
        first, last = rows_of_part(tensor.scheme, part, begin, end)
        shape = (last - first, *output.shape[1:]) if has_rows(output) else output.shape
        if value.dtype != STORAGE[output.dtype] or value.shape != shape:
            return False
    return True


def digest(part: Array) -> int:
    """Of the bytes of an array; other threads run meanwhile."""
    return xxh3_128_intdigest(raw_bytes(part).data)


def pieces_of(name: str, begin: int, rows: Array) -> list[Piece]:
    """The first and the last bytes of a slab, and some between them, drawn by name and place. begin: of it in the tensor."""
    raw = rows.reshape(-1).view(np.uint8)
    last = max(0, raw.nbytes - PIECE_BYTES)
    drawn = zlib.crc32(f"{name} {begin}".encode()) % (last + 1)
    return [
        Piece(begin + at, begin + min(raw.nbytes, at + PIECE_BYTES), digest(raw[at : at + PIECE_BYTES]))
        for at in sorted({0, drawn, last})
    ]


Bytes = NDArray[np.uint8]
Inspect = Callable[[Bytes], str | None]
"""Says what is wrong with bytes that were read."""

RANGE_BYTES = (4 << 20) - 2 * BLOCK_BYTES
"""The most that is read at once, unless a part of a slab is longer: with the blocks it begins and ends in, two huge pages."""

BATCH_BYTES = 8 << 20
"""Of a job: long enough that handing it out costs nothing, short enough for threads to end together."""


class JudgedWeight(NamedTuple):
    """A weight, and all its slabs in order (`JudgedSlabs.take`)."""

    tensor: TensorPlan
    slabs: Sequence[JudgedSlab]


class _Range(NamedTuple):
    """Bytes [begin, end) of a shard, the number in its batch of the weight that they belong to, and who inspects them."""

    begin: int
    end: int
    number: int
    inspect: Inspect


Span = TypeVar("Span", _Range, Piece)


class ReadBack:
    """Safe to use from many threads at once."""

    def __init__(self, stored: StoredReader, original: Original, scales: Mapping[str, float] | None = None) -> None:
        """scales: as for `static_problem`."""
        self._stored, self._source, self._scales = stored, original.plain, scales
        self._buffers = BufferPool(buffer_bytes(RANGE_BYTES))

    def look(self, batch: Sequence[JudgedWeight]) -> list[SlabFindings]:
        """What the weights of a batch, all of one shard, showed, each as a whole. CheckpointError: a file cannot be read."""
        problems: list[str | None] = [None] * len(batch)
        shard = self._stored.header(batch[0].tensor.outputs[0].name).shard
        ranges = [part for number, weight in enumerate(batch) for part in self._ranges(number, weight)]
        for run in _runs(sorted(ranges, key=lambda part: part[:2]), RANGE_BYTES):
            begin, end = run[0].begin, run[-1].end
            buffer = self._buffers.take(buffer_bytes(end - begin))
            try:
                raw = self._stored.read_range(shard, begin, end, buffer)
                for part in run:
                    problems[part.number] = problems[part.number] or part.inspect(raw[part.begin - begin : part.end - begin])
            finally:
                self._buffers.give(buffer)
        return [self._result(weight, problem) for weight, problem in zip(batch, problems, strict=True)]

    def _ranges(self, number: int, weight: JudgedWeight) -> Iterator[_Range]:
        tensor, slabs = weight
        assert tensor.scheme is not None
        module = module_of(tensor.name)
        for output in tensor.outputs:
            header, part = self._stored.header(output.name), output.name.removeprefix(f"{module}.")
            if part in ("weight_shape", *INPUT_LEAVES):  # the weights have no part in them
                inspect: Inspect = partial(_scale_problem, tensor, output.name, self._scales)
                if part == "weight_shape":
                    inspect = partial(_shape_problem, tensor)
                yield _Range(header.begin, header.begin + output.num_bytes, number, inspect)
            elif not has_rows(output):  # the same for all slabs (`JudgedSlabs.take`)
                end = header.begin + output.num_bytes
                yield _Range(header.begin, end, number, partial(_digest_problem, part, slabs[0]))
            else:
                per_row = output.num_bytes // output.shape[0]
                for slab in slabs:
                    begin, end = (
                        header.begin + per_row * row for row in rows_of_part(tensor.scheme, part, slab.begin, slab.end)
                    )
                    yield _Range(begin, end, number, partial(_digest_problem, part, slab))

    def _result(self, weight: JudgedWeight, problem: str | None) -> SlabFindings:
        misread = self._misread(weight)
        if problem is not None or misread is not None:
            return SlabFindings(problem=problem, misread=misread)
        leaves = {output.name.rpartition(".")[2] for output in weight.tensor.outputs}
        scales = {part: ScaleCounts(0, 0, 0) for part in SCALES if part in leaves}
        return SlabFindings(Counter(), scales=scales, shape=tuple(weight.tensor.shape) if "weight_shape" in leaves else None)

    def _misread(self, weight: JudgedWeight) -> str | None:
        """Which bytes of the source are not those that the weight was made of."""
        # the last piece of a slab and the first of the next lie side by side
        for run in _runs([piece for slab in weight.slabs for piece in slab.pieces], math.inf):
            begin, end = run[0].begin, run[-1].end
            raw = self._source.read(weight.tensor.name, begin, end, np.empty(end - begin, np.uint8))
            for piece in run:
                if digest(raw[piece.begin - begin : piece.end - begin]) != piece.digest:
                    return f"bytes {piece.begin} to {piece.end - 1} of it are not those it was made of"
        return None


def batches(weights: Iterable[JudgedWeight]) -> Iterator[list[JudgedWeight]]:
    """The weights of a shard, a batch of BATCH_BYTES at a time, or of one weight that is longer."""
    batch: list[JudgedWeight] = []
    num_bytes = 0
    for weight in weights:
        size = sum(output.num_bytes for output in weight.tensor.outputs)
        if batch and num_bytes + size > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(weight)
        num_bytes += size
    if batch:
        yield batch


def _runs(ranges: Iterable[Span], most_bytes: float) -> Iterator[list[Span]]:
    """Ranges in order, together where one begins where the other ends, up to `most_bytes`."""
    run: list[Span] = []
    for part in ranges:
        follows = run and part.begin == run[-1].end
        if run and not (follows and part.end - run[0].begin <= most_bytes):
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _digest_problem(part: str, slab: JudgedSlab, raw: Bytes) -> str | None:
    if digest(raw) == slab.digests[part]:
        return None
    return f"its {part} is not what was written, in what belongs to rows {slab.begin} to {slab.end - 1}"


def _shape_problem(tensor: TensorPlan, raw: Bytes) -> str | None:
    stored = np.frombuffer(raw.tobytes(), np.int64).tolist()
    return None if stored == list(tensor.shape) else f"its weight_shape says {stored}, it is {list(tensor.shape)}"


def _scale_problem(tensor: TensorPlan, name: str, scales: Mapping[str, float] | None, raw: Bytes) -> str | None:
    (stored,) = np.frombuffer(raw.tobytes(), np.float32).tolist()
    return static_problem(tensor, name, stored, scales)
