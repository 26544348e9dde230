"""A tile of quantized weights against the definition in torch, by code that the engine does not use.

The tile is read at the offsets of the safetensors library, its scheme is what compressed-tensors finds for the module in
config.json, its codes are decompressed by compressed-tensors' decompressor, and it is rounded again by its functions
(`kernels/reference.py`, from presets). All of it would take 10 to 100 times as long as the fused kernels, so it is a tile:
eight rows (a block where blocks share a scale) of at most 1,024 columns (whole rows where they share one), drawn by the name.
Every weight has one, of routed experts one in eight: a tile takes as long as 10 MB of the fused kernels.

Still shared with the engine: the reading of sources in FP8, FP4 or INT4 and of fused experts (`SourceReader`), the names of
outputs, which weights share a global scale, and `formats/schemes.py` inside the reference, whose meaning `config.py` checks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from assay.foreign_text import shown
from assay.records.plan import TensorPlan
from assay_quantize.checkpoint.headers import TensorHeader
from assay_quantize.checkpoint.torch_tensors import TORCH_DTYPES
from assay_quantize.formats.schemes import INPUT_LEAVES, module_of
from assay_quantize.kernels.reference import quantize_weight
from assay_quantize.verify.config import Groups, group_for
from assay_quantize.verify.files import StoredReader
from assay_quantize.verify.original import Original

TILE_COLUMNS = 1024
EXPERTS_PER_TILE = 8
LEAST_ROWS = 8
"""As many have their zero points in one int32."""


LEAVES = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_global_scale")


class Tile(NamedTuple):
    """Rows [top, bottom) and columns [left, right) of a weight."""

    top: int
    bottom: int
    left: int
    right: int


class _OtherShape(Exception):
    """What is stored is not what a config group reads; in words."""


class Definition:
    """Looks at tiles; safe to use from many threads at once."""

    def __init__(
        self, stored: StoredReader, headers: Mapping[str, TensorHeader], original: Original, groups: Groups
    ) -> None:  # fmt: skip
        """headers: of the checkpoint, by the safetensors library. groups: of its config.json."""
        self._stored, self._headers, self._original, self._groups = stored, headers, original, groups

    def has_tile(self, tensor: TensorPlan) -> bool:
        """Of routed experts, which the kernels and the planner treat alike, one in eight; of all other weights each."""
        return tensor.part != "routed_expert" or zlib.crc32(tensor.name.encode()) % EXPERTS_PER_TILE == 0

    def problem(self, tensor: TensorPlan) -> str | None:
        """What is wrong with a tile of a quantized weight; None: it is what the definition makes of the source.

        CheckpointError when a file cannot be read.
        """
        assert tensor.scheme is not None
        group = group_for(module_of(tensor.name), self._groups)
        if group is None or group.weights is None or group.format is None:
            return "no config group of config.json has it for a target"
        block = group.weights.block_structure
        shares = (block[0], block[1]) if block else (1, group.weights.group_size or tensor.shape[1])
        tile = tile_of(tensor.name, tensor.shape, max(shares[0], LEAST_ROWS), math.lcm(shares[1], 8))
        try:
            parts = self._parts(module_of(tensor.name), tile, shares)
        except KeyError as missing:
            return f"its {missing.args[0]} is in no shard"
        except _OtherShape as problem:
            return str(problem)
        if self._original.is_plain(tensor):
            rows = rows_of(self._original.plain, self._original.headers[tensor.name], tile.top, tile.bottom)
        else:
            read_rows = self._original.reader.read_rows(tensor, tile.top, tile.bottom)
            rows = torch.from_numpy(read_rows).view(TORCH_DTYPES[tensor.logical_dtype])
        w_OI = rows[:, tile.left : tile.right]
        where = f"rows {tile.top} to {tile.bottom - 1}, columns {tile.left} to {tile.right - 1}"
        with torch.no_grad():
            try:
                read = BaseCompressor.get_value_from_registry(group.format).decompress(dict(parts), group)["weight"]
            except (LookupError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as problem:
                if isinstance(problem, KeyError) and problem.args[0] in LEAVES:
                    return self._not_as_its_group_reads(module_of(tensor.name), problem.args[0], group)
                reason = shown(" ".join(str(problem).split()) or type(problem).__name__)
                return f"{where}: compressed-tensors cannot decompress it: {reason}"
            if read.shape != w_OI.shape:
                return f"{where}: decompressed, it has shape {list(read.shape)}, not {list(w_OI.shape)}"
            if not self._original.can_make(tensor):
                return None if bool(read.isfinite().all()) else f"{where}: decompressed, it is not finite"
            amax, importance = self._original.amax.of(tensor), self._original.importance_of(tensor)
            made = quantize_weight(
                w_OI,
                tensor.scheme,
                global_scale_amax=None if amax is None else amax.tensor(),
                observer=self._original.observer,
                importance_I=None if importance is None else torch.tensor(importance[tile.left : tile.right]),
            )
            made = {part: value for part, value in made.items() if part not in ("weight_shape", *INPUT_LEAVES)}
            if (wrong := next((part for part in made if not _equal(parts.get(part), made[part])), None)) is not None:
                error = float((read.double() - w_OI.double()).norm() / w_OI.double().norm().clamp_min(1e-30))
                return f"{where}: its {wrong} is not what the definition gives; decompressed, it is {error:.3f} away"
        return None

    def _not_as_its_group_reads(self, module: str, leaf: str, group: QuantizationScheme) -> str:
        """That config.json has a module in a group of a format in which it is not stored. leaf: what that format reads."""
        stored = [header for leaf in LEAVES if (header := self._headers.get(f"{module}.{leaf}")) is not None]
        name = next(name for name, other in self._groups.items() if other is group)
        form = CompressionFormat(group.format).value  # which the group holds as a string or as a member
        return (
            f"config.json has it in {name} ({form}), which reads {module}.{leaf}; {stored[0].shard} has no such "
            f"tensor, only {', '.join(header.name.rpartition('.')[2] for header in stored)}; put back the config.json that "
            "`assay quantize` wrote, or quantize again into another folder"
        )

    def _parts(self, module: str, tile: Tile, shares: tuple[int, int]) -> dict[str, Tensor]:
        """Local name -> the part of it that belongs to the tile. KeyError: the codes or their scales are not there.
        _OtherShape: they are too small for what config.json says of them.

        shares: rows and columns that share a scale.
        """
        headers = {leaf: h for leaf in LEAVES if (h := self._headers.get(f"{module}.{leaf}")) is not None}
        codes = "weight_packed" if "weight_packed" in headers else "weight"
        num_codes = {"I32": 8, "U8": 2}.get(headers[codes].dtype, 1)
        # rows and columns of the weight that one element of a part stands for
        stands_for = {codes: (1, num_codes), "weight_scale": shares, "weight_zero_point": (LEAST_ROWS, shares[1])}
        parts = {}
        for leaf, header in {"weight_scale": headers["weight_scale"], **headers}.items():
            if leaf not in stands_for:
                parts[leaf] = rows_of(self._stored, header, 0, header.shape[0])
                continue
            height, width = stands_for[leaf]
            needed = -(-tile.bottom // height), -(-tile.right // width)
            if len(header.shape) != 2 or header.shape[0] < needed[0] or header.shape[1] < needed[1]:
                raise _OtherShape(
                    f"its {leaf} has shape {list(header.shape)}; by its config group one element of it is for {height} rows "
                    f"and {width} columns, so at least {list(needed)} are needed"
                )
            rows = rows_of(self._stored, header, tile.top // height, -(-tile.bottom // height))
            parts[leaf] = rows[:, tile.left // width : -(-tile.right // width)].contiguous()
        if num_codes == 8:
            parts["weight_shape"] = torch.tensor([tile.bottom - tile.top, tile.right - tile.left])
        return parts


def tile_of(name: str, shape: tuple[int, ...], height: int, width: int) -> Tile:
    """The tile of a weight: `height` rows, whole groups of `width` columns, drawn by its name."""
    rows, columns = shape
    drawn = zlib.crc32(name.encode())
    top = drawn % -(-rows // height) * height
    count = max(1, TILE_COLUMNS // width) if height == LEAST_ROWS else 1
    groups = -(-columns // width)
    left = (drawn >> 16) % max(1, groups - count + 1) * width
    return Tile(top, min(rows, top + height), left, min(columns, left + count * width))


def rows_of(reader: StoredReader, header: TensorHeader, begin: int, end: int) -> Tensor:
    """Rows [begin, end) of a stored tensor, along its first dimension."""
    return torch.from_numpy(reader.read_rows(header.name, begin, end)).view(TORCH_DTYPES[header.dtype])


def _equal(stored: Any, made: Tensor) -> bool:
    """Bit by bit."""
    if not isinstance(stored, Tensor) or (stored.dtype, stored.shape) != (made.dtype, made.shape):
        return False
    # cloned, because a row of one element may have any stride
    flat = (part.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for part in (stored, made))
    return bool(torch.equal(*flat))
