"""Weights that were judged as they were made, read back from the disk: what a worker thread does with a batch of them.

The parts of a batch lie one behind the other in the file, so they are read in a few long ranges, past the page cache (they were
written past it), and looked at where the disk put them: a digest for every part of every slab, no copy. Then the pieces of the
source are read, and must have the digests of what the weight was made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from assay.records.plan import OutputTensor, TensorPlan
from assay_quantize.formats.schemes import INPUT_LEAVES, module_of
from assay_quantize.storage.buffers import BufferPool
from assay_quantize.storage.direct_file import BLOCK_BYTES
from assay_quantize.storage.past_cache import buffer_bytes
from assay_quantize.verify.files import StoredReader, has_rows, rows_of_part
from assay_quantize.verify.meanwhile.judged import JudgedSlab, Piece, digest
from assay_quantize.verify.original import Original
from assay_quantize.verify.slabs import SCALES, ScaleCounts, SlabFindings, static_problem

Bytes = NDArray[np.uint8]
Look = Callable[[Bytes], str | None]

RANGE_BYTES = (4 << 20) - 2 * BLOCK_BYTES
"""Read at once, at the most, but for a part of a slab that is longer: with the blocks it begins and ends in, two huge pages."""

BATCH_BYTES = 8 << 20
"""Of a job: long enough that handing it out costs nothing, short enough for threads to end together."""


class JudgedWeight(NamedTuple):
    """A weight, and all its slabs in order (`JudgedSlabs.take`)."""

    tensor: TensorPlan
    slabs: Sequence[JudgedSlab]


class _Range(NamedTuple):
    """Bytes [begin, end) of a shard, what looks at them and says what is wrong, and of which weight they are."""

    shard: str
    begin: int
    end: int
    number: int
    look: Look


class ReadBack:
    """Safe to use from many threads at once."""

    def __init__(self, stored: StoredReader, original: Original, scales: Mapping[str, float] | None = None) -> None:
        """scales: as for `static_problem`."""
        self._stored, self._source, self._scales = stored, original.plain, scales
        self._buffers = BufferPool(buffer_bytes(RANGE_BYTES))

    def look(self, batch: Sequence[JudgedWeight]) -> list[SlabFindings]:
        """What the weights of a batch showed, each as a whole. CheckpointError when a file cannot be read."""
        problems: list[str | None] = [None] * len(batch)
        ranges = [one for number, weight in enumerate(batch) for one in self._ranges(number, weight)]
        for together in _in_long_ranges(sorted(ranges, key=lambda one: one[:3])):
            begin, end = together[0].begin, together[-1].end
            buffer = self._buffers.take(buffer_bytes(end - begin))
            try:
                raw = self._stored.read_range(together[0].shard, begin, end, buffer)
                for one in together:
                    problems[one.number] = problems[one.number] or one.look(raw[one.begin - begin : one.end - begin])
            finally:
                self._buffers.give(buffer)
        return [self._found(weight, problem) for weight, problem in zip(batch, problems, strict=True)]

    def _ranges(self, number: int, weight: JudgedWeight) -> Iterator[_Range]:
        tensor, slabs = weight
        assert tensor.scheme is not None
        module = module_of(tensor.name)
        for output in tensor.outputs:
            header, part = self._stored.header(output.name), output.name.removeprefix(f"{module}.")
            if part in ("weight_shape", *INPUT_LEAVES):  # the weights have no part in them
                look = _shape(tensor) if part == "weight_shape" else _scale_of_inputs(tensor, output.name, self._scales)
                yield _Range(header.shard, header.begin, header.begin + output.num_bytes, number, look)
                continue
            # what has no rows is the same for all slabs (`JudgedSlabs.take`)
            for slab in slabs if has_rows(output) else slabs[:1]:
                begin, end = _bytes_of_slab(tensor.scheme, part, output, slab)
                yield _Range(header.shard, header.begin + begin, header.begin + end, number, _digested(part, slab))

    def _found(self, weight: JudgedWeight, problem: str | None) -> SlabFindings:
        misread = self._misread(weight)
        if problem is not None or misread is not None:
            return SlabFindings(problem=problem, misread=misread)
        leaves = {output.name.rpartition(".")[2] for output in weight.tensor.outputs}
        scales = {part: ScaleCounts(0, 0, 0) for part in SCALES if part in leaves}
        return SlabFindings(Counter(), scales=scales, shape=tuple(weight.tensor.shape) if "weight_shape" in leaves else None)

    def _misread(self, weight: JudgedWeight) -> str | None:
        """Which bytes of the source are not those that the weight was made of."""
        for together in _side_by_side([piece for slab in weight.slabs for piece in slab.pieces]):
            begin, end = together[0].begin, together[-1].end
            raw = self._source.read(weight.tensor.name, begin, end, np.empty(end - begin, np.uint8))
            for piece in together:
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


def _in_long_ranges(ranges: Sequence[_Range]) -> Iterator[list[_Range]]:
    """Ranges in order, together where they follow each other in a file, up to RANGE_BYTES."""
    together: list[_Range] = []
    for one in ranges:
        follows = together and (one.shard, one.begin) == (together[-1].shard, together[-1].end)
        if together and not (follows and one.end - together[0].begin <= RANGE_BYTES):
            yield together
            together = []
        together.append(one)
    if together:
        yield together


def _side_by_side(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces in order, together where one begins where the other ends, as the last of a slab and the first of the next do."""
    together: list[Piece] = []
    for piece in pieces:
        if together and piece.begin != together[-1].end:
            yield together
            together = []
        together.append(piece)
    if together:
        yield together


def _bytes_of_slab(scheme: str, part: str, output: OutputTensor, slab: JudgedSlab) -> tuple[int, int]:
    """[begin, end) of a stored part, of what belongs to the rows of a slab."""
    if not has_rows(output):
        return 0, output.num_bytes
    first, last = rows_of_part(scheme, part, slab.begin, slab.end)
    per_row = output.num_bytes // output.shape[0]
    return first * per_row, last * per_row


def _digested(part: str, slab: JudgedSlab) -> Look:
    def look(raw: Bytes) -> str | None:
        if digest(raw) == slab.digests[part]:
            return None
        return f"its {part} is not what was written, in what belongs to rows {slab.begin} to {slab.end - 1}"

    return look


def _shape(tensor: TensorPlan) -> Look:
    def look(raw: Bytes) -> str | None:
        found = np.frombuffer(raw.tobytes(), np.int64).tolist()
        return None if found == list(tensor.shape) else f"its weight_shape says {found}, it is {list(tensor.shape)}"

    return look


def _scale_of_inputs(tensor: TensorPlan, name: str, scales: Mapping[str, float] | None) -> Look:
    def look(raw: Bytes) -> str | None:
        (found,) = np.frombuffer(raw.tobytes(), np.float32).tolist()
        return static_problem(tensor, name, found, scales)

    return look
