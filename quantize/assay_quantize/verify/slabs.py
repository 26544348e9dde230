"""One slab of a quantized checkpoint against the same rows of its source: what a worker thread of `verify` does.

Every byte is compared with the source: copies as they are, casts by torch, quantized rows twice. Kernels that are used nowhere
else (`codes.py`) say whether codes and scales are right; then the engine's kernels make them once more, which says how many
bytes differ and sums up errors. A quick look ends after the first of the two where that finds nothing (what was judged as it
was made does not come here: `judged.py`). What the first do not cover is made by the engine's kernels alone (`definition.py`
holds tiles of all weights against the definition in torch).

A slab is a range of rows (or of bytes, for what was copied) of about 4 MiB of the source. Files are read with `preadv` into
buffers that a thread keeps, never mapped, so memory is a few slabs per worker, whatever the size of a shard or tensor.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assay.errors import QuantizeError
from assay.records.plan import OutputTensor, TensorPlan
from assay_quantize.checkpoint.source_reader import STORAGE, rows_bytes
from assay_quantize.checkpoint.torch_tensors import TORCH_DTYPES
from assay_quantize.formats.schemes import DTYPE_BYTES, INPUT_LEAVES, PART_LEAVES, module_of
from assay_quantize.kernels import RowErrors, error_rows, quantize_rows
from assay_quantize.plan.calibrated import constant_scale
from assay_quantize.plan.slabs import is_read_by_rows
from assay_quantize.storage.buffers import raw_bytes
from assay_quantize.storage.past_cache import Loans
from assay_quantize.verify.codes import is_what_rounding_gives
from assay_quantize.verify.files import StoredReader, has_rows, rows_of_part
from assay_quantize.verify.findings import ScaleCounts, SlabFindings
from assay_quantize.verify.original import Original

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
SCALES = ("weight_scale", "weight_global_scale")


class Scratch(threading.local):
    """Buffers of one thread, by purpose; they grow to what was needed most."""

    def __init__(self) -> None:
        self._buffers: dict[str, Bytes] = {}

    def take(self, purpose: str, num_bytes: int) -> Bytes:
        """A buffer of at least `num_bytes`, with what was in it before; zeros when it is new."""
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.nbytes < num_bytes:
            buffer = self._buffers[purpose] = np.zeros(num_bytes, np.uint8)
        return buffer


class SlabChecks:
    """Compares slabs of a checkpoint with its source; safe to use from many threads at once.

    original: None: only what can be seen without the source is checked.
    """

    def __init__(
        self,
        stored: StoredReader,
        original: Original | None,
        *,
        is_quick: bool = False,
        scales: Mapping[str, float] | None = None,
        signed: frozenset[str] = frozenset(),
    ) -> None:
        """scales: what the calibration file makes of every static scale; None: it was not given. is_quick: of weights whose
        bytes are right no errors are summed up, and a group's largest weight is only noted: the caller compares the global
        scales against it afterwards. signed: weights whose scales may be negative."""
        self._reader, self._original, self._is_quick, self._scales = stored, original, is_quick, scales
        self._signed = signed
        self._scratch, self._loans = Scratch(), Loans()

    def look(self, tensor: TensorPlan, begin: int, end: int) -> SlabFindings:
        """Compare slab [begin, end) of a tensor (`slabs.cut`). CheckpointError when a file cannot be read."""
        try:
            if tensor.action == "quantize":
                return self._quantized(tensor, begin, end)
            if tensor.action == "add":
                return SlabFindings(problem=self._static_problem(tensor, tensor.outputs[0]))
            return self._kept(tensor, begin, end)
        except QuantizeError as problem:  # a cast that does not fit
            return SlabFindings(problem=str(problem))
        finally:
            self._loans.give_back()

    def will_need(self, tensor: TensorPlan, begin: int, end: int) -> None:
        """Have what `look` reads of this slab read ahead: of the source, and of the output that is almost all of it."""
        if tensor.action == "add" or (self._original is not None and tensor.name in self._original.calibrated):
            return
        if self._original is not None:
            per_row = tensor.num_bytes // tensor.shape[0] if is_read_by_rows(tensor) else 1
            self._original.reader.will_need(tensor, begin * per_row, end * per_row, past_cache=self._is_quick)
        if is_read_by_rows(tensor):
            output = max(tensor.outputs, key=lambda output: output.num_bytes)
            if output.shape[0] == tensor.shape[0]:
                per_row = output.num_bytes // output.shape[0]
                self._reader.will_need(output.name, begin * per_row, end * per_row)
        elif tensor.action == "keep":
            self._reader.will_need(tensor.outputs[0].name, begin, end)

    # ------------------------------------------------------------------------------------------------ kept
    def _kept(self, tensor: TensorPlan, begin: int, end: int) -> SlabFindings:
        """Bytes as they were, cast, or dequantized: exactly what the source says they are."""
        (output,) = tensor.outputs
        scales = {}
        stored: Bytes
        if tensor.action == "keep":
            stored = self._stored(output, begin, end)
        elif is_read_by_rows(tensor):
            stored = self._stored_rows(output, begin, end).reshape(-1).view(np.uint8)
        else:
            size, source_size = DTYPE_BYTES[output.dtype], DTYPE_BYTES[tensor.dtype]
            stored = self._stored(output, begin // source_size * size, end // source_size * size)
        if output.name.endswith(".weight_scale") and (output.dtype in _SCALE_BITS or output.dtype == "U8"):
            scales["weight_scale"] = count_bad_scales(stored.view(STORAGE[output.dtype]), output.dtype)
        if self._original is None or tensor.name in self._original.calibrated:  # verify/calibrated/ looks at these
            return SlabFindings(scales=scales)
        if is_read_by_rows(tensor):
            buffer = self._scratch.take("source", rows_bytes(tensor, end - begin))
            values = self._original.reader.read_rows(tensor, begin, end, buffer).reshape(-1).view(np.uint8)
            expected = cast_by_torch(values, tensor.logical_dtype, output.dtype, output.name)
        else:
            buffer = self._scratch.take("source", end - begin)
            expected = np.frombuffer(self._original.reader.read_bytes(tensor, begin, end, buffer), np.uint8)
            if tensor.action != "keep":
                expected = cast_by_torch(expected, tensor.dtype, output.dtype, output.name)
        return SlabFindings(+Counter({output.name: count_differing(stored, expected)}), scales=scales)

    # ------------------------------------------------------------------------------------------------ quantized
    def _quantized(self, tensor: TensorPlan, begin: int, end: int) -> SlabFindings:
        assert tensor.scheme is not None
        dtype = tensor.logical_dtype
        outputs, shape, problem = self._constants(tensor, begin)
        if problem is not None:
            return SlabFindings(problem=problem)
        is_calibrated = self._original is not None and tensor.name in self._original.calibrated
        read = {part: output for part, output in outputs.items() if part in SCALES or not is_calibrated}
        parts = {part: self._part_rows(tensor, part, output, begin, end) for part, output in read.items()}
        has_scale = [part for part in SCALES if part in parts and (begin == 0 or has_rows(outputs[part]))]
        if self._original is not None and not is_calibrated:
            buffer = self._scratch.take("source", rows_bytes(tensor, end - begin))
            rows = self._original.reader.read_rows(tensor, begin, end, buffer, self._loans)
            is_right = self._is_right(self._original, tensor, parts, rows)
            if is_right and self._is_quick:
                if "weight_global_scale" in parts:
                    self._original.amax.note(tensor, rows)
                return SlabFindings(Counter(), scales=dict.fromkeys(has_scale, ScaleCounts(0, 0, 0)), shape=shape)
        scales = {part: count_bad_scales(parts[part], outputs[part].dtype) for part in has_scale}
        if tensor.name in self._signed:
            scales = {part: counts._replace(negative=0) for part, counts in scales.items()}
        if is_calibrated:
            return SlabFindings(scales=scales, shape=shape)  # verify/calibrated/ compares it with the source
        if self._original is not None:
            # errors: of this rounding where all bytes are equal, else of what is stored
            result, amax = SlabFindings(scales=scales, shape=shape), self._original.amax.of(tensor)
            if not self._original.recomputes:
                return replace(result, errors=error_rows(parts, rows, dtype, tensor.scheme))
            if amax is not None and not math.isfinite(amax.value):
                return replace(result, problem="its source, or a weight fused with it, has weights that are NaN or infinite")
            made = quantize_rows(
                rows,
                dtype,
                tensor.scheme,
                amax=None if amax is None else amax.value,
                amax_dtype=None if amax is None else amax.dtype,
                observer=self._original.observer,
                importance_I=self._original.importance_of(tensor),
                memory=self._scratch.take("codes", rows.size),
            )
            if not math.isfinite(made.squared_norm):
                return replace(result, problem="its source has weights that are NaN or infinite")
            counts = {
                f"{module_of(tensor.name)}.{part}": count_differing(raw_bytes(parts[part]), raw_bytes(value))
                for part, value in made.parts.items()
                if begin == 0 or value.ndim == 2  # a scale of the whole weight is compared once
            }
            differing = +Counter(counts)  # without zeros
            if differing:
                return replace(result, differing=differing, errors=error_rows(parts, rows, dtype, tensor.scheme))
            if is_right is False:
                return replace(result, problem="its kernels make these bytes again, but they are not what its scheme gives")
            return replace(result, differing=differing, errors=RowErrors(made.squared_error, made.squared_norm, 0))
        # dequantized weights are looked at for NaN and infinity; compared with zeros, which nobody reads
        num_bytes = rows_bytes(tensor, end - begin)
        zeros = self._scratch.take("zeros", num_bytes)[:num_bytes]
        rows = zeros.view(STORAGE[dtype]).reshape(end - begin, *tensor.shape[1:])
        return SlabFindings(scales=scales, shape=shape, errors=error_rows(parts, rows, dtype, tensor.scheme))

    def _constants(
        self, tensor: TensorPlan, begin: int
    ) -> tuple[dict[str, OutputTensor], tuple[int, ...] | None, str | None]:  # fmt: skip
        """What the weights have no part in, looked at with the first slab: the other outputs, by local name; what
        `weight_shape` says; what is wrong."""
        assert tensor.scheme is not None
        outputs = {output.name.removeprefix(f"{module_of(tensor.name)}."): output for output in tensor.outputs}
        shape = None
        if (stored_shape := outputs.pop("weight_shape", None)) is not None and begin == 0:
            shape = tuple(self._stored(stored_shape, 0, stored_shape.num_bytes).view(np.int64).tolist())
        problem = None
        for leaf in INPUT_LEAVES:
            if (of_inputs := outputs.pop(leaf, None)) is not None and begin == 0:
                problem = problem or self._static_problem(tensor, of_inputs)
        return outputs, shape, problem

    def _static_problem(self, tensor: TensorPlan, output: OutputTensor) -> str | None:
        (stored,) = self._stored(output, 0, output.num_bytes).view(np.float32).tolist()
        return static_problem(tensor, output.name, stored, self._scales)

    def _is_right(self, original: Original, tensor: TensorPlan, parts: dict[str, Array], rows: Array) -> bool | None:
        """Whether the parts are what the rows give, by kernels of verification's own; None: they cannot say."""
        assert tensor.scheme is not None
        if not original.can_make(tensor) or original.observer != "minmax":
            return None
        global_scale = None
        if "weight_global_scale" in parts:
            if self._is_quick:
                (global_scale,) = parts["weight_global_scale"].tolist()
            elif (amax := original.amax.of(tensor)) is not None and math.isfinite(amax.value):
                global_scale = amax.global_scale()
        return is_what_rounding_gives(parts, rows, tensor.logical_dtype, tensor.scheme, global_scale=global_scale)

    def _part_rows(self, tensor: TensorPlan, part: str, output: OutputTensor, begin: int, end: int) -> Array:
        """The rows of a stored part that belong to rows [begin, end) of the weight; all of it where it has no rows."""
        assert tensor.scheme is not None
        if not has_rows(output):
            whole: Array = self._stored(output, 0, output.num_bytes).view(STORAGE[output.dtype]).reshape(output.shape)
            return whole
        return self._stored_rows(output, *rows_of_part(tensor.scheme, part, begin, end))

    # ------------------------------------------------------------------------------------------------ reading
    def _stored_rows(self, output: OutputTensor, begin: int, end: int) -> Array:
        per_row = output.num_bytes // output.shape[0]
        raw = self._stored(output, begin * per_row, end * per_row)
        rows: Array = raw.view(STORAGE[output.dtype]).reshape(end - begin, *output.shape[1:])
        return rows

    def _stored(self, output: OutputTensor, begin: int, end: int) -> Bytes:
        """Bytes [begin, end) of a tensor of the checkpoint that is verified; a view of this thread's buffer for it."""
        leaf = output.name.rpartition(".")[2]
        purpose = leaf if leaf in PART_LEAVES else "stored"
        return self._reader.read(output.name, begin, end, self._scratch.take(purpose, end - begin), self._loans)


def static_problem(tensor: TensorPlan, name: str, stored: float, scales: Mapping[str, float] | None) -> str | None:
    """What is wrong with a scale that does not come from the source: it is not what the calibration file makes of it, or not
    the constant of its scheme; where the file is not at hand, it is no scale.

    name: of the output. scales: output -> its scale by the calibration file; None: it is not at hand.
    """
    leaf = name.rpartition(".")[2]
    if scales is None:
        fits = math.isfinite(stored) and stored > 0
        return None if fits else f"its {leaf} is {stored:g}; a scale is above 0, and finite"
    if (calibrated := scales.get(name)) is not None:
        return None if stored == calibrated else f"its {leaf} is {stored:g}; the calibration file makes it {calibrated:g}"
    constant = constant_scale(tensor, name)
    return None if stored == constant else f"its {leaf} is {stored:g}; scheme {tensor.scheme} stores {constant:g}"


def cast_by_torch(values: Bytes, dtype: str, output_dtype: str, name: str) -> Bytes:
    """Bytes of `values` in another dtype, as torch rounds them; NaN as the one that the engine writes.

    name: the tensor, for the error. Raises QuantizeError where a finite number would become infinite.
    """
    if dtype == output_dtype:
        return values
    stored = torch.from_numpy(values).view(TORCH_DTYPES[dtype])
    made = stored.to(TORCH_DTYPES[output_dtype])
    if output_dtype == "BF16":
        if bool((made.isinf() & stored.float().isfinite()).any()):
            raise QuantizeError(f"{name}: some values of the source do not fit {output_dtype}")
        made.masked_fill_(made.isnan(), torch.nan)
    raw: Bytes = made.view(torch.uint8).numpy()
    return raw


def count_differing(left: Bytes, right: Bytes) -> int:
    """Bytes in which two buffers of the same length differ."""
    assert left.shape == right.shape, f"{left.shape} and {right.shape}"
    whole = left.size // 8 * 8
    if np.array_equal(left[:whole].view(np.uint64), right[:whole].view(np.uint64)) and np.array_equal(
        left[whole:], right[whole:]
    ):
        return 0
    return int(np.count_nonzero(left != right))


def count_bad_scales(scale: Array, dtype: str) -> ScaleCounts:
    """Scales that are NaN or infinite, zero, or negative, from their bit patterns. U8: power-of-two exponents; 255 is NaN."""
    if dtype == "U8":
        return ScaleCounts(int(np.count_nonzero(scale == 255)), 0, 0)
    integer, magnitude, non_finite = _SCALE_BITS[dtype]
    bits = scale.reshape(-1).view(integer)
    sizes = bits & magnitude
    return ScaleCounts(*(int(np.count_nonzero(is_bad)) for is_bad in (sizes >= non_finite, sizes == 0, bits > magnitude)))


_SCALE_BITS: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F32": (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
}
"""dtype -> (its integer type, mask of all but the sign, least pattern that is infinite or NaN)."""
