"""The source as verification needs it: its bytes, what its weights were rounded with, and the largest weight of every group
that shares a global scale (NVFP4), taken over all its members and not by `amax_rows`.

Where slabs are checked with the global scale that is stored, each notes its largest weight, or it is known from when the engine
held the weight (`judged.py`); a group is read only for what is neither.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from compressed_tensors.quantization.utils import generate_gparam
from numpy.typing import NDArray

from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.checkpoint import Checkpoint
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.importance import Importance
from assay_quantize.checkpoint.source_reader import SourceReader, rows_bytes
from assay_quantize.checkpoint.torch_tensors import TORCH_DTYPES
from assay_quantize.formats.schemes import SOURCE_DTYPES
from assay_quantize.plan.calibrated import calibrated_tensors, needs_calibration, static_scales
from assay_quantize.plan.slabs import SLAB_BYTES, amax_key, amax_members, observer_of, slab_ranges
from assay_quantize.verify.codes import largest_bits
from assay_quantize.verify.files import StoredReader


class Amax(NamedTuple):
    """value: NaN when a weight is NaN or infinite. dtype: in which the global scale is divided."""

    value: float
    dtype: str

    def tensor(self) -> torch.Tensor:
        """As compressed-tensors takes it."""
        return torch.tensor([self.value], dtype=TORCH_DTYPES[self.dtype])

    def global_scale(self) -> float:
        """What is stored for it, by compressed-tensors."""
        amax = self.tensor()
        return float(generate_gparam(-amax, amax))


class GroupAmax:
    """Looks through a group when one of its members is first asked for; safe to use from many threads."""

    def __init__(self, plan: Plan, source: SourceReader) -> None:
        self._members: Mapping[str, Sequence[TensorPlan]] = amax_members(plan, plan.tensors)
        self._source = source
        self._by_group: dict[str, Future[Amax]] = {}
        self._largest_noted: dict[str, float] = {}
        self._largest_known: dict[str, float] = {}
        self._num_rows_noted: Counter[str] = Counter()
        self._lock = threading.Lock()

    def of(self, tensor: TensorPlan) -> Amax | None:
        """None: its scheme has no global scale."""
        key = amax_key(tensor)
        if key is None:
            return None
        with self._lock:
            is_first = key not in self._by_group
            future = self._by_group.setdefault(key, Future())
        if is_first:
            try:
                future.set_result(self._amax_of(self._members[key]))
            except BaseException as problem:  # noqa: BLE001 - handed to all threads that wait for this group
                future.set_exception(problem)
        return future.result()

    def note(self, tensor: TensorPlan, rows: NDArray[Any]) -> None:
        """Rows of a tensor, none of them twice."""
        magnitude = largest(rows, tensor.logical_dtype)
        with self._lock:
            self._largest_noted[tensor.name] = max(magnitude, self._largest_noted.get(tensor.name, 0.0))
            self._num_rows_noted[tensor.name] += len(rows)

    def know(self, tensor: TensorPlan, magnitude: float) -> None:
        """The largest weight of a whole tensor."""
        with self._lock:
            self._largest_known[tensor.name] = magnitude

    def _amax_of(self, members: Sequence[TensorPlan]) -> Amax:
        amax, buffer = 0.0, np.empty(0, np.uint8)
        for member in members:
            with self._lock:
                is_noted = self._num_rows_noted[member.name] == member.shape[0]
                known = self._largest_noted[member.name] if is_noted else self._largest_known.get(member.name)
            if known is not None:
                amax = max(amax, known)
                continue
            for begin, end in slab_ranges(member, SLAB_BYTES):
                if buffer.nbytes < (needed := rows_bytes(member, end - begin)):
                    buffer = np.empty(needed, np.uint8)
                magnitude = largest(self._source.read_rows(member, begin, end, buffer), member.logical_dtype)
                amax = max(amax, magnitude) if math.isfinite(magnitude) else math.nan
        dtypes = {member.logical_dtype for member in members}
        return Amax(amax, dtypes.pop() if len(dtypes) == 1 else "F32")


def largest(rows: NDArray[Any], dtype: str) -> float:
    """Largest |w|; NaN or infinite when a weight is. BF16 rows are bit patterns, which without the sign are in order of |w|."""
    if dtype != "BF16":
        return float(np.abs(rows).max(initial=0))
    return bf16_value(largest_bits(rows.reshape(-1)))


def bf16_value(bits: int) -> float:
    """The number that has these BF16 bits."""
    return float((np.array([bits], np.uint32) << 16).view(np.float32)[0])


@dataclass(frozen=True)
class Original:
    """A context manager. plain: the same files by the safetensors library's headers. importance: channel weights of the scale
    search. recomputes: False where the plan used channel weights and nobody gave them: then only errors are bounded.
    calibrated: weights whose codes depend on the text that they were calibrated with."""

    reader: SourceReader
    plain: StoredReader
    headers: dict[str, TensorHeader]
    amax: GroupAmax
    observer: str
    importance: Importance | None
    recomputes: bool
    calibrated: frozenset[str]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.reader.close()
        finally:
            self.plain.close()

    def can_make(self, tensor: TensorPlan) -> bool:
        """Whether the source alone says what every byte of a quantized weight must be."""
        return self.recomputes and tensor.name not in self.calibrated

    def importance_of(self, tensor: TensorPlan) -> NDArray[np.float32] | None:
        """Channel weights of a quantized weight; None: it has none, or its scales are not searched."""
        if self.importance is None or self.observer != "mse":
            return None
        return self.importance.for_weight(tensor.name, tensor.shape[1])

    def is_plain(self, tensor: TensorPlan) -> bool:
        """Whether a file of the source holds the weight under its own name, in a dtype that needs no scales."""
        header = self.headers.get(tensor.name)
        return header is not None and header.dtype in SOURCE_DTYPES and header.shape == tuple(tensor.shape)


def open_original(
    source: Checkpoint, headers: dict[str, TensorHeader], plan: Plan, importance: Importance | None
) -> Original:  # fmt: skip
    """headers: of all shards, by the safetensors library."""
    assert source.folder is not None, "opened as a folder"
    reader, observer = SourceReader(source), observer_of(plan)
    return Original(
        reader=reader,
        plain=StoredReader(source.folder, headers),
        headers=headers,
        amax=GroupAmax(plan, reader),
        observer=observer,
        importance=importance,
        # scales of activations come from the file as well, and no byte of a weight with them
        recomputes=observer != "mse" or plan.importance_sha256 == (None if importance is None else importance.sha256),
        calibrated=frozenset(tensor.name for tensors in calibrated_tensors(plan).values() for tensor in tensors),
    )


def calibrated_scales(plan: Plan, importance: Importance | None) -> Mapping[str, float] | None:
    """What the calibration file makes of every static scale; None: it was not given, or is another one."""
    if not needs_calibration(plan):
        return {}
    if importance is None or importance.sha256 != plan.importance_sha256:
        return None
    return static_scales(plan, importance)
