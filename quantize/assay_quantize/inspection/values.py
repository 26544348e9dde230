"""Reads of the data what the checks need: every scale, and where asked for every plain or FP8 weight; in bounded memory.

Numbers are counted by their bit patterns, many tensors at a time. A shard that has a header and no data (a hollow copy) is not
looked at; of one that is mostly written, parts that were never written are told.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.callbacks import Progress
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.stored import CACHE_LEAVES, SCALE_LEAVES, Weight
from assay_quantize.inspection.subject import Counts, Subject

PIECE_BYTES = 16 << 20
DESCRIBING_LEAVES = ("qzeros", "weight_zero_point", "g_idx", "weight_g_idx", "weight_shape")
_STORAGE: dict[str, type[np.generic]] = {
    "F32": np.uint32, "BF16": np.uint16, "F16": np.uint16, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F64": np.uint64,
}  # fmt: skip
_MAGNITUDE = {"F32": (0x7FFF_FFFF, 0x7F80_0000), "BF16": (0x7FFF, 0x7F80), "F16": (0x7FFF, 0x7C00), "F8_E4M3": (0x7F, 0x7F),
              "F8_E5M2": (0x7F, 0x7C), "F64": (0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000)}  # fmt: skip
"""dtype -> (mask of all but the sign, least pattern that is infinite or NaN)."""


def read_scales(subject: Subject, on_progress: Progress | None = None) -> None:
    """Fill `subject.values` with what scales, zero points and orders of columns hold."""
    leaves = {*SCALE_LEAVES, *CACHE_LEAVES}
    tensors = [h for h in _every_part(subject) if h.name.rpartition(".")[2] in leaves or _is_stacked_scale(h)]
    for header, counts in _counted(subject, tensors, on_progress):
        subject.values.scales[header.name] = counts
    for header in _with_data(subject, [h for h in tensors if math.prod(h.shape) == 1 and h.dtype in _STORAGE], note=False):
        subject.values.scalars[header.name] = _scalar(subject, header)
    for weight in subject.stored.weights.values():
        for leaf in DESCRIBING_LEAVES:
            described = weight.parts.get(leaf)
            if described is None or described.shard in hollow_shards(subject):
                continue
            if (problem := _problem_of_description(subject, weight, leaf, described)) is not None:
                subject.values.packed[described.name] = problem


def _is_stacked_scale(header: TensorHeader) -> bool:
    return header.name.rpartition(".")[2].endswith(("_scale", "_scales", "_scale_inv")) and ".experts." in header.name


def read_weights(subject: Subject, on_progress: Progress | None = None) -> None:
    """Fill `subject.values` with what plain and FP8 tensors hold."""
    tensors = [header for header in subject.tensors.values() if header.dtype in _MAGNITUDE and not _is_scale(header)]
    for header, counts in _counted(subject, tensors, on_progress):
        subject.values.weights[header.name] = counts


def num_bytes_of(subject: Subject, *, weights: bool) -> int:
    """What `on_progress` adds up to."""
    scales = sum(h.num_bytes for h in subject.tensors.values() if _is_scale(h))
    return sum(h.num_bytes for h in subject.tensors.values()) if weights else scales


def _is_scale(header: TensorHeader) -> bool:
    return header.name.rpartition(".")[2] in SCALE_LEAVES


def _every_part(subject: Subject) -> Iterator[TensorHeader]:
    for weight in subject.stored.weights.values():
        yield from weight.parts.values()
    yield from (header for name, header in subject.stored.others.items() if name.rpartition(".")[2] in CACHE_LEAVES)


# ------------------------------------------------------------------------------------------------ reading
def _with_data(subject: Subject, tensors: Iterable[TensorHeader], *, note: bool = True) -> list[TensorHeader]:
    """Those that lie in shards with data. note: say of which shards there are none."""
    hollow = hollow_shards(subject)
    kept = [header for header in tensors if header.shard not in hollow]
    if note and hollow and len(kept) < len(list(tensors)):
        line = f"values: {len(hollow)} shards have headers and no data (nothing was ever written to them)"
        if line not in subject.values.not_looked_at:
            subject.values.not_looked_at.append(line)
    return kept


def hollow_shards(subject: Subject) -> frozenset[str]:
    """Shards with a header and no data."""
    begins: dict[str, int] = {}
    for header in subject.tensors.values():
        begins[header.shard] = min(header.begin, begins.get(header.shard, header.begin))
    key = "hollow"
    cached: frozenset[str] | None = subject.__dict__.get(key)
    if cached is None:
        cached = frozenset(shard for shard, begin in begins.items() if subject.files.is_hollow(shard, begin))
        subject.__dict__[key] = cached
    return cached


def _counted(
    subject: Subject, tensors: Iterable[TensorHeader], on_progress: Progress | None
) -> Iterator[tuple[TensorHeader, Counts]]:
    """Each tensor with its numbers, in the order of the data."""
    ordered = sorted(_with_data(subject, list(tensors)), key=lambda header: (header.shard, header.begin))
    workers = min(len(os.sched_getaffinity(0)), 8) if subject.files.is_local else 8
    with ThreadPoolExecutor(workers, thread_name_prefix="values") as pool:
        for header, counts in zip(ordered, pool.map(lambda header: _counts(subject, header), ordered), strict=True):
            if on_progress is not None:
                on_progress(header.name, header.num_bytes)
            yield header, counts


def _counts(subject: Subject, header: TensorHeader) -> Counts:
    totals = np.zeros(4, np.int64)
    for piece in pieces(subject, header):
        totals += count_values(piece, header.dtype)
    return Counts(*map(int, totals))


def pieces(subject: Subject, header: TensorHeader) -> Iterator[bytes]:
    """The bytes of a tensor, a few MiB at a time."""
    for begin in range(header.begin, header.end, PIECE_BYTES):
        yield subject.files.read(header.shard, begin, min(begin + PIECE_BYTES, header.end))


def count_values(raw: bytes, dtype: str) -> tuple[int, int, int, int]:
    """(how many there are, NaN or infinite, zero, negative)."""
    if dtype in ("U8", "F8_E8M0"):  # exponents: 255 is NaN
        exponents = np.frombuffer(raw, np.uint8)
        return len(exponents), int(np.count_nonzero(exponents == 255)), 0, 0
    if dtype not in _MAGNITUDE:
        return len(raw), 0, 0, 0
    magnitude, non_finite = _MAGNITUDE[dtype]
    bits: NDArray[Any] = np.frombuffer(raw, _STORAGE[dtype])
    sizes = bits & bits.dtype.type(magnitude)
    negative = (bits > magnitude) & (sizes != 0) & (sizes < non_finite)
    non_finites, zeros, negatives = (int(np.count_nonzero(flags)) for flags in (sizes >= non_finite, sizes == 0, negative))
    return len(bits), non_finites, zeros, negatives


def _scalar(subject: Subject, header: TensorHeader) -> float:
    raw = subject.files.read(header.shard, header.begin, header.end)
    if header.dtype == "BF16":
        return float((np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)[0])
    kinds: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
    return float(np.frombuffer(raw, kinds[header.dtype])[0]) if header.dtype in kinds else math.nan


# ------------------------------------------------------------------------------------------------ what describes codes
def _problem_of_description(subject: Subject, weight: Weight, leaf: str, header: TensorHeader) -> str | None:
    """What is wrong with zero points, an order of columns, or the shape of packed codes; None: nothing."""
    check: dict[str, Callable[[NDArray[Any]], str | None]] = {
        "weight_shape": lambda values: _shape_problem(weight, values),
        "g_idx": lambda values: _order_problem(weight, values),
        "weight_g_idx": lambda values: _order_problem(weight, values),
        "qzeros": lambda values: _zeros_problem(subject, weight, values),
        "weight_zero_point": lambda values: _range_problem(subject, header, values),
    }
    kinds: dict[str, type[np.generic]] = {"I32": np.int32, "I64": np.int64, "I8": np.int8, "U8": np.uint8, "U32": np.uint32}
    if header.dtype not in kinds or header.num_bytes > PIECE_BYTES:
        return None
    raw = subject.files.read(header.shard, header.begin, header.end)
    return check[leaf](np.frombuffer(raw, kinds[header.dtype]))


def _shape_problem(weight: Weight, values: NDArray[Any]) -> str | None:
    if weight.shape is None or weight.is_stacked or list(values) == list(weight.shape):
        return None
    return f"says {values.tolist()[:4]}; the codes are those of a weight {list(weight.shape)}"


def _order_problem(weight: Weight, values: NDArray[Any]) -> str | None:
    scale = weight.parts.get("scales", weight.parts.get("weight_scale"))
    if scale is None or len(scale.shape) != 2:
        return None
    groups = scale.shape[0] if "scales" in weight.parts else scale.shape[1]
    wrong = int(np.count_nonzero((values < 0) | (values >= groups)))
    return f"{wrong} of {len(values)} columns name a group that is none of its {groups}" if wrong else None


def _zeros_problem(subject: Subject, weight: Weight, values: NDArray[Any]) -> str | None:
    """Zero points of symmetric GPTQ are in the middle; vLLM takes them for that without a look (version 1 stores one less)."""
    claim = subject.declared.quantization
    if weight.form != "gptq" or claim.get("sym") is not True or subject.declared.bits not in (4, 8):
        return None
    bits = subject.declared.bits
    middle, is_second = 1 << (bits - 1), str(claim.get("checkpoint_format")) == "gptq_v2"
    code = middle if is_second else middle - 1
    word = sum(code << shift for shift in range(0, 32, bits))
    wrong = int(np.count_nonzero(values.view(np.uint32) != word))
    return f"{wrong} of {len(values)} words are not {word:#x}, the middle that `sym: true` stands for" if wrong else None


def _range_problem(subject: Subject, header: TensorHeader, values: NDArray[Any]) -> str | None:
    bits = subject.declared.bits
    if bits is None or header.dtype not in ("I8", "U8"):
        return None
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if header.dtype == "I8" else (0, (1 << bits) - 1)
    wrong = int(np.count_nonzero((values < low) | (values > high)))
    return f"{wrong} of {len(values)} are outside {low} to {high}" if wrong else None
