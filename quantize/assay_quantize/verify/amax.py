"""The largest weight of every group that shares a global scale (NVFP4), of all its members; not by `amax_rows`.

Where slabs are checked with the global scale that is stored, each notes its largest weight, or it is known from when the engine
held the weight (`meanwhile/judged.py`); a group is read only for what is neither.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
from compressed_tensors.quantization.utils import generate_gparam
from numpy.typing import NDArray

from assay.records.plan import Plan, TensorPlan
from assay_quantize.checkpoint.source_reader import SourceReader, rows_bytes
from assay_quantize.checkpoint.torch_tensors import TORCH_DTYPES
from assay_quantize.plan.slabs import SLAB_BYTES, amax_key, amax_members, cut
from assay_quantize.verify.codes.bf16 import largest_bits


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
        self._found: dict[str, Future[Amax]] = {}
        self._noted: dict[str, float] = {}
        self._known: dict[str, float] = {}
        self._rows: Counter[str] = Counter()
        self._lock = threading.Lock()

    def of(self, tensor: TensorPlan) -> Amax | None:
        """None: its scheme has no global scale."""
        key = amax_key(tensor)
        if key is None:
            return None
        with self._lock:
            future, is_first = self._found.get(key), key not in self._found
            if future is None:
                future = self._found[key] = Future()
        if is_first:
            try:
                future.set_result(self._look(self._members[key]))
            except BaseException as problem:  # noqa: BLE001 - handed to all threads that wait for this group
                future.set_exception(problem)
        return future.result()

    def note(self, tensor: TensorPlan, rows: NDArray[Any]) -> None:
        """Rows of a tensor, none of them twice."""
        most = largest(rows, tensor.logical_dtype)
        with self._lock:
            self._noted[tensor.name] = max(most, self._noted.get(tensor.name, 0.0))
            self._rows[tensor.name] += len(rows)

    def know(self, tensor: TensorPlan, most: float) -> None:
        """The largest weight of a whole tensor."""
        with self._lock:
            self._known[tensor.name] = most

    def _look(self, members: Sequence[TensorPlan]) -> Amax:
        most, buffer = 0.0, np.empty(0, np.uint8)
        for member in members:
            with self._lock:
                is_noted = self._rows[member.name] == member.shape[0]
                known = self._noted[member.name] if is_noted else self._known.get(member.name)
            if known is not None:
                most = max(most, known)
                continue
            for begin, end in cut(member, SLAB_BYTES):
                if buffer.nbytes < (needed := rows_bytes(member, end - begin)):
                    buffer = np.empty(needed, np.uint8)
                found = largest(self._source.read_rows(member, begin, end, buffer), member.logical_dtype)
                most = max(most, found) if math.isfinite(found) else math.nan
        dtypes = {member.logical_dtype for member in members}
        return Amax(most, dtypes.pop() if len(dtypes) == 1 else "F32")


def largest(rows: NDArray[Any], dtype: str) -> float:
    """Largest |w|; NaN or infinite when a weight is. BF16 rows are bit patterns, which without the sign are in order of |w|."""
    if dtype != "BF16":
        return float(np.abs(rows).max(initial=0))
    return bf16_value(largest_bits(rows.reshape(-1)))


def bf16_value(bits: int) -> float:
    """The number that has these BF16 bits."""
    return float((np.array([bits], np.uint32) << 16).view(np.float32)[0])
