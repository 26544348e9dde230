"""What the data of GGUF files hold: plain tensors value by value, blocks by their scales, in bounded memory.

Codes are integers, so that a weight is NaN or infinite where a scale of its block is (`ggml_validate_row_data` of llama.cpp
looks at scales alone too), and a block is zero where all its scales are: what quantizes zeros writes a scale of zero. Of
MXFP4 and NVFP4 the codes are looked at too. Where scales lie is `quantize_row_*` of ggml-common.h; a test holds
it against `gguf.quants.dequantize`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from assay.callbacks import Track
from assay_quantize.decoding.gguf_header import GgufTensor
from assay_quantize.inspection.gguf.model import GgufModel, Piece, is_plain
from assay_quantize.inspection.subject import Counts
from assay_quantize.inspection.values import PIECE_BYTES, count_values

Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]

_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ1_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
"""Type -> where in a block its FP16 scales lie."""


def _halves(blocks: Bytes, offsets: tuple[int, ...]) -> tuple[Flags, Flags]:
    halves = np.stack([blocks[:, at] | (blocks[:, at + 1].astype(np.uint16) << 8) for at in offsets])
    sizes = halves & 0x7FFF
    is_infinite: Flags = np.asarray((sizes >= 0x7C00).any(axis=0))
    is_zero: Flags = np.asarray((sizes == 0).all(axis=0))
    return is_infinite, is_zero


def _iq1_m(blocks: Bytes) -> tuple[Flags, Flags]:
    """Four bits of the scale in each of the last four words."""
    words = blocks[:, -8:].copy().view("<u2").astype(np.uint16)
    sizes = ((words >> 12) << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1) & 0x7FFF
    return sizes >= 0x7C00, sizes == 0


def _mxfp4(blocks: Bytes) -> tuple[Flags, Flags]:
    """An exponent from 253 on makes large codes infinite; FP4: 0 and 8 are zero."""
    codes = np.maximum(blocks[:, 1:] & 7, blocks[:, 1:] >> 4 & 7).max(axis=1)
    return codes >= 2 * (256 - blocks[:, 0].astype(np.int16)), codes == 0


def _nvfp4(blocks: Bytes) -> tuple[Flags, Flags]:
    """Four E4M3 scales, each of 16 codes; what would be NaN is read as 0."""
    scales, codes = blocks[:, :4], blocks[:, 4:].reshape(-1, 4, 8)
    no_scale = (scales & 0x7F == 0) | (scales == 0x7F)
    return np.zeros(len(blocks), np.bool_), (no_scale | (codes & 0x77 == 0).all(axis=2)).all(axis=1)


_OTHERS: dict[str, Callable[[Bytes], tuple[Flags, Flags]]] = {"IQ1_M": _iq1_m, "MXFP4": _mxfp4, "NVFP4": _nvfp4}
KNOWN_BLOCKS = frozenset({*_HALVES, *_OTHERS})
"""Types whose blocks can be looked at."""


def look_at_blocks(blocks: Bytes, kind: str) -> tuple[Flags, Flags]:
    """(which of blocks [number, bytes] of a type are not finite, which are zero)."""
    return _halves(blocks, _HALVES[kind]) if kind in _HALVES else _OTHERS[kind](blocks)


def read_values(model: GgufModel, track: Track) -> None:
    """Fill `model.values` with what every tensor holds, and `model.hollow` with files that have headers and no data."""
    for name, header in model.headers.items():
        if header.tensors and model.files.is_hollow(name, header.data_begin):
            model.hollow.add(name)
    whole = [t for t in model.tensors.values() if t.shard not in model.hollow and t.end <= model.headers[t.shard].num_bytes]
    known = [tensor for tensor in whole if is_plain(tensor) or tensor.kind in KNOWN_BLOCKS]
    tensors = sorted(known, key=lambda tensor: (tensor.shard, tensor.begin))
    total = sum(tensor.num_bytes for tensor in tensors)
    workers = min(len(os.sched_getaffinity(0)), 8)
    with track("reading weights", total) as progress, ThreadPoolExecutor(workers, thread_name_prefix="values") as pool:
        for tensor, counted in zip(tensors, pool.map(lambda tensor: _counted(model, tensor), tensors), strict=True):
            progress(tensor.name, tensor.num_bytes)
            model.values.update(counted)


def _counted(model: GgufModel, tensor: GgufTensor) -> dict[Piece, Counts]:
    experts = tensor.shape[0] if len(tensor.shape) == 3 and "_exps." in tensor.name else None
    if experts is None:
        return {Piece(tensor.name, None): _count(model, tensor, tensor.begin, tensor.end)}
    size = tensor.num_bytes // experts
    begins = range(tensor.begin, tensor.end, size)
    return {Piece(tensor.name, n): _count(model, tensor, begin, begin + size) for n, begin in enumerate(begins)}


def _count(model: GgufModel, tensor: GgufTensor, begin: int, end: int) -> Counts:
    """Of the blocks of quantized tensors, of the values of plain ones."""
    totals = np.zeros(4, np.int64)
    for raw in _pieces(model, tensor, begin, end):
        totals += count_values(raw, tensor.kind) if is_plain(tensor) else _count_blocks(raw, tensor.kind)
    return Counts(*map(int, totals))


def _pieces(model: GgufModel, tensor: GgufTensor, begin: int, end: int) -> Iterator[bytes]:
    """Whole blocks, a few MiB at a time."""
    step = PIECE_BYTES // _block_bytes(tensor.kind) * _block_bytes(tensor.kind)
    for at in range(begin, end, step):
        yield model.files.read(tensor.shard, at, min(at + step, end))


def _count_blocks(raw: bytes, kind: str) -> tuple[int, int, int, int]:
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, _block_bytes(kind))
    not_finite, zero = look_at_blocks(blocks, kind)
    return len(blocks), int(np.count_nonzero(not_finite)), int(np.count_nonzero(zero)), 0


def _block_bytes(kind: str) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
