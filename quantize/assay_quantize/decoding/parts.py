"""Parts of a weight from the headers of its module: which shapes go together. No torch."""

from __future__ import annotations

import math
from fractions import Fraction

from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.decoding.stored_weight import Module, NotRead, Part

FLOATS = ("BF16", "F16", "F32")
EXPONENTS = ("U8", "F8_E8M0")
FP8 = {"F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2"}


def needed(module: Module, leaf: str, dtypes: tuple[str, ...], num_dimensions: int | None = None) -> TensorHeader:
    """A tensor of a module. NotRead: it is not there, or has another dtype or rank."""
    header = module.get(leaf)
    if header is None:
        raise NotRead(f"has no {leaf}")
    if header.dtype not in dtypes:
        raise NotRead(f"has {leaf} of dtype {header.dtype}; {' or '.join(dtypes)} is read")
    if num_dimensions is not None and len(header.shape) != num_dimensions:
        raise NotRead(f"has {leaf} of shape {list(header.shape)}; {num_dimensions} dimensions are read")
    return header


def of_shape(header: TensorHeader, shape: tuple[int, ...], axis: int | None = 0, per_row: Fraction = Fraction(1)) -> Part:
    """A part that must have this shape. NotRead: it has another."""
    if header.shape != shape:
        raise NotRead(f"has {header.name.rpartition('.')[2]} of shape {list(header.shape)}; {list(shape)} is read")
    return Part(header, axis, per_row)


def whole(header: TensorHeader) -> Part:
    """A part that belongs to all rows."""
    return Part(header, None)


def scale_part(
    header: TensorHeader, shape: tuple[int, int], block: tuple[int, int]
) -> tuple[Part, tuple[int, int]]:  # fmt: skip
    """The part of scales of a weight, and (rows, columns) that share one.

    block: (rows, columns) that share a scale by config.json. Read are scales per block [ceil(O/rows), ceil(I/columns)], per row
    [O] or [O, 1], for all [] or [1], per group of a row [O, G], and blocks in four dimensions [a, 1, b, 1] (ModelOpt).
    NotRead: any other shape.
    """
    rows, columns = shape
    stored = header.shape
    if len(stored) == 4 and stored[1] == stored[3] == 1:
        stored = (stored[0], stored[2])
    if stored == (math.ceil(rows / block[0]), math.ceil(columns / block[1])):
        return Part(header._replace(shape=stored), 0, Fraction(1, block[0])), block
    if math.prod(stored) == 1:
        return whole(header._replace(shape=(1, 1))), shape
    if stored in ((rows,), (rows, 1)):
        return Part(header._replace(shape=(rows, 1))), (1, columns)
    if len(stored) == 2 and stored[0] == rows and columns % stored[1] == 0:
        return Part(header), (1, columns // stored[1])
    fits = f"neither {block[0]} x {block[1]} blocks of a weight {list(shape)}, nor its rows, nor all of it"
    raise NotRead(f"has {header.name.rpartition('.')[2]} of shape {list(header.shape)}, which fits {fits}")
