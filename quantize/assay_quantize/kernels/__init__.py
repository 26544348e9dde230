"""Round and pack rows of a weight, and measure the error: the one place that knows how each scheme is computed.

Two sets of kernels with bit-identical parts: `reference` is the definition, in torch (reference.py); `fused` makes one pass
over the rows in numba, releases the GIL and needs no torch (fused_*.py).

In: rows of a weight, the name of a scheme. Out: packed rows, sums of error and norm. Reads and writes no file. May import
formats and storage.
"""

from __future__ import annotations

import math
from typing import Any

from assay_quantize.formats.schemes import SCHEMES, SHARES_GLOBAL_SCALE, Scheme
from assay_quantize.kernels.rows import Array, Kernels, QuantizedRows, RowErrors, check_rows

__all__ = ["QuantizedRows", "RowErrors", "amax_rows", "error_rows", "needs_amax", "quantize_rows", "row_multiple"]


def row_multiple(scheme: str) -> int:
    """A slab's rows must be a multiple of this; the last slab of a weight may be ragged."""
    row = SCHEMES[scheme]
    if row.layout == "int4" and not row.symmetric:
        return 8  # eight rows' zero points share one int32
    return row.block_rows


def needs_amax(scheme: str) -> bool:
    """Whether `quantize_rows` must be given the largest |w| of the fused group, or of the weight where it is alone."""
    return scheme in SHARES_GLOBAL_SCALE


def amax_rows(w_OI: Array, dtype: str) -> float:
    """Largest |w| of the rows; NaN when a weight is NaN or infinite."""
    from assay_quantize.kernels.bits import kernel_view
    from assay_quantize.kernels.fused_fp8 import largest_magnitude

    check_rows(w_OI, dtype)
    amax = float(largest_magnitude(kernel_view(w_OI)))
    return amax if math.isfinite(amax) else math.nan


def quantize_rows(
    w_OI: Array,
    dtype: str,
    scheme: str,
    *,
    amax: float | None = None,
    amax_dtype: str | None = None,
    observer: str = "minmax",
    importance_I: Array | None = None,
    kernels: Kernels = "fused",
    memory: Array | None = None,
) -> QuantizedRows:
    """The stored parts of a range of rows, with the sums of error and norm.

    w_OI: rows of the weight in storage form (rows.py), `row_multiple` of them unless they are the last.
    amax: where `needs_amax`: the largest |w| of the group or weight, a float that `amax_dtype` holds exactly.
    amax_dtype: dtype in which the global scale is divided; default: that of the weight. Members of a fused group whose dtypes
        differ are all given F32, so that their scales come out equal.
    observer: `minmax`, or `mse`: scales searched for the least squared error (search_reference.py says which).
    importance_I: FP32, one for each column, finite and >= 0: what the search multiplies squared errors with (importance.py).
    memory: flat, uint8, of at least a byte for each weight: where the fused kernels put the codes, instead of new memory.
    Whatever the slabs, the rows' parts are the same. A weight that is not finite shows in `squared_norm`.
    """
    check_rows(w_OI, dtype)
    assert observer in ("minmax", "mse") and (importance_I is None or observer == "mse"), observer
    assert (amax is not None) == needs_amax(scheme), f"{scheme}: amax={amax}"
    row = SCHEMES[scheme]
    if kernels == "reference":
        from assay_quantize.kernels import reference

        return reference.quantize_rows(
            w_OI, dtype, scheme, amax=amax, amax_dtype=amax_dtype, observer=observer, importance_I=importance_I
        )
    chosen = None
    if observer == "mse":
        from assay_quantize.kernels import search_fused

        chosen = search_fused.search_scales(w_OI, row, importance_I, amax=amax, amax_dtype=amax_dtype or dtype)
    made: QuantizedRows = _fused(row).quantize_rows(w_OI, row, chosen, memory, amax=amax, amax_dtype=amax_dtype or dtype)
    return made


def _fused(row: Scheme) -> Any:
    """The module of the fused kernels of a scheme; numba takes a second to import."""
    from assay_quantize.kernels import fused_fp4, fused_fp8, fused_int

    if row.layout in ("nvfp4", "mxfp4", "mxfp8"):
        return fused_fp4
    return fused_fp8 if row.weight_dtype == "F8_E4M3" else fused_int


def error_rows(parts: dict[str, Array], w_OI: Array, dtype: str, scheme: str, *, kernels: Kernels = "fused") -> RowErrors:
    """How far the stored parts of a range of rows are from the rows of the source they were made from.

    Dequantized as compressed-tensors does, rounding included. parts: as `quantize_rows` returns them.
    """
    check_rows(w_OI, dtype)
    if kernels == "reference":
        from assay_quantize.kernels import reference

        return reference.error_rows(parts, w_OI, dtype, scheme)
    errors: RowErrors = _fused(SCHEMES[scheme]).error_rows(parts, w_OI, SCHEMES[scheme])
    return errors
