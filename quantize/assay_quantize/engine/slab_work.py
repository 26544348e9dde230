"""What a worker does with one slab: read, compute, hand the result to the writer."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from assay.errors import QuantizeError
from assay.records.manifest import relative_error
from assay.records.plan import TensorPlan
from assay_quantize import kernels
from assay_quantize.checkpoint.calibrated_layers import CalibratedFiles
from assay_quantize.checkpoint.source_reader import STORAGE, SourceReader, rows_bytes
from assay_quantize.engine.ordered_writer import OrderedWriter, Result
from assay_quantize.formats.casting import cast_rows, count_not_finite
from assay_quantize.formats.schemes import module_of
from assay_quantize.kernels.rows import Kernels
from assay_quantize.plan.calibrated import constant_scale
from assay_quantize.plan.slabs import Slab, is_read_by_rows
from assay_quantize.storage.buffers import Pools, raw_bytes
from assay_quantize.storage.direct_file import BytesLike

if TYPE_CHECKING:
    from assay_quantize.checkpoint.importance import Importance  # safetensors takes time to import

Array = NDArray[Any]


OnSlab = Callable[[str, int, int, Array, Mapping[str, Array]], None]
"""`on_slab(weight, begin, end, rows, parts)`: rows [begin, end) as they were read, and what was made of them, in memory that is
used again when it returns. Called by worker threads."""


class ShardWork:
    """The work on the slabs of one shard; `do` may be called from many threads."""

    def __init__(
        self,
        reader: SourceReader,
        writer: OrderedWriter,
        kernels_used: Kernels,
        members: Mapping[str, Sequence[TensorPlan]],
        *,
        pools: Pools,
        observer: str,
        importance: Importance | None,
        scales: Mapping[str, float],
        allow_not_finite: bool,
        on_progress: Callable[[str, int], None] | None,
        on_slab: OnSlab | None = None,
        calibrated: CalibratedFiles | None = None,
    ) -> None:
        """scales: stored scale of activations or of the KV cache -> its value, where it is calibrated. calibrated: where
        tensors are taken from that a calibration made."""
        self.writer, self._kernels, self._scales, self._calibrated = writer, kernels_used, scales, calibrated
        self._reader, self._observer, self._on_progress = reader, observer, on_progress
        self._importance = importance if observer == "mse" else None
        self._pools, self._allow_not_finite, self._on_slab = pools, allow_not_finite, on_slab
        self.not_finite: Counter[str] = Counter()
        """Tensor that is copied or cast -> how many of its values are NaN or infinite, if that is allowed."""
        self._amax: dict[str, float] = defaultdict(float)
        self._rows_left = {key: sum(member.shape[0] for member in group) for key, group in members.items()}
        dtypes = {key: {member.logical_dtype for member in group} for key, group in members.items()}
        # one dtype for all members: the global scale is divided in it, and must come out equal
        self._amax_dtype = {key: min(of_group) if len(of_group) == 1 else "F32" for key, of_group in dtypes.items()}
        self._squares: dict[str, tuple[float, float]] = {}
        total_bytes = sum(reader.checkpoint.shards.values())
        # what will not stay in the page cache anyway should not push other things out of it
        self._drops_cache = total_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

    def do(self, index: int, slab: Slab, *, ahead: Slab | None) -> None:
        """Do unit `index`; `ahead` is one that will be done soon, to be read meanwhile."""
        self.writer.wait_for_room(index)
        if ahead is not None:
            self.will_need(ahead)
        tensor, count = slab.tensor, slab.end - slab.begin
        if slab.work == "add":
            (output,) = tensor.outputs
            scale = np.array([self._scales[output.name]], np.float32)
            self.writer.deliver(index, Result({output.name: raw_bytes(scale).data}, True, lambda: None))
            return
        buffer = self._pools.rows.take(rows_bytes(tensor, count) if is_read_by_rows(tensor) else count)
        if slab.work == "copy":
            result = self._copy(slab, buffer)
        elif slab.work == "cast":
            result = self._cast(slab, buffer)
        else:
            rows = self._reader.read_rows(tensor, slab.begin, slab.end, buffer)
            result = self._magnitude(slab, rows) if slab.work == "amax" else self._quantize(slab, rows)
        if slab.work != "copy":  # then it is the result
            self._pools.rows.give(buffer)
        self.writer.deliver(index, result)

    def will_need(self, slab: Slab) -> None:
        """Have what `do` reads for this slab read ahead."""
        if slab.work == "add":
            return
        self._reader.will_need(slab.tensor, *_stored_range(slab), through_cache=slab.amax_key is not None)

    def relative_errors(self) -> dict[str, float]:
        """Per quantized tensor ||dequantized - source|| / ||source||; to be called when all slabs are done."""
        return {name: relative_error(*squares) for name, squares in self._squares.items()}

    # -------------------------------------------------------------------------------------------- kinds of work
    def _smoothed(self, slab: Slab, calibrated: CalibratedFiles) -> Result:
        """The whole of what a calibration changed that is not quantized, with the last slab of the source's."""
        (output,) = slab.tensor.outputs
        data = calibrated.whole(output).data if slab.is_last else memoryview(b"")
        return Result({output.name: data}, False, lambda: self._report(slab))

    def _copy(self, slab: Slab, buffer: NDArray[np.uint8]) -> Result:
        if self._calibrated is not None and self._calibrated.has(slab.tensor):
            self._pools.rows.give(buffer)
            return self._smoothed(slab, self._calibrated)
        data = self._reader.read_bytes(slab.tensor, slab.begin, slab.end, buffer)
        num_odd = self._count_not_finite(slab, np.frombuffer(data, np.uint8), slab.tensor.dtype)

        def written() -> None:
            self.not_finite[slab.tensor.name] += num_odd
            self._pools.rows.give(buffer)
            self._report(slab)

        return Result({slab.tensor.outputs[0].name: data}, True, written)

    def _cast(self, slab: Slab, buffer: NDArray[np.uint8]) -> Result:
        tensor, (output,) = slab.tensor, slab.tensor.outputs
        if self._calibrated is not None and self._calibrated.has(tensor):
            return self._smoothed(slab, self._calibrated)
        if is_read_by_rows(tensor):
            values = self._reader.read_rows(tensor, slab.begin, slab.end, buffer)
        else:
            self._reader.read_bytes(tensor, slab.begin, slab.end, buffer)
            values = buffer[: slab.end - slab.begin].view(STORAGE[tensor.dtype])
        num_odd = self._count_not_finite(slab, values, tensor.logical_dtype)
        made = cast_rows(values, tensor.logical_dtype, output.dtype, output.name)
        data = raw_bytes(made.copy() if made is values else made).data

        def written() -> None:
            self.not_finite[tensor.name] += num_odd
            self._report(slab)

        return Result({output.name: data}, False, written)

    def _count_not_finite(self, slab: Slab, values: Array, dtype: str) -> int:
        """NaN and infinity among `values`; QuantizeError if there are some and nobody has allowed them."""
        count = count_not_finite(values, dtype)
        if count and not self._allow_not_finite:
            at_least = "" if slab.is_first and slab.is_last else "at least "
            raise QuantizeError(
                f"{slab.tensor.name}: {at_least}{count} of its values are NaN or infinite; the source is damaged: take another "
                "copy, or say --allow-not-finite to have them copied as they are"
            )
        return count

    def _magnitude(self, slab: Slab, rows: Array) -> Result:
        key = slab.amax_key
        assert key is not None
        amax = kernels.amax_rows(rows, slab.tensor.logical_dtype)
        if not math.isfinite(amax):
            raise _not_finite(slab, rows)

        def add() -> None:
            self._amax[key] = max(self._amax[key], amax)
            self._rows_left[key] -= slab.end - slab.begin

        self.writer.announce(add)
        return Result({}, False, lambda: None)

    def _quantize(self, slab: Slab, rows: Array) -> Result:
        tensor, key = slab.tensor, slab.amax_key
        assert tensor.scheme is not None
        if self._calibrated is not None and self._calibrated.has(tensor):
            return self._calibrated_rows(slab, rows, self._calibrated)
        if key is not None:
            self.writer.wait_until(lambda: self._rows_left[key] == 0)
        importance = None if self._importance is None else self._importance.for_weight(tensor.name, tensor.shape[1])
        memory = self._pools.codes.take(rows.size)
        made = kernels.quantize_rows(
            rows,
            tensor.logical_dtype,
            tensor.scheme,
            amax=None if key is None else self._amax[key],
            amax_dtype=tensor.logical_dtype if key is None else self._amax_dtype[key],
            observer=self._observer,
            importance_I=importance,
            kernels=self._kernels,
            memory=memory,
        )
        if not math.isfinite(made.squared_norm):
            raise _not_finite(slab, rows)
        if not math.isfinite(made.squared_error):
            raise QuantizeError(
                f"{tensor.name}: its scales do not fit {tensor.logical_dtype}; quantize from a BF16 or FP32 source"
            )
        if self._on_slab is not None:
            self._on_slab(tensor.name, slab.begin, slab.end, rows, made.parts)

        def written() -> None:
            self._add_errors(slab, made.squared_error, made.squared_norm)
            self._pools.codes.give(memory)

        return Result(_output_parts(slab, made.parts, self._scales), True, written)

    def _calibrated_rows(self, slab: Slab, rows: Array, calibrated: CalibratedFiles) -> Result:
        """Rows as a calibration left them, and how far they are from the source."""
        tensor = slab.tensor
        assert tensor.scheme is not None
        parts = calibrated.rows(tensor, slab.begin, slab.end)
        if calibrated.is_smoothed:
            return Result(_output_parts(slab, parts, self._scales), False, lambda: self._report(slab))
        errors = kernels.error_rows(parts, rows, tensor.logical_dtype, tensor.scheme)

        return Result(
            _output_parts(slab, parts, self._scales),
            False,
            lambda: self._add_errors(slab, errors.squared_error, errors.squared_norm),
        )

    def _add_errors(self, slab: Slab, squared_error: float, squared_norm: float) -> None:
        error, norm = self._squares.get(slab.tensor.name, (0.0, 0.0))
        self._squares[slab.tensor.name] = error + squared_error, norm + squared_norm
        self._report(slab)

    def _report(self, slab: Slab) -> None:
        if self._on_progress is not None:
            self._on_progress(slab.tensor.name, _stored_range(slab)[1] - _stored_range(slab)[0])
        if self._drops_cache:
            self._reader.done_with(slab.tensor, *_stored_range(slab))


def _stored_range(slab: Slab) -> tuple[int, int]:
    """Bytes [begin, end) of the stored tensor."""
    if not is_read_by_rows(slab.tensor):
        return slab.begin, slab.end
    per_row = slab.tensor.num_bytes // slab.tensor.shape[0]
    return slab.begin * per_row, slab.end * per_row


def _output_parts(slab: Slab, parts: Mapping[str, Array], scales: Mapping[str, float]) -> dict[str, BytesLike]:
    """Local names to full ones; what has no rows (a scale of the whole weight, its shape) is written with the first slab."""
    tensor, module = slab.tensor, module_of(slab.tensor.name)
    planned = {output.name: output for output in tensor.outputs}
    made = {f"{module}.{part}": value for part, value in parts.items()}
    if f"{module}.weight_shape" in planned:
        made[f"{module}.weight_shape"] = np.array(tensor.shape, np.int64)
    for name in planned.keys() - made.keys():
        if (scale := scales.get(name, constant_scale(tensor, name))) is not None:
            made[name] = np.array([scale], np.float32)
    assert made.keys() == planned.keys(), f"{tensor.name}: made {sorted(made)}, planned {sorted(planned)}"
    data: dict[str, BytesLike] = {}
    for name, value in made.items():
        output = planned[name]
        has_rows = len(output.shape) == 2
        shapes = (value.shape[1:], output.shape[1:]) if has_rows else (value.shape, output.shape)
        assert value.dtype == STORAGE[output.dtype] and shapes[0] == shapes[1], f"{name}: {value.dtype} {value.shape}, {output}"
        if slab.is_first or has_rows:
            data[name] = raw_bytes(value).data
    return data


def _not_finite(slab: Slab, rows: Array) -> QuantizeError:
    tensor = slab.tensor
    count = count_not_finite(rows, tensor.logical_dtype)
    where = "" if slab.is_first and slab.is_last else f" in rows {slab.begin} to {slab.end - 1}"
    return QuantizeError(f"{tensor.name}: {count} of {rows.size} weights{where} are NaN or infinite; the source is damaged")
