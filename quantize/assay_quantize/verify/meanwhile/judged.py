"""Slabs that are judged while the engine still holds their rows of the source, so that nobody reads the source twice.

The kernels of `codes/` say whether the bytes that were made are what the rows give. Of those that are, digests are kept: of
every part, and of three pieces of the rows. When the shard is finished, `slabs.py` reads the parts back from the disk, at the
offsets of the safetensors library, and the pieces from the source, and both must have these digests.

So the engine's slab of the source is believed but for its pieces (and tiles, `definition.py`): a misread between them would be
judged to be right. A wrong place, a wrong tensor, an old buffer, another order of rows or bytes show in the pieces of every
slab. The engine's rounding, packing, ordering and writing are not believed, nor is its plan: what is judged is looked up by
name in verification's own.

Digests are XXH3 of 128 bits: against mistakes and failing hardware, not against whoever can choose the bytes.
"""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_intdigest

from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.source_reader import STORAGE
from assay_quantize.formats.schemes import INPUT_LEAVES, module_of
from assay_quantize.verify.amax import bf16_value
from assay_quantize.verify.codes import is_what_rounding_gives
from assay_quantize.verify.files import has_rows, rows_of_part
from assay_quantize.verify.original import Original

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
        self._found: defaultdict[str, list[JudgedSlab]] = defaultdict(list)
        self._lock = threading.Lock()

    def judge(self, name: str, begin: int, end: int, rows: Array, parts: Mapping[str, Array]) -> None:
        """Rows [begin, end) of a weight, as they were read, and what was made of them (`QuantizedRows.parts`); not kept."""
        tensor = self._tensors.get(name)
        if tensor is None or rows.shape != (end - begin, *tensor.shape[1:]):
            return
        assert tensor.scheme is not None
        if not _fits(tensor, begin, end, parts):
            return  # the kernels index without bounds
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
            self._found[name].append(slab)

    def take(self, tensor: TensorPlan) -> Sequence[JudgedSlab] | None:
        """The slabs of a weight in order, each row in one of them, and forget them; None: not all of it was judged to be right.

        The largest weight is told to those who ask for that of the group.
        """
        with self._lock:
            slabs = sorted(self._found.pop(tensor.name, ()), key=lambda slab: slab.begin)
        if self._tensors.get(tensor.name) != tensor or not slabs:
            return None
        ends = [0, *(slab.end for slab in slabs)]
        one_scale = {slab.digests.get("weight_global_scale") for slab in slabs}
        if [slab.begin for slab in slabs] != ends[:-1] or ends[-1] != tensor.shape[0] or len(one_scale) > 1:
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
    return xxh3_128_intdigest(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)


def pieces_of(name: str, begin: int, rows: Array) -> list[Piece]:
    """The first and the last bytes of a slab, and some between them, drawn by name and place. begin: of it in the tensor."""
    raw = rows.reshape(-1).view(np.uint8)
    last = max(0, raw.nbytes - PIECE_BYTES)
    drawn = zlib.crc32(f"{name} {begin}".encode()) % (last + 1)
    return [
        Piece(begin + at, begin + min(raw.nbytes, at + PIECE_BYTES), digest(raw[at : at + PIECE_BYTES]))
        for at in sorted({0, drawn, last})
    ]
